"""What Sluice takes for granted of SGLang, beyond what its own engines do too (that is in the conformance tests).

Each test pins one behaviour of the release that its id names. When a newer one fails here, the message says which
assumption has to be looked at.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import aiohttp
import pytest

from models.engines.protocol import EXPECTED_SGLANG, GenerateOutput, GenerateRequest, VersionSpan
from models.engines.streamed import PartialOutputs
from tests.models.engines.conftest import opened
from tests.models.engines.forward_reference import gaps
from tests.models.engines.harness import Target, ask, generating, idle, post, streamed, until
from tests.sglang_server import CONTEXT, ON_SGLANG

pytestmark = ON_SGLANG
TOLERANCE = 1e-5


def pinned(holds: bool, behaviour: str) -> None:
    assert holds, f"SGLang {EXPECTED_SGLANG}: {behaviour}"


@pytest.fixture(params=[pytest.param("sglang", id=f"sglang-{EXPECTED_SGLANG}")])
async def real(request: pytest.FixtureRequest) -> AsyncIterator[Target]:
    """Without overlap scheduling."""
    async with opened(request.param, request) as target:
        yield target


@pytest.fixture(params=[pytest.param("sglang_overlap", id=f"sglang-{EXPECTED_SGLANG}", marks=pytest.mark.full)])
async def overlapping(request: pytest.FixtureRequest) -> AsyncIterator[Target]:
    """With overlap scheduling, SGLang's default."""
    async with opened(request.param, request) as target:
        yield target


def send(target: Target, request: GenerateRequest) -> asyncio.Future[list[GenerateOutput]]:
    return asyncio.ensure_future(target.client.generate(request))


async def under_way(
    target: Target, tokens: int, rid: str | None = None
) -> tuple[asyncio.Future[list[GenerateOutput]], PartialOutputs]:
    """A long request, once so many of its tokens have come."""
    partial, request = PartialOutputs(), ask([1, 2, 3], rid=rid, max_new_tokens=900)
    task = asyncio.ensure_future(target.client.generate(request, partial=partial))
    await streamed(partial, tokens)
    return task, partial


async def status(target: Target, path: str) -> int:
    async with aiohttp.ClientSession() as session, session.get(target.url + path) as response:
        return response.status


async def test_the_version_is_the_expected_one(real: Target) -> None:
    info = await real.client.server_info()
    pinned(info.version == EXPECTED_SGLANG, f"this is {info.version}; the tests below may tell what changed")
    pinned(info.disable_overlap_schedule is True, "server_info names disable_overlap_schedule")
    pinned(info.incremental_streaming_output is True, "server_info names incremental_streaming_output")
    pinned(not await real.client.has_early_boundaries("in_place"), "boundaries are exact without overlap")


async def test_health_and_readiness_during_a_pause(real: Target) -> None:
    for mode in ("in_place", "retract", "abort"):
        await real.client.pause(mode)  # type: ignore[arg-type]
        found = [await status(real, path) for path in ("/health", "/ready")]
        await real.client.resume()
        pinned(found == [200, 503], "/health stays 200 while paused (without its generation), /ready says 503")
        pinned(await status(real, "/ready") == 200, "/ready is 200 again after the pause")


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_what_comes_during_a_pause_waits_where_nothing_finds_it(real: Target, mode: str) -> None:
    await real.client.pause(mode)  # type: ignore[arg-type]
    waiting = send(real, ask([1, 2, 3], rid="waits-here"))
    await asyncio.sleep(0.3)
    load = (await real.client.loads())[0]
    await real.client.abort("waits-here")
    await real.client.abort()
    await asyncio.sleep(0.3)
    done = waiting.done()
    await real.client.resume()
    [output] = await waiting
    pinned(load.num_waiting_reqs == 0, "requests that came during a pause are not counted as waiting")
    pinned(not done and not output.aborted, "an abort does not find a request that came during a pause")


async def test_an_abort_needs_the_exact_id_and_samples_have_their_own(real: Target) -> None:
    one = send(real, ask([1, 2, 3], rid="prefix-1", max_new_tokens=300))
    group = send(real, ask([4, 5, 6], rid="group-1", n=2, max_new_tokens=300))
    await generating(real.client, tokens=20)
    for rid in ("prefix", "group-1"):
        await real.client.abort(rid)
    pinned(not (await one)[0].aborted, "an abort by a prefix of the id ends nothing")
    pinned(not any(o.aborted for o in await group), "an abort by the id of a request with n > 1 ends no sample")
    ids = {output.meta_info.id for output in await group}
    pinned(len(ids) == 2 and "group-1" not in ids, "the samples of a request have ids of their own")


async def test_an_abort_of_a_retracted_request_keeps_what_was_streamed(real: Target) -> None:
    task, partial = await under_way(real, 50, "retracted")
    await real.client.pause("retract")
    await real.client.abort("retracted")
    [output] = await task
    await real.client.resume()
    pinned(output.aborted, "an abort finds a request that was retracted, also during the pause")
    pinned(len(output.output_ids) == partial.tokens, "it answers with what had been streamed")
    pinned(float(gaps(real.model, [1, 2, 3], output).max()) < TOLERANCE, "its log-probs belong to its tokens")


async def test_an_abort_of_a_retracted_request_that_does_not_stream_loses_tokens(real: Target) -> None:
    task = send(real, ask([1, 2, 3], max_new_tokens=900))
    beside, _ = await under_way(real, 60)
    await real.client.pause("retract")
    await real.client.abort()
    [output], _ = await task, await beside
    await real.client.resume()
    pinned(output.aborted and len(output.output_ids) % 50 == 0, "it answers with a multiple of 50 tokens")


async def test_a_lost_connection_ends_a_request(real: Target) -> None:
    for partial in (PartialOutputs(), None):
        task = asyncio.ensure_future(real.client.generate(ask([1, 2, 3], max_new_tokens=1000), partial=partial))
        await generating(real.client, tokens=20)
        await real.client.pause("in_place")
        task.cancel()
        await asyncio.sleep(0.1)
        await real.client.resume()
        await until(lambda: idle(real), timeout_s=30)


async def test_shapes_of_refusals(real: Target) -> None:
    body = {"model_path": "/nowhere", "weight_version": "lost"}
    code, raw = await post(real, "/update_weights_from_disk", body)
    update = json.loads(raw)
    assert code == 400
    pinned(update["success"] is False and "message" in update, "an update answers {'success': false, 'message': ...}")
    pinned((await real.client.model_info()).weight_version == "first", "a refused update leaves the label")
    assert (await post(real, "/abort_request", {}))[0] == 200


async def test_a_few_tokens_of_the_context_are_kept_back(real: Target) -> None:
    async def ask_for(prompt: int, new: int) -> tuple[int, int]:
        status, raw = await post(real, "/generate", ask([1] * prompt, max_new_tokens=new))
        return status, len(json.loads(raw).get("output_ids", ()))

    pinned(await ask_for(CONTEXT - 7, 1) == (200, 1), "the longest prompt is the context less 7 tokens")
    pinned((await ask_for(CONTEXT - 6, 1))[0] == 400, "a longer prompt is refused, also if all of it would fit")
    pinned(await ask_for(CONTEXT - 20, 20) == (200, 18), "a response ends 2 tokens before the context does")


async def test_only_updates_that_name_a_label_change_it(real: Target) -> None:
    client = real.client
    before = await client.weights_checker()
    assert (await post(real, "/update_weights_from_disk", {"model_path": real.other}))[0] == 200
    pinned((await client.model_info()).weight_version == "first", "an update without a label keeps the old one")
    after = await client.weights_checker()
    pinned(after != before and after[0].keys() == before[0].keys(), "the checksums tell the weights apart")
    await client.update_weights_from_disk(real.model, "first")
    pinned(await client.weights_checker() == before, "equal weights have equal checksums")


async def test_a_change_of_the_label_alone_aborts_everything_unless_the_request_forbids_it(real: Target) -> None:
    for body, aborted in (({}, True), ({"abort_all_requests": False}, False)):
        task = send(real, ask([1, 2, 3], max_new_tokens=900))
        await generating(real.client, tokens=20)
        assert (await post(real, "/update_weight_version", {"new_version": "renamed", **body}))[0] == 200
        pinned((await task)[0].aborted is aborted, "update_weight_version aborts by default")


async def test_an_update_that_could_not_flush_is_done_and_the_client_sets_the_label(real: Target) -> None:
    task, partial = await under_way(real, 30)
    await real.client.pause("in_place")
    body = {"model_path": real.other, "weight_version": "second", "flush_cache": True}
    code, raw = await post(real, "/update_weights_from_disk", body)
    label = (await real.client.model_info()).weight_version
    pinned(code == 400 and b"Weights were updated, but" in raw, "an update in place that is to flush answers 400")
    pinned(label == "first", "model_info and streams then still name the old label")
    updated = await real.client.update_weights_from_disk(real.other, "second")
    assert not updated.cache_flushed
    assert (await real.client.model_info()).weight_version == "second"
    await real.client.resume()
    await streamed(partial, partial.tokens + 20)
    await real.client.abort()
    [output] = await task
    assert [span.version for span in output.version_spans] == ["first", "second"]


async def test_prefixes_of_older_weights_stay_in_the_cache_after_an_update_in_place(real: Target) -> None:
    prompt = list(range(1, 41))

    await real.client.generate(ask(prompt, extra_key="first"))
    await real.client.pause("in_place")
    await real.client.update_weights_from_disk(real.other, "second", flush_cache=False)
    await real.client.resume()
    [stale] = await real.client.generate(ask(prompt, extra_key="first"))
    [salted] = await real.client.generate(ask(prompt, extra_key="second"))
    pinned(stale.version_spans == [VersionSpan("second", 0, 8)], "a stale prefix does not show in the spans")
    pinned(stale.meta_info.cached_tokens == 39, "an update without a flush leaves prefixes of older weights")
    pinned(float(gaps(real.other, prompt, stale).max()) > 1e-3, "what follows a stale prefix is of neither version")
    pinned(salted.meta_info.cached_tokens == 0, "another extra_key finds no prefix")
    pinned(float(gaps(real.other, prompt, salted).max()) < TOLERANCE, "a salted request is of the new version")


async def test_a_prefill_under_way_at_a_pause_in_place_is_labelled_as_new_with_overlap(overlapping: Target) -> None:
    """No correction can see this one: spans are true under in_place only with --disable-overlap-schedule."""
    client, seen = overlapping.client, 0
    for attempt in range(40):
        await client.update_weights_from_disk(overlapping.model, "first")
        prompts = [[attempt, index, *range(30)] for index in range(6)]
        tasks = [send(overlapping, ask(prompt, max_new_tokens=4)) for prompt in prompts]
        await asyncio.sleep(0.002 + 0.002 * (attempt % 8))
        await client.pause("in_place")
        await client.update_weights_from_disk(overlapping.other, "second", flush_cache=False)
        await client.resume()
        for prompt, [output] in zip(prompts, await asyncio.gather(*tasks), strict=True):
            only_new = output.version_spans == [VersionSpan("second", 0, 4)]
            seen += only_new and float(gaps(overlapping.model, prompt, output)[0]) < TOLERANCE
        if seen:
            break
    pinned(seen > 0, "the first token of a prefill under way is of the old weights, and its span says new")


async def test_seeds_are_ignored(real: Target) -> None:
    request = ask([1, 2, 3], max_new_tokens=30, sampling_seed=5)
    [one], [two] = await real.client.generate(request), await real.client.generate(request)
    pinned(one.output_ids != two.output_ids, "a seed changes nothing without deterministic inference")


async def test_loads_have_what_an_engine_is_judged_by(real: Target) -> None:
    async with aiohttp.ClientSession() as session, session.get(real.url + "/v1/loads") as response:
        [load] = (await response.json())["loads"]
    names = {"dp_rank", "num_running_reqs", "num_waiting_reqs"}
    names |= {"num_used_tokens", "max_total_num_tokens", "token_usage"}
    pinned(names <= load.keys(), f"/v1/loads has {sorted(names)}")
    pinned("busy_s" not in load, "there is no time of computing among them: busy_s is ours")
    assert [await status(real, path) for path in ("/get_load", "/get_weight_version")] == [404, 404]
