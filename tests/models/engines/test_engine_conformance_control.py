"""Pause, abort, update and what becomes of requests meanwhile: the same on every engine behind the client."""

from __future__ import annotations

import asyncio
import json

import pytest

from models.engines.protocol import VersionSpan
from models.errors import EngineRefused, EngineTimeout
from tests.models.engines.harness import Target, ask, generating, idle, post, until


async def test_abort_returns_partial_output_with_status_200(target: Target) -> None:
    async with asyncio.TaskGroup() as group:
        long = group.create_task(target.client.generate(ask([1, 2, 3], rid="abort-me-1", max_new_tokens=900)))
        other = group.create_task(target.client.generate(ask([1, 2, 3], rid="keep-me-1", max_new_tokens=300)))
        await generating(target.client, tokens=40)
        await target.client.abort("abort-me" if target.can.aborts_by_prefix else "abort-me-1")
    [partial] = long.result()
    assert partial.aborted
    assert partial.meta_info.finish_reason is not None
    assert partial.meta_info.finish_reason.message == "Aborted"
    assert 0 < len(partial.output_ids) < 900
    assert len(partial.output_log_probs) == len(partial.output_ids)
    assert partial.version_spans[-1].end == len(partial.output_ids)
    assert not other.result()[0].aborted
    assert len(other.result()[0].output_ids) == 300


async def test_abort_of_one_rid_ends_all_its_samples(target: Target) -> None:
    if not target.can.aborts_by_prefix:
        pytest.skip("the samples of a request have ids of their own")
    async with asyncio.TaskGroup() as group:
        task = group.create_task(target.client.generate(ask([1, 2], rid="group-7", n=4, max_new_tokens=900)))
        await generating(target.client, tokens=40)
        await target.client.abort("group-7")
    assert [output.aborted for output in task.result()] == [True] * 4


async def test_partial_output_can_be_resumed(target: Target) -> None:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(target.client.generate(ask([9, 8, 7], max_new_tokens=900)))
        await generating(target.client, tokens=30)
        await target.client.abort()
    [partial] = task.result()
    [rest] = await target.client.generate(ask([9, 8, 7, *partial.output_ids], max_new_tokens=10))
    assert rest.meta_info.prompt_tokens == 3 + len(partial.output_ids)
    assert len(rest.output_ids) == 10


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_update_under_pause_loses_no_request(target: Target, mode: str) -> None:
    client = target.client
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(client.generate(ask([1, 2, index], max_new_tokens=400))) for index in range(3, 6)]
        await generating(client, tokens=60)
        await client.pause(mode)  # type: ignore[arg-type]
        assert not await client.ready()
        assert await client.health()
        updated = await client.update_weights_from_disk(target.other, "w2", flush_cache=mode == "retract")
        assert updated.cache_flushed == (mode == "retract")
        assert (await client.model_info()).weight_version == "w2"
        await client.resume()
        assert await client.ready()
    for [output] in (task.result() for task in tasks):
        assert len(output.output_ids) == 400
        spans = output.version_spans
        assert [span.version for span in spans] == [target.label, "w2"]
        assert (spans[0].start, spans[0].end, spans[1].end) == (0, spans[1].start, 400)
        assert 0 < spans[0].end < 400
        assert output.meta_info.weight_version == "w2"
        assert output.meta_info.num_retractions == (1 if mode == "retract" else 0)
    [fresh] = await client.generate(ask([1, 2, 3]))
    assert fresh.version_spans == [VersionSpan("w2", 0, 8)]


async def test_pause_abort_ends_everything_and_holds_what_comes(target: Target) -> None:
    client = target.client
    async with asyncio.TaskGroup() as group:
        running = group.create_task(client.generate(ask([1, 2], max_new_tokens=900)))
        await generating(client, tokens=30)
        await client.pause("abort")
        later = group.create_task(client.generate(ask([3, 4])))
        [partial] = await running
        assert partial.aborted
        await asyncio.sleep(0.05)
        assert not later.done()
        await client.update_weights_from_disk(target.other, "w2")
        await client.resume()
    [output] = later.result()
    assert output.version_spans == [VersionSpan("w2", 0, 8)]


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
        running = group.create_task(client.generate(ask([1, 2], max_new_tokens=300)))
        await generating(client)
        update = group.create_task(client.update_weights_from_disk(target.other, "w2"))
        await asyncio.sleep(0.02)
        later = group.create_task(client.generate(ask([3, 4])))
        await update
    assert running.result()[0].version_spans == [VersionSpan(target.label, 0, 300)]
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
    await until(lambda: idle(target), timeout_s=3.0)


async def test_timeout_is_typed_and_aborts(target: Target) -> None:
    await target.client.pause("in_place")
    from models.engines.client import EngineClient

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


async def test_refused_update_leaves_everything_as_it_was(target: Target, checkpoints) -> None:  # type: ignore[no-untyped-def]
    if not target.can.refuses_bad_weights:
        pytest.skip("this engine accepts any directory, or dies of it")
    client = target.client
    wider = checkpoints(hidden_size=64, intermediate_size=192)
    before = await client.weights_checker()
    with pytest.raises(EngineRefused):
        await client.update_weights_from_disk(str(wider), "w2")
    assert await client.weights_checker() == before
    assert (await client.model_info()).weight_version == target.label
    [output] = await client.generate(ask([1, 2]))
    assert output.version_spans == [VersionSpan(target.label, 0, 8)]
