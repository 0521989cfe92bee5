"""Scoring given tokens without generating any, as every engine behind the client must do it."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest

from models.engines.client import EngineClient
from models.engines.protocol import GenerateRequest
from models.errors import EngineAborted, EngineRefused
from tests.models.engines.harness import Target, ask, generating, until

IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


def scoring(start: int, **params: object) -> GenerateRequest:
    return msgspec.structs.replace(ask([*IDS], **{"max_new_tokens": 0, **params}), logprob_start_len=start)


@pytest.mark.parametrize("start", [0, 1, 5, 11])
async def test_the_entry_of_the_first_position_is_never_a_number(target: Target, start: int) -> None:
    [output] = await target.client.generate(scoring(start))
    meta = output.meta_info
    entries = meta.input_token_logprobs
    assert entries is not None
    assert [token for _, token, _ in entries] == IDS[start:]
    assert entries[0][0] is None
    assert all(value is not None and value < 0.0 for value, _, _ in entries[1:])
    assert output.output_ids == []
    assert meta.output_token_logprobs == []
    assert (meta.prompt_tokens, meta.completion_tokens) == (12, 0)
    assert meta.finish_reason is not None
    assert (meta.finish_reason.type, meta.finish_reason.length) == ("length", 0)


async def test_a_start_behind_the_prompt_is_refused_and_one_at_its_end_scores_nothing(target: Target) -> None:
    [output] = await target.client.generate(scoring(len(IDS)))
    assert output.meta_info.input_token_logprobs == []
    with pytest.raises(EngineRefused, match=r"logprob_start_len=13 is higher than the number of input tokens"):
        await target.client.generate(scoring(len(IDS) + 1))


async def test_scores_do_not_hang_on_the_start_nor_on_the_cache(target: Target) -> None:
    whole = await target.client.score(IDS, 1)
    assert (whole.shape, whole.dtype) == ((11,), np.float32)
    for start in (2, 6, 11):
        again = await target.client.score(np.array(IDS, dtype=np.int32), start)
        np.testing.assert_allclose(again, whole[start - 1 :], atol=1e-5)
    assert len(await target.client.score(IDS, len(IDS))) == 0


async def test_a_cached_prefix_ends_where_the_scores_begin(target: Target) -> None:
    ids = [*range(1, 61)]
    first = await target.client.generate(msgspec.structs.replace(ask(ids, max_new_tokens=0), logprob_start_len=40))
    again = await target.client.generate(msgspec.structs.replace(ask(ids, max_new_tokens=0), logprob_start_len=40))
    assert first[0].meta_info.cached_tokens == 0
    assert again[0].meta_info.cached_tokens == 40
    np.testing.assert_allclose(first[0].input_log_probs(19), again[0].input_log_probs(19), atol=1e-5)


async def test_sampling_temperature_leaves_scores_alone(target: Target) -> None:
    raw = await target.client.score(IDS, 1)
    [cool] = await target.client.generate(scoring(0, temperature=0.3))
    [more] = await target.client.generate(scoring(0, temperature=0.3, max_new_tokens=5))
    for output in (cool, more):
        np.testing.assert_allclose(output.input_log_probs(11), raw, atol=1e-5)


async def test_a_temperature_of_scores_that_divides_nothing_is_refused(target: Target) -> None:
    if not target.can.scores_at_temperature:
        pytest.skip("the field is not known here")
    with pytest.raises(EngineRefused, match=r"input_logprob_temperature=0\.0 must be above 0"):
        await target.client.score(IDS, 1, temperature=0.0)


async def test_what_was_sampled_is_scored_as_it_was_sampled(target: Target) -> None:
    if not target.can.scores_as_it_samples:
        pytest.skip("scores are of another make")
    [output] = await target.client.generate(ask(IDS, max_new_tokens=30))
    found = await target.client.score([*IDS, *output.output_ids], len(IDS))
    np.testing.assert_allclose(found, output.output_log_probs, atol=1e-4)


async def test_scores_at_the_temperature_of_the_samples(target: Target) -> None:
    [output] = await target.client.generate(ask(IDS, max_new_tokens=30, temperature=0.5))
    found = await target.client.score([*IDS, *output.output_ids], len(IDS), temperature=0.5)
    gap = float(np.abs(found - output.output_log_probs).max())
    assert (gap < 1e-4) is target.can.scores_at_temperature, gap


async def test_scoring_joins_what_is_running(target: Target) -> None:
    alone = [await target.client.score(IDS[:count], 1) for count in range(2, 10)]

    async def generate() -> list[int]:
        """Several in a row: one alone may end between two looks at the engine's load."""
        outputs = [await target.client.generate(ask([7, 7, 7], max_new_tokens=400)) for _ in range(4)]
        return [len(output.output_ids) for [output] in outputs]

    async with asyncio.TaskGroup() as group:
        running = group.create_task(generate())
        await generating(target.client)
        scores = [group.create_task(target.client.score(IDS[:count], 1)) for count in range(2, 10)]
    for task, expected in zip(scores, alone, strict=True):
        np.testing.assert_allclose(task.result(), expected, atol=1e-4)
    assert running.result() == [400] * 4


async def test_an_aborted_scoring_says_so(target: Target) -> None:
    if not target.can.aborts_while_paused:
        pytest.skip("an abort does not find what waits for the end of a pause")
    await target.client.pause("in_place")
    try:
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(_aborted(target.client))

            async def waits() -> bool:
                return (await target.client.loads())[0].num_waiting_reqs > 0

            await until(waits)
            await target.client.abort("score-to-end")
        assert waiting.result()
    finally:
        await target.client.resume()


async def _aborted(client: EngineClient) -> bool:
    with pytest.raises(EngineAborted, match="aborted the request"):
        await client.score(IDS, 1, rid="score-to-end")
    return True


async def test_text_is_tokenized_as_the_server_sees_it(target: Target) -> None:
    assert await target.client.tokenize("ab c") == [97, 98, 32, 99]


@pytest.mark.parametrize("start", [0, 13])
async def test_a_start_without_a_score_is_refused_before_it_is_sent(target: Target, start: int) -> None:
    with pytest.raises(ValueError, match="the first token has no log-prob"):
        await target.client.score(IDS, start)
