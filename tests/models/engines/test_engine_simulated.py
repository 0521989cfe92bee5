"""The latency model in virtual time: exact times, capacity, lengths and tokens that anybody can recompute."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from models.engines.client import EngineClient, UpdateClient
from models.engines.embedded.engine import EmbeddedEngine
from models.engines.noise import sample_seed
from models.engines.protocol import VersionSpan
from models.engines.serve import EngineServer
from models.engines.simulated.responses import simulated_log_prob
from models.errors import EngineRefused
from tests.models.engines.harness import EMBEDDED, SIMULATED, Target, ask, generating, simulated_token


async def test_tokens_and_versions_can_be_recomputed() -> None:
    """Over HTTP and across an update: every token is the documented function of prompt, seed, position, version."""
    async with (
        EngineServer(SIMULATED, "none", max_context_len=None, seed=0) as server,
        EngineClient(server.url, timeout_s=30) as client,
        asyncio.TaskGroup() as group,
    ):
        task = group.create_task(client.generate(ask([3, 1, 4], n=2, max_new_tokens=300, sampling_seed=42)))
        await generating(client, tokens=60)
        await client.pause("retract")
        await client.update_weights_from_disk("/nowhere", "w2")
        await client.resume()
        outputs = await task
    for index, output in enumerate(outputs):
        spans = output.version_spans
        assert [span.version for span in spans] == ["default", "w2"]
        expected = [
            simulated_token([3, 1, 4], sample_seed(42, index), 3 + position, span.version, 256)
            for span in spans
            for position in range(span.start, span.end)
        ]
        assert output.output_ids == expected
        assert set(output.output_log_probs) == {simulated_log_prob(256)}


# Memory that is given back and taken again: one suite for all engines, and what the embedded one really frees.


Checkpoints = Callable[..., Path]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 12, "sampling_seed": 7}


async def test_the_turn_of_a_colocated_trainer(target: Target) -> None:
    """abort, give back, take the weights' memory, load, take the cache's, go on: a request that waits is then served
    by the new weights, and what was served before is served as before once its weights are back."""
    client, update = target.client, UpdateClient(target.client)
    [before] = await client.generate(ask([5, 6, 7], **GREEDY))
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(client.generate(ask([1, 2], max_new_tokens=900)))
        await generating(client, tokens=30)
        await client.pause("abort")
        [partial] = await running
        assert partial.aborted
        waiting = tasks.create_task(client.generate(ask([5, 6, 7], **GREEDY)))
        await update.release_memory(("kv_cache", "weights"))
        assert await client.health()
        await update.resume_memory(("weights",))
        await client.update_weights_from_disk(target.model, "w2")
        await update.resume_memory(("kv_cache",))
        assert not waiting.done()
        await client.resume()
    [after] = waiting.result()
    assert after.version_spans == [VersionSpan("w2", 0, 12)]
    if target.can.seeds and target.can.scores_as_it_samples:  # a model whose tokens hang on its weights alone
        assert after.output_ids == before.output_ids
    [again] = await client.generate(ask([5, 6, 7], **GREEDY))
    assert again.output_ids == after.output_ids or not target.can.seeds


async def test_what_lacks_memory_does_not_generate_and_loads_nothing(target: Target) -> None:
    if not target.can.refuses_bad_ids:
        pytest.skip("SGLang refuses none of it: without the memory saver nothing is away")
    client, update = target.client, UpdateClient(target.client)
    with pytest.raises(EngineRefused, match="while generation is not paused; call /pause_generation with mode abort"):
        await update.release_memory()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(client.generate(ask([1, 2], max_new_tokens=900)))
        await generating(client)
        await client.pause("in_place")
        with pytest.raises(EngineRefused, match="1 requests are running"):
            await update.release_memory()
        await client.abort()
        await running
    await update.release_memory(("weights",))
    for _ in range(2):  # only what is news counts
        await update.release_memory(("kv_cache", "weights"))
    with pytest.raises(EngineRefused, match="without the memory of kv_cache, weights"):
        await client.resume()
    with pytest.raises(EngineRefused, match="resume_memory_occupation with the tag weights first"):
        await client.update_weights_from_disk(target.other, "w2")
    with pytest.raises(EngineRefused, match="load weights first"):
        await client.weights_checker()
    await update.resume_memory(("weights",))
    await update.resume_memory(("cuda_graph",))
    with pytest.raises(EngineRefused, match="without the memory of kv_cache"):
        await client.resume()
    await update.resume_memory()
    with pytest.raises(EngineRefused, match="the weights' memory was released; load weights first"):
        await client.resume()
    await client.update_weights_from_disk(target.other, "w2")
    await client.resume()
    [output] = await client.generate(ask([1, 2]))
    assert output.version_spans == [VersionSpan("w2", 0, 8)]
    metrics = (await client.call("GET", "/metrics", None, 5.0)).decode()
    assert "sglang:memory_releases_total 2" in metrics


async def test_the_embedded_engine_frees_what_it_gives_back(checkpoints: Checkpoints) -> None:
    path = checkpoints(tie_word_embeddings=False)
    engine = EmbeddedEngine(EMBEDDED, str(path), max_context_len=64)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in engine._weights.names.values()}
    derived = [spread.untyped_storage() for spread, _ in engine._weights._derived]
    held = [*storages.values(), *derived]
    sizes = [storage.nbytes() for storage in held]
    assert derived
    assert min(sizes) > 0
    cache_shape = engine._cache.kv.shape
    engine.start(lambda done: None, lambda error: None)
    try:
        checksums = await engine.checksums()
        await engine.pause("abort")
        table = engine.stepper._table
        table._retained[table._empty.pop()] = None
        await engine.release_memory(("kv_cache", "weights"))
        assert not table._retained, "a prefix would be read from a cache of zeros"
        assert [storage.nbytes() for storage in held] == [0] * len(held)
        assert engine._cache.kv.numel() == len(engine._cache._written) == len(engine._cache._read) == 0
        await engine.resume_memory(("weights",))
        assert [storage.nbytes() for storage in held] == sizes
        assert engine._cache.kv.numel() == 0
        await engine.update_weights(str(path), "again", False)
        assert await engine.checksums() == checksums
        await engine.resume_memory(("kv_cache",))
        assert engine._cache.kv.shape == cache_shape
        assert torch.count_nonzero(engine._cache.kv) == 0, "a masked NaN would poison a softmax"
        await engine.resume()
    finally:
        await engine.stop()
