"""The latency model in virtual time: exact times, capacity, lengths and tokens that anybody can recompute."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema.rollout import SimulatedEngineConfig
from models.engines.client import EngineClient, UpdateClient
from models.engines.core import ALL_TAGS, Completion, EngineFacts, MemoryAccount, MemoryRequest
from models.engines.embedded.engine import EmbeddedEngine
from models.engines.intake import Intake
from models.engines.noise import sample_seed
from models.engines.protocol import GenerateRequest, SamplingParams, VersionSpan
from models.engines.serve import EngineServer
from models.engines.simulated_responses import simulated_length, simulated_log_prob, simulated_token
from models.engines.simulated_schedule import Schedule
from models.engines.text import TextCodec
from models.errors import EngineRefused, RequestRefused, WeightsRefused
from tests.models.engines.harness import EMBEDDED, SIMULATED, Target, ask, generating

FACTS = EngineFacts(
    engine="simulated",
    model_path="m",
    model_type="simulated",
    architecture="Simulated",
    vocab_size=256,
    context_length=1 << 20,
    slots=64,
    kv_tokens=1 << 20,
    device="",
    dtype="",
    eos_ids=frozenset({255}),
)


class Clocked:
    """A schedule with a clock that jumps from event to event."""

    def __init__(self, slots: int = 64, prefix_cache: bool = False, **config: object) -> None:
        settings = {"a_ms": 10.0, "c_ms": 1.0, "prefill_ms_per_token": 0.0, **config}
        self.config = msgspec.convert(settings, SimulatedEngineConfig)
        self.schedule = Schedule(self.config, slots, prefix_cache, "w1")
        seeds = itertools.count(1)
        self._intake = Intake(FACTS, TextCodec(None, None), lambda: next(seeds))
        self.now = 0.0
        self.ended: dict[str, float] = {}

    def make(self, prompt: Sequence[int], rid: str = "r", **params: object) -> list[Completion]:
        values = {"ignore_eos": True, **params}
        request = GenerateRequest(
            input_ids=list(prompt), rid=rid, sampling_params=msgspec.convert(values, SamplingParams)
        )
        return self._intake.expand(request)[0]

    def until(self, time_s: float) -> None:
        """Let the engine work until a time; its events come at their own times."""
        while (event := self.schedule.next_event()) is not None and event <= time_s:
            self.now = max(self.now, event)
            self._advance()
        self.now = time_s
        self._advance()

    def _advance(self) -> None:
        self.schedule.advance(self.now)
        for completion in self.schedule.take_finished():
            self.ended[completion.rid] = self.now

    def drain(self) -> dict[str, float]:
        """Work to the end; when each request ended, in seconds."""
        while self.schedule.next_event() is not None:
            self.until(self.schedule.next_event() or 0.0)
        return self.ended


def test_a_stream_has_its_chunks_when_the_model_says() -> None:
    clock = Clocked(prefill_ms_per_token=5.0)
    [completion] = clock.make([1, 2], max_new_tokens=20, stream_interval=8)
    completion.stream = True
    clock.schedule.submit(0.0, [completion])
    chunks: list[tuple[float, int]] = []
    while (due := clock.schedule.next_chunk()) is not None:
        event = clock.schedule.next_event()
        clock.until(due if event is None else min(due, event))
        chunks += [(round(clock.now, 6), len(c.output_ids)) for c in clock.schedule.take_chunks()]
    assert chunks == [(0.021, 1), (0.109, 9), (0.197, 17)]  # 10 ms for the prefill, 11 ms for each step
    assert clock.drain() == {"r": pytest.approx(0.23)}
    expected = [simulated_token([1, 2], sample_seed(1, 0), 2 + index, "w1", 256) for index in range(20)]
    assert completion.output_ids == expected, "what streamed is what the response has at its end"
    assert len(completion.log_probs) == 20


def test_a_stream_goes_on_after_retraction_with_its_spans() -> None:
    clock = Clocked()
    [completion] = clock.make([1, 2], max_new_tokens=20, stream_interval=4)
    completion.stream = True
    clock.schedule.submit(0.0, [completion])
    clock.until(0.0555)
    assert clock.schedule.take_chunks() == [completion]
    shown = list(completion.output_ids)
    clock.schedule.pause(clock.now, "retract")
    assert clock.schedule.next_chunk() is None
    assert clock.schedule.take_chunks() == []
    clock.schedule.relabel(clock.now, "w2")
    clock.schedule.resume(clock.now)
    clock.drain()
    assert completion.output_ids[: len(shown)] == shown
    assert [(span.version, span.start, span.end) for span in completion.spans_over(len(completion.output_ids))] == [
        ("w1", 0, 5),
        ("w2", 5, 20),
    ]


def test_busy_time_is_that_of_the_steps() -> None:
    clock = Clocked()
    clock.schedule.submit(1.0, clock.make([1], "a", max_new_tokens=10))
    clock.now = 1.0
    clock.until(1.055)
    assert clock.schedule.totals.busy_s == pytest.approx(0.055)
    clock.schedule.pause(clock.now, "in_place")
    clock.until(5.0)
    clock.schedule.resume(5.0)
    assert clock.drain() == {"a": pytest.approx(5.055)}
    assert clock.schedule.totals.busy_s == pytest.approx(0.11), "idle and paused time is not busy"


def test_step_time_follows_the_number_of_running_requests() -> None:
    sim = Clocked()
    sim.schedule.submit(0.0, sim.make([1], "a", max_new_tokens=10))
    sim.schedule.submit(0.0, sim.make([1], "b", max_new_tokens=4))
    # a runs alone for its first step (b came at its start, and enters at the next boundary): 11 ms, then four of 12.
    ended = sim.drain()
    assert ended["b"] == pytest.approx(0.011 + 4 * 0.012)
    assert ended["a"] == pytest.approx(0.011 + 4 * 0.012 + 5 * 0.011)


def test_prefill_costs_per_token_and_cached_prompts_do_not() -> None:
    for prefix_cache, tokens in ((False, 300), (True, 101 + 1)):
        sim = Clocked(prefill_ms_per_token=0.1, prefix_cache=prefix_cache)
        sim.schedule.submit(0.0, sim.make([7] * 100, "p", n=3, max_new_tokens=1))
        assert sim.drain()["p_2"] == pytest.approx(0.013 + tokens * 0.0001)


def test_late_calls_shift_nothing() -> None:
    """Seen only at the end, or at every millisecond: the same work is done at the same times."""
    totals = []
    for grain in (0.001, 0.0173, 5.0):
        sim = Clocked(slots=3, prefill_ms_per_token=0.05)
        arrivals = {0.0: "a", 0.0335: "b", 0.05: "c", 0.0601: "d"}
        for time_s in sorted({*np.arange(0, 5, grain).tolist(), *arrivals}):
            sim.until(time_s)
            if time_s in arrivals:
                sim.schedule.submit(time_s, sim.make([1] * 20, arrivals[time_s], max_new_tokens=30))
        totals.append({rid: round(ended, 6) for rid, ended in sim.drain().items()})
    assert totals[0] == totals[1] == totals[2]


def test_time_scale_multiplies_everything() -> None:
    ends = []
    for scale in (1.0, 0.05):
        sim = Clocked(prefill_ms_per_token=0.3, time_scale=scale)
        sim.schedule.submit(0.0, sim.make([1] * 50, "a", n=5, max_new_tokens=20))
        ends.append(sim.drain()["a_4"])
    assert ends[1] == pytest.approx(ends[0] * 0.05)


@given(
    jobs=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 60), st.floats(0, 0.5)), min_size=1, max_size=12),
    capacity=st.integers(101, 160),
    slots=st.integers(1, 6),
)
@settings(max_examples=60, deadline=None)
def test_capacity_is_kept_and_nothing_is_lost(jobs: list[tuple[int, int, float]], capacity: int, slots: int) -> None:
    sim = Clocked(slots=slots, kv_tokens=capacity)
    made: list[Completion] = []
    for index, (prompt, new, arrival) in enumerate(sorted(jobs, key=lambda job: job[2])):
        sim.until(arrival)
        completions = sim.make([index + 1] * prompt, f"r{index}", max_new_tokens=new)
        made += completions
        sim.schedule.submit(arrival, completions)
        assert sim.schedule.used_tokens <= capacity
    while (event := sim.schedule.next_event()) is not None:
        sim.until(event)
        assert sim.schedule.used_tokens <= capacity
        assert sim.schedule.running <= slots
    assert [len(completion.output_ids) for completion in made] == [completion.max_new for completion in made]
    assert sim.schedule.used_tokens == sim.schedule.running == sim.schedule.waiting == 0
    assert sim.schedule.totals.generated_tokens == sum(completion.max_new for completion in made)


def test_full_cache_retracts_the_newest() -> None:
    sim = Clocked(kv_tokens=100)
    first, second = sim.make([1] * 30, "a", max_new_tokens=60), sim.make([2] * 30, "b", max_new_tokens=60)
    sim.schedule.submit(0.0, [*first, *second])
    sim.drain()
    assert (first[0].retractions, second[0].retractions) == (0, 1)
    assert sim.schedule.totals.retractions == 1
    assert sim.ended["a"] < sim.ended["b"]


def test_pause_modes() -> None:
    for mode in ("in_place", "retract", "abort"):
        sim = Clocked(prefill_ms_per_token=1.0)
        [completion] = sim.make([1] * 10, "a", max_new_tokens=20)
        sim.schedule.submit(0.0, [completion])
        sim.until(0.0605)  # first step 11 + 10 ms, then 11 each: the fourth token at 54 ms
        sim.schedule.pause(sim.now, mode)  # type: ignore[arg-type]
        assert sim.schedule.next_event() is None
        sim.until(1.0)
        sim.schedule.relabel(1.0, "w2")
        sim.schedule.resume(1.0)
        sim.drain()
        if mode == "abort":
            assert completion.finish is not None
            assert (completion.finish.type, len(completion.output_ids)) == ("abort", 4)
            continue
        assert [(span.version, span.start, span.end) for span in completion.spans_over(len(completion.output_ids))] == [
            ("w1", 0, 4),
            ("w2", 4, 20),
        ]
        prefill = 0.014 if mode == "retract" else 0.0
        assert sim.ended["a"] == pytest.approx(1.0 + 16 * 0.011 + prefill)
        assert completion.retractions == (mode == "retract")


def test_lengths_have_the_configured_distribution() -> None:
    config = SimulatedEngineConfig(length_mean=400.0, length_sigma=1.0, length_cap=100_000)
    lengths = np.array([simulated_length(config, seed) for seed in range(20_000)])
    assert lengths.mean() == pytest.approx(400.0, rel=0.04)
    logs = np.log(lengths)
    assert logs.std() == pytest.approx(1.0, rel=0.03)
    assert np.median(lengths) == pytest.approx(400.0 * math.exp(-0.5), rel=0.04)
    capped = SimulatedEngineConfig(length_mean=400.0, length_sigma=1.0, length_cap=500)
    assert max(simulated_length(capped, seed) for seed in range(500)) == 500
    constant = SimulatedEngineConfig(length_mean=37.0, length_sigma=0.0)
    assert {simulated_length(constant, seed) for seed in range(50)} == {37}


def test_an_aborted_response_keeps_its_planned_length() -> None:
    sim = Clocked(length_mean=200.0)
    [whole] = sim.make([5, 6], "a", ignore_eos=False, max_new_tokens=10_000, sampling_seed=3)
    planned = simulated_length(sim.config, 3)
    sim.schedule.submit(0.0, [whole])
    sim.until(0.011 * 20)
    sim.schedule.cancel(sim.now, [whole])
    assert len(whole.output_ids) == 20
    [rest] = sim.make([5, 6, *whole.output_ids], "b", ignore_eos=False, max_new_tokens=10_000, sampling_seed=8)
    sim.schedule.submit(sim.now, [rest])
    sim.drain()
    assert len(rest.output_ids) == planned - 20


async def test_tokens_and_versions_can_be_recomputed() -> None:
    """Over HTTP and across an update: every token is the documented function of prompt, seed, position, version."""
    async with _served() as client:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(client.generate(ask([3, 1, 4], n=2, max_new_tokens=300, sampling_seed=42)))
            await generating(client, tokens=60)
            await client.pause("retract")
            await client.update_weights_from_disk("/nowhere", "w2")
            await client.resume()
        for index, output in enumerate(task.result()):
            spans = output.version_spans
            assert [span.version for span in spans] == ["default", "w2"]
            expected = [
                simulated_token([3, 1, 4], sample_seed(42, index), 3 + position, span.version, 256)
                for span in spans
                for position in range(span.start, span.end)
            ]
            assert output.output_ids == expected
            assert set(output.output_log_probs) == {simulated_log_prob(256)}


async def test_responses_end_by_themselves_at_their_drawn_length() -> None:
    async with _served() as client:
        outputs = await client.generate(ask([3, 1, 4], n=6, max_new_tokens=120, sampling_seed=7, ignore_eos=False))
    for index, output in enumerate(outputs):
        length = simulated_length(SIMULATED.simulated, sample_seed(7, index))
        assert len(output.output_ids) == min(length, 120)
        assert output.meta_info.finish_reason is not None
        assert output.meta_info.finish_reason.type == ("stop" if length <= 120 else "length")
        if length <= 120:
            assert output.output_ids[-1] == output.meta_info.finish_reason.matched == 255


@asynccontextmanager
async def _served() -> AsyncIterator[EngineClient]:
    async with (
        EngineServer(SIMULATED, "none", max_context_len=None, seed=0) as server,
        EngineClient(server.url, timeout_s=30) as client,
    ):
        yield client


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
    await update.release_memory(("kv_cache", "weights"))
    with pytest.raises(EngineRefused, match="without the memory of kv_cache, weights"):
        await client.resume()
    with pytest.raises(EngineRefused, match="resume_memory_occupation with the tag weights first"):
        await client.update_weights_from_disk(target.other, "w2")
    with pytest.raises(EngineRefused, match="load weights first"):
        await client.weights_checker()
    await update.resume_memory()
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
    cache_shape = engine._cache.k.shape
    engine.start(lambda done: None, lambda error: None)
    try:
        checksums = await engine.checksums()
        await engine.pause("abort")
        await engine.release_memory(("kv_cache", "weights"))
        assert [storage.nbytes() for storage in held] == [0] * len(held)
        assert engine._cache.k.numel() == engine._cache._v_flat.numel() == 0
        await engine.resume_memory(("weights",))
        assert [storage.nbytes() for storage in held] == sizes
        assert engine._cache.k.numel() == 0
        await engine.update_weights(str(path), "again", False)
        assert await engine.checksums() == checksums
        await engine.resume_memory(("kv_cache",))
        assert engine._cache.k.shape == cache_shape
        assert torch.count_nonzero(engine._cache.v) == 0, "a masked NaN would poison a softmax"
        await engine.resume()
    finally:
        await engine.stop()


async def test_prefixes_do_not_outlive_the_cache(checkpoints: Checkpoints) -> None:
    """Weights stay, the cache goes: a retained prefix would be read from a cache of zeros."""
    path = checkpoints()
    engine = EmbeddedEngine(EMBEDDED, str(path), max_context_len=256)
    table = engine.stepper._table
    engine.start(lambda done: None, lambda error: None)
    try:
        await engine.pause("abort")
        table._retained[table._empty.pop()] = None
        await engine.release_memory(("kv_cache",))
        assert not table._retained
        await engine.resume_memory(("kv_cache",))
        await engine.resume()
    finally:
        await engine.stop()


def test_only_what_is_news_counts() -> None:
    account = MemoryAccount()
    assert account.release(("weights", "kv_cache"), paused=True, running=0) == {"weights", "kv_cache"}
    assert account.release(("weights",), paused=True, running=0) == frozenset()
    assert account.releases == 1
    with pytest.raises(WeightsRefused):
        account.check_load()
    assert account.resume(("weights", "cuda_graph")) == {"weights"}
    account.check_load()
    with pytest.raises(RequestRefused, match="memory of kv_cache"):
        account.check_whole()
    account.resume(("kv_cache",))
    with pytest.raises(RequestRefused, match="load weights first"):
        account.check_whole()
    account.loaded()
    account.check_whole()


def test_a_request_without_tags_is_about_everything() -> None:
    assert MemoryRequest().wanted == ALL_TAGS
    assert MemoryRequest(["weights", "weights"]).wanted == ("weights",)
