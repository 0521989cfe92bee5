"""The protocol, as every engine behind the client must speak it. See `harness.Capabilities` for the differences."""

from __future__ import annotations

import asyncio
import json
import re

import aiohttp
import numpy as np
import pytest

from models.engines.answers import input_scores
from models.engines.client import EngineClient
from models.engines.protocol import EXPECTED_SGLANG, GenerateRequest, SamplingParams, VersionSpan
from models.engines.streamed import PartialOutputs
from models.errors import EngineAborted, EngineRefused, EngineTimeout
from tests.models.engines.forward_reference import gaps
from tests.models.engines.harness import Target, ask, generating, idle, post, until
from tests.sglang_server import CONTEXT


async def test_single_request_has_tokens_log_probs_and_spans(target: Target) -> None:
    [output] = await target.client.generate(ask([5, 6, 7], rid="r-single", max_new_tokens=12))
    meta = output.meta_info
    assert len(output.output_ids) == 12
    assert meta.id == "r-single"
    assert (meta.prompt_tokens, meta.completion_tokens) == (3, 12)
    assert (meta.finish_reason.type, meta.finish_reason.length) == ("length", 12)
    assert [token for _, token, _ in meta.output_token_logprobs] == output.output_ids
    assert all(value <= 0.0 for value in output.output_log_probs)
    assert output.version_spans == [VersionSpan(target.label, 0, 12)]
    assert meta.weight_version == target.label
    assert meta.num_retractions == 0


async def test_samples_and_batches_come_as_a_flat_list_in_order(target: Target) -> None:
    outputs = await target.client.generate(ask([[1, 2, 3], [4, 5]], n=3))
    assert [output.meta_info.prompt_tokens for output in outputs] == [3, 3, 3, 2, 2, 2]
    assert len({tuple(output.output_ids) for output in outputs}) > 1
    status, single = await post(target, "/generate", ask([1, 2]))
    assert (status, type(json.loads(single))) == (200, dict)
    for prompt, n in (([1, 2], 2), ([[1, 2]], 1)):
        _, several = await post(target, "/generate", ask(prompt, n=n))
        assert [type(entry) for entry in json.loads(several)] == [dict] * n


async def test_unknown_sampling_field_is_refused_in_sglangs_words(target: Target) -> None:
    status, raw = await post(target, "/generate", {"input_ids": [1], "sampling_params": {"bogus": 1}})
    assert status == 400
    error = json.loads(raw)["error"]
    assert isinstance(error, str)
    assert error.startswith("unknown field `bogus`, expected one of `")
    status, _ = await post(
        target, "/generate", {"input_ids": [1], "bogus": 1, "sampling_params": {"max_new_tokens": 1}}
    )
    assert status == 200  # unknown fields beside it are ignored


async def test_a_prompt_that_is_too_long_is_refused(target: Target) -> None:
    words = rf"400: The input \({CONTEXT + 5} tokens\) is longer than the model's context"
    for partial in (None, PartialOutputs()):
        with pytest.raises(EngineRefused, match=words):
            await target.client.generate(ask([1] * (CONTEXT + 5)), partial=partial)
    [full] = await target.client.generate(ask([1] * (CONTEXT - 8), max_new_tokens=6))
    assert len(full.output_ids) == 6


async def test_what_no_engine_can_serve_is_refused_with_the_reason(target: Target) -> None:
    """By the engine: the client would not send all of it."""
    bad_ids = [(ask([1, 99999]), "contain 99999, outside the vocabulary of 264 tokens"), (ask([-1]), "contain -1, ")]
    for request, words in (
        (ask([1] * 10, max_new_tokens=CONTEXT), "maximum context length"),
        (ask([1, 2], temperature=-1.0), "temperature"),
        (ask([1, 2], top_p=0.0), "top_p"),
        (ask([1, 2], top_k=0), "top_k"),
        (ask([1, 2], min_new_tokens=9, max_new_tokens=8), "min_new_tokens"),
        *(bad_ids if target.can.refuses_bad_ids else ()),  # else one would end the engine
    ):
        status, raw = await post(target, "/generate", request)
        assert status == 400
        assert words in json.loads(raw)["error"]["message"]
    for body in ({"input_ids": []}, {"input_ids": [[1], []]}, {}, {"input_ids": [1, [2]]}):
        if body != {"input_ids": [[1], []]} or target.can.refuses_bad_ids:
            assert (await post(target, "/generate", body))[0] == 400


async def test_seeds_are_honoured_whatever_else_is_in_the_batch(target: Target) -> None:
    if not target.can.seeds:
        pytest.skip("seeds are ignored")
    wanted = ask([4, 5, 6], n=4, max_new_tokens=30, sampling_seed=11)
    alone = await target.client.generate(wanted)
    async with asyncio.TaskGroup() as group:
        for index in range(8):
            group.create_task(target.client.generate(ask([index + 1, 2], max_new_tokens=25 + index, top_p=0.9)))
        crowded = await target.client.generate(wanted)
    assert [output.output_ids for output in crowded] == [output.output_ids for output in alone]
    assert len({tuple(output.output_ids) for output in alone}) == 4


async def test_log_probs_are_after_temperature_and_before_truncation(target: Target) -> None:
    if not target.can.scores_as_it_samples:
        pytest.skip("its log-probs are no model's")
    for params in ({"temperature": 0.5}, {"top_k": 5}, {"top_p": 0.3}, {"min_p": 0.5, "temperature": 2.0}):
        [output] = await target.client.generate(ask([3, 1, 4], max_new_tokens=30, **params))
        assert float(gaps(target.model, [3, 1, 4], output, params.get("temperature", 1.0)).max()) < 1e-5


async def test_equal_prompts_are_found_in_the_cache_but_not_across_keys(target: Target) -> None:
    prompt = list(range(1, 41))
    [first] = await target.client.generate(ask(prompt))
    [second] = await target.client.generate(ask(prompt))
    [third] = await target.client.generate(ask(prompt, extra_key="v2"))
    assert [output.meta_info.cached_tokens for output in (first, second, third)] == [0, 39, 0]
    outputs = await target.client.generate(ask(list(range(41, 81)), n=8))
    cached = [output.meta_info.cached_tokens for output in outputs]
    assert cached[0] in (0, 39)  # SGLang computes the prompt in a request of its own before all samples
    assert cached[1:] == [39] * 7


async def test_stop_token_ids_end_a_response(target: Target) -> None:
    if not target.can.contents_stop:
        pytest.skip("contents stop nothing")
    greedy = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": False}
    [free] = await target.client.generate(ask([1, 2, 3], **greedy))
    stop = free.output_ids[5]
    first = free.output_ids.index(stop)
    [output] = await target.client.generate(ask([1, 2, 3], stop_token_ids=[stop], **greedy))
    assert output.output_ids == free.output_ids[: first + 1]
    assert (output.meta_info.finish_reason.type, output.meta_info.finish_reason.matched) == ("stop", stop)


async def test_stop_strings_end_a_response_and_leave_the_text(target: Target) -> None:
    if not target.can.contents_stop:
        pytest.skip("contents stop nothing")
    greedy = {"temperature": 0.0, "max_new_tokens": 30}
    [free] = await target.client.generate(ask([70, 71, 72], **greedy))
    start = next(index for index in range(3, 28) if "\ufffd" not in free.text[index : index + 2])
    stop = free.text[start : start + 2]
    [trimmed] = await target.client.generate(ask([70, 71, 72], stop=stop, **greedy))
    [whole] = await target.client.generate(ask([70, 71, 72], stop=[stop], no_stop_trim=True, **greedy))
    assert trimmed.text == free.text[: free.text.find(stop)]
    assert whole.text == trimmed.text + stop
    assert trimmed.output_ids == whole.output_ids == free.output_ids[: len(whole.output_ids)]
    assert trimmed.meta_info.finish_reason.matched == stop


async def test_text_prompts_are_tokenized_by_the_server(target: Target) -> None:
    params = SamplingParams(max_new_tokens=2, ignore_eos=True)
    [output] = await target.client.generate(GenerateRequest(text="abc", sampling_params=params))
    assert output.meta_info.prompt_tokens == 3
    outputs = await target.client.generate(GenerateRequest(text=["abc", "ab"], sampling_params=[params, params]))
    assert [entry.meta_info.prompt_tokens for entry in outputs] == [3, 2]
    assert await target.client.tokenize("ab c") == [97, 98, 32, 99]


async def test_information_routes(target: Target) -> None:
    info = await target.client.model_info()
    assert info.model_path == target.model
    assert info.weight_version == target.label
    served = json.loads(await target.client.call("GET", "/v1/models", None, 10.0))["data"]
    assert [card["max_model_len"] for card in served] == [CONTEXT]
    assert (await target.client.server_info()).version.startswith(EXPECTED_SGLANG)
    await target.client.generate(ask([1, 2, 3]))
    async with aiohttp.ClientSession() as session, session.get(target.url + "/metrics") as response:
        text = await response.text()
    assert re.search(r"^sglang:generation_tokens_total(\{.*\})? [1-9]", text, re.MULTILINE)
    assert re.search(r"^sglang:num_running_reqs(\{.*\})? 0", text, re.MULTILINE)


async def test_defaults_of_the_protocol(target: Target) -> None:
    assert SamplingParams().max_new_tokens == 128
    request = GenerateRequest(input_ids=[1, 2], sampling_params=SamplingParams(ignore_eos=True))
    [output] = await target.client.generate(request)
    assert len(output.output_ids) == 128
    assert not output.meta_info.output_token_logprobs
    with pytest.raises(ValueError, match="send return_logprob=True"):
        _ = output.output_log_probs


# Pause, abort, update and what becomes of requests meanwhile: the same on every engine behind the client.


async def test_abort_returns_partial_output_with_status_200(target: Target) -> None:
    async with asyncio.TaskGroup() as group:
        long = group.create_task(target.client.generate(ask([1, 2, 3], rid="abort-me-1", max_new_tokens=900)))
        other = group.create_task(target.client.generate(ask([1, 2, 3], rid="keep-me-1", max_new_tokens=300)))
        await generating(target.client, tokens=40)
        await target.client.abort("abort-me" if target.can.aborts_by_prefix else "abort-me-1")
    [partial] = long.result()
    assert partial.aborted
    assert partial.meta_info.finish_reason.message == "Aborted"
    assert 0 < len(partial.output_ids) < 900
    assert len(partial.output_log_probs) == len(partial.output_ids)
    assert partial.version_spans[-1].end == len(partial.output_ids)
    assert not other.result()[0].aborted
    assert len(other.result()[0].output_ids) == 300
    [rest] = await target.client.generate(ask([1, 2, 3, *partial.output_ids], max_new_tokens=10))
    assert rest.meta_info.prompt_tokens == 3 + len(partial.output_ids)
    assert len(rest.output_ids) == 10


async def test_abort_of_one_rid_ends_all_its_samples(target: Target) -> None:
    if not target.can.aborts_by_prefix:
        pytest.skip("the samples of a request have ids of their own")
    async with asyncio.TaskGroup() as group:
        task = group.create_task(target.client.generate(ask([1, 2], rid="group-7", n=4, max_new_tokens=900)))
        await generating(target.client, tokens=40)
        await target.client.abort("group-7")
    assert [output.aborted for output in task.result()] == [True] * 4


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_update_under_pause_loses_no_request(target: Target, mode: str) -> None:
    client = target.client
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(client.generate(ask([1, 2, index], max_new_tokens=600))) for index in range(3, 6)]
        await generating(client, tokens=60, requests=3)
        await client.pause(mode)  # type: ignore[arg-type]
        assert not await client.ready()
        assert await client.health()
        updated = await client.update_weights_from_disk(target.other, "w2", flush_cache=mode == "retract")
        assert updated.cache_flushed == (mode == "retract")
        assert (await client.model_info()).weight_version == "w2"
        await client.resume()
        assert await client.ready()
    for [output] in (task.result() for task in tasks):
        assert len(output.output_ids) == 600
        spans = output.version_spans
        assert [span.version for span in spans] == [target.label, "w2"]
        assert (spans[0].start, spans[0].end, spans[1].end) == (0, spans[1].start, 600)
        assert 0 < spans[0].end < 600
        assert output.meta_info.weight_version == "w2"
        assert output.meta_info.num_retractions == (1 if mode == "retract" else 0)
    [fresh] = await client.generate(ask([1, 2, 3]))
    assert fresh.version_spans == [VersionSpan("w2", 0, 8)]


async def test_flush_is_refused_while_something_runs(target: Target) -> None:
    client = target.client
    async with asyncio.TaskGroup() as group:
        task = group.create_task(client.generate(ask([1, 2], max_new_tokens=900)))
        await generating(client)
        await client.pause("in_place")
        with pytest.raises(EngineRefused, match="Flush cache failed") as refused:
            await client.call("POST", "/flush_cache", {}, 10.0)
        assert refused.value.status == 400
        await client.abort()
        await client.resume()
        await task
    await until(lambda: idle(target))
    await client.call("POST", "/flush_cache", {}, 10.0)


async def test_update_without_pause_waits_and_finishes_on_old_weights(target: Target) -> None:
    client = target.client
    async with asyncio.TaskGroup() as group:
        running = group.create_task(client.generate(ask([1, 2], max_new_tokens=600)))
        await generating(client)
        update = group.create_task(client.update_weights_from_disk(target.other, "w2"))
        await asyncio.sleep(0.02)
        later = group.create_task(client.generate(ask([3, 4])))
        await update
    assert running.result()[0].version_spans == [VersionSpan(target.label, 0, 600)]
    assert later.result()[0].version_spans == [VersionSpan("w2", 0, 8)]


async def test_update_may_abort_what_runs(target: Target) -> None:
    async with asyncio.TaskGroup() as group:
        running = group.create_task(target.client.generate(ask([1, 2], max_new_tokens=900)))
        await generating(target.client)
        body = {"model_path": target.other, "weight_version": "w2", "abort_all_requests": True}
        status, raw = await post(target, "/update_weights_from_disk", body)
    # SGLang may find the aborted request still in its batch, and then says that it updated without flushing.
    assert (status, json.loads(raw)["success"]) == (200, True) or b"Weights were updated" in raw
    assert running.result()[0].aborted


async def test_a_client_that_leaves_aborts_its_requests(target: Target) -> None:
    if not target.can.notices_disconnects:
        pytest.skip("looks for lost connections every few seconds only")
    task = asyncio.ensure_future(target.client.generate(ask([1, 2], n=4, max_new_tokens=900)))
    await generating(target.client)
    task.cancel()
    await until(lambda: idle(target))
    metrics = (await target.client.call("GET", "/metrics", None, 10.0)).decode()
    made = re.search(r"^sglang:generation_tokens_total(?:\{.*\})? (\d+)", metrics, re.MULTILINE)
    assert made is not None
    assert int(made[1]) < 4 * 900, "they ran to their end"


async def test_timeout_is_typed_and_aborts(target: Target) -> None:
    await target.client.pause("in_place")
    async with EngineClient(target.url, timeout_s=0.1) as hasty:
        with pytest.raises(EngineTimeout, match=r"timeout_s=0\.1"):
            await hasty.generate(ask([1, 2]))
    await until(lambda: idle(target))
    await target.client.resume()


async def test_tensor_routes_need_their_bracket(target: Target) -> None:
    body = {"serialized_named_tensors": ["AAAA"]}
    status, raw = await post(target, "/update_weights_from_tensor", body)
    assert status == 400
    assert "must run between begin_weight_update() and end_weight_update()" in raw.decode()
    assert (await post(target, "/begin_weight_update", {}))[0] == 200
    assert (await post(target, "/end_weight_update", {}))[0] == 200


async def test_relabelling_changes_the_version_only(target: Target) -> None:
    body = {"new_version": "again", "abort_all_requests": False}
    assert (await post(target, "/update_weight_version", body))[0] == 200
    [output] = await target.client.generate(ask([1, 2]))
    assert output.version_spans == [VersionSpan("again", 0, 8)]


# Scoring given tokens without generating any, as every engine behind the client must do it.


IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


def scoring(start: int, **params: object) -> GenerateRequest:
    return ask([*IDS], score_from=start, **{"max_new_tokens": 0, **params})


async def test_the_entry_of_the_first_position_is_never_a_number(target: Target) -> None:
    for start in (0, 1, 5, 11):
        [output] = await target.client.generate(scoring(start))
        meta = output.meta_info
        entries = meta.input_token_logprobs
        assert [token for _, token, _ in entries] == IDS[start:]
        assert entries[0][0] is None
        assert all(value is not None and value < 0.0 for value, _, _ in entries[1:])
        assert output.output_ids == meta.output_token_logprobs == []
        assert (meta.prompt_tokens, meta.completion_tokens) == (12, 0)
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
    for new in (0, 5):  # the temperature of sampling leaves scores alone
        [cool] = await target.client.generate(scoring(0, temperature=0.3, max_new_tokens=new))
        np.testing.assert_allclose(input_scores("", cool, 11), whole, atol=1e-5)


async def test_a_cached_prefix_ends_where_the_scores_begin(target: Target) -> None:
    ids = [*range(1, 61)]
    asked = [ask(ids, score_from=start, max_new_tokens=0) for start in (40, 40, 0)]
    [first], [again], [whole] = [await target.client.generate(request) for request in asked]
    assert (first.meta_info.cached_tokens, again.meta_info.cached_tokens) == (0, 40)
    np.testing.assert_allclose(input_scores("", first, 19), input_scores("", again, 19), atol=1e-5)
    assert whole.meta_info.cached_tokens == 0, "all logits are read, so nothing can come from the cache"


async def test_a_temperature_of_scores_that_divides_nothing_is_refused(target: Target) -> None:
    if not target.can.scores_at_temperature:
        pytest.skip("the field is not known here")
    with pytest.raises(EngineRefused, match=r"input_logprob_temperature=0\.0 must be above 0"):
        await target.client.score(IDS, 1, temperature=0.0)


async def test_what_was_sampled_is_scored_as_it_was_sampled(target: Target) -> None:
    for temperature, alike in ((1.0, target.can.scores_as_it_samples), (0.5, target.can.scores_at_temperature)):
        [output] = await target.client.generate(ask(IDS, max_new_tokens=30, temperature=temperature))
        found = await target.client.score([*IDS, *output.output_ids], len(IDS), temperature=temperature)
        gap = float(np.abs(found - output.output_log_probs).max())
        assert (gap < 1e-4) is alike, gap


async def test_scoring_joins_what_is_running(target: Target) -> None:
    alone = [await target.client.score(IDS[:count], 1) for count in range(2, 10)]

    seen = asyncio.Event()

    async def generate() -> set[int]:
        """One after the other until one is seen, and one more: all may end between two looks at the engine's load."""
        lengths, left = set[int](), 1
        while left:
            left -= seen.is_set()
            [output] = await target.client.generate(ask([7, 7, 7], max_new_tokens=400))
            lengths.add(len(output.output_ids))
        return lengths

    async with asyncio.TaskGroup() as group:
        running = group.create_task(generate())
        await generating(target.client)
        seen.set()
        scores = [group.create_task(target.client.score(IDS[:count], 1)) for count in range(2, 10)]
    for task, expected in zip(scores, alone, strict=True):
        np.testing.assert_allclose(task.result(), expected, atol=1e-4)
    assert running.result() == {400}


async def test_an_aborted_scoring_says_so(target: Target) -> None:
    if not target.can.aborts_while_paused:
        pytest.skip("an abort does not find what waits for the end of a pause")
    await target.client.pause("in_place")
    waiting = asyncio.ensure_future(target.client.score(IDS, 1))

    async def waits() -> bool:
        return (await target.client.loads())[0].num_waiting_reqs > 0

    await until(waits)
    await target.client.abort()
    with pytest.raises(EngineAborted, match="aborted the request"):
        await waiting
