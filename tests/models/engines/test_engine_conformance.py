"""The protocol, as every engine behind the client must speak it. See `harness.Capabilities` for the differences."""

from __future__ import annotations

import asyncio
import json
import re

import aiohttp
import msgspec
import pytest

from models.engines.protocol import EXPECTED_SGLANG, GenerateRequest, SamplingParams, VersionSpan
from models.errors import EngineRefused, RequestNotSent
from tests.models.engines.harness import Target, ask, post
from tests.sglang_server import CONTEXT


async def test_single_request_has_tokens_log_probs_and_spans(target: Target) -> None:
    [output] = await target.client.generate(ask([5, 6, 7], rid="r-single", max_new_tokens=12))
    meta = output.meta_info
    assert len(output.output_ids) == 12
    assert meta.id == "r-single"
    assert (meta.prompt_tokens, meta.completion_tokens) == (3, 12)
    assert meta.finish_reason is not None
    assert (meta.finish_reason.type, meta.finish_reason.length) == ("length", 12)
    assert meta.output_token_logprobs is not None
    assert [token for _, token, _ in meta.output_token_logprobs] == output.output_ids
    assert all(value <= 0.0 for value in output.output_log_probs)
    assert output.version_spans == [VersionSpan(target.label, 0, 12)]
    assert meta.weight_version == target.label
    assert meta.num_retractions == 0


async def test_samples_and_batches_come_as_a_flat_list_in_order(target: Target) -> None:
    outputs = await target.client.generate(ask([[1, 2, 3], [4, 5]], n=3))
    assert [output.meta_info.prompt_tokens for output in outputs] == [3, 3, 3, 2, 2, 2]
    assert len({tuple(output.output_ids) for output in outputs}) > 1
    one = await target.client.generate(ask([[1, 2, 3]]))
    assert len(one) == 1


async def test_answer_is_an_object_or_a_list_as_asked(target: Target) -> None:
    status, single = await post(target, "/generate", ask([1, 2]))
    assert status == 200
    assert isinstance(json.loads(single), dict)
    _, several = await post(target, "/generate", ask([1, 2], n=2))
    assert [type(entry) for entry in json.loads(several)] == [dict, dict]
    _, batch = await post(target, "/generate", ask([[1, 2]]))
    assert len(json.loads(batch)) == 1


async def test_no_log_probs_unless_asked(target: Target) -> None:
    request = msgspec.structs.replace(ask([1, 2, 3]), return_logprob=False)
    [output] = await target.client.generate(request)
    assert not output.meta_info.output_token_logprobs
    with pytest.raises(ValueError, match="send return_logprob=True"):
        _ = output.output_log_probs


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
    with pytest.raises(
        EngineRefused, match=rf"The input \({CONTEXT + 5} tokens\) is longer than the model's context"
    ) as e:
        await target.client.generate(ask([1] * (CONTEXT + 5)))
    assert e.value.status == 400
    status, raw = await post(target, "/generate", ask([1] * (CONTEXT + 5)))
    assert status == 400
    assert "longer than" in json.loads(raw)["error"]["message"]
    with pytest.raises(EngineRefused, match="maximum context length"):
        await target.client.generate(ask([1] * 10, max_new_tokens=CONTEXT))


async def test_the_client_keeps_the_context_length(target: Target) -> None:
    target.client.limits.context_length = CONTEXT
    with pytest.raises(RequestNotSent, match=f"max_new_tokens={CONTEXT}, and the model's context length is {CONTEXT}"):
        await target.client.generate(ask([1] * 10, max_new_tokens=CONTEXT))
    [full] = await target.client.generate(ask([1] * (CONTEXT - 8), max_new_tokens=6))
    assert len(full.output_ids) == 6


async def test_bad_token_ids_are_refused(target: Target) -> None:
    if not target.can.refuses_bad_ids:
        pytest.skip("a bad id ends this engine")
    with pytest.raises(EngineRefused, match="contain 99999, outside the vocabulary of 264 tokens"):
        await target.client.generate(ask([1, 99999]))
    status, raw = await post(target, "/generate", ask([-1]))
    assert status == 400
    assert "-1, outside the vocabulary" in json.loads(raw)["error"]["message"]


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens"),
    ],
)
async def test_impossible_sampling_is_refused(target: Target, params: dict[str, object], words: str) -> None:
    with pytest.raises(EngineRefused, match=words):
        await target.client.generate(ask([1, 2], **params))


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


async def test_equal_prompts_are_found_in_the_cache_but_not_across_keys(target: Target) -> None:
    prompt = list(range(1, 41))
    [first] = await target.client.generate(ask(prompt))
    [second] = await target.client.generate(ask(prompt))
    keyed = msgspec.structs.replace(ask(prompt), extra_key="v2")
    [third] = await target.client.generate(keyed)
    assert [output.meta_info.cached_tokens for output in (first, second, third)] == [0, 39, 0]


async def test_n_samples_share_one_prefill(target: Target) -> None:
    outputs = await target.client.generate(ask(list(range(1, 41)), n=8))
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
    assert output.meta_info.finish_reason is not None
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
    assert trimmed.meta_info.finish_reason is not None
    assert trimmed.meta_info.finish_reason.matched == stop


async def test_text_prompts_are_tokenized_by_the_server(target: Target) -> None:
    params = SamplingParams(max_new_tokens=2, ignore_eos=True)
    [output] = await target.client.generate(GenerateRequest(text="abc", sampling_params=params))
    assert output.meta_info.prompt_tokens == 3
    outputs = await target.client.generate(GenerateRequest(text=["abc", "ab"], sampling_params=[params, params]))
    assert [entry.meta_info.prompt_tokens for entry in outputs] == [3, 2]


@pytest.mark.parametrize("body", [{"input_ids": []}, {"input_ids": [[1], []]}, {}, {"input_ids": [1, [2]]}])
async def test_prompts_that_are_none_are_refused(target: Target, body: dict[str, object]) -> None:
    if body == {"input_ids": [[1], []]} and not target.can.refuses_bad_ids:
        pytest.skip("accepted inside a batch")
    assert (await post(target, "/generate", body))[0] == 400


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
