"""Several updates during one generation, under each in-flight policy: every recorded log-prob is that of the recorded
version, by the Hugging Face forward of the same checkpoint, and every boundary is exact.

For in_place, where versions share a KV cache, so do the models of the reference.
"""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from threading import current_thread
from typing import Any

import msgspec
import pytest
import safetensors
import torch

from configs.schema.rollout import SimulatedEngineConfig
from models.engines.client import EngineClient
from models.engines.core import MemoryAccount, nowhere
from models.engines.embedded.engine import EmbeddedEngine
from models.engines.embedded.transformer import LiveWeights
from models.engines.noise import sample_seed
from models.engines.protocol import ErrorDetail, PauseMode, VersionSpan
from models.engines.simulated.engine import SimulatedEngine
from models.engines.simulated.responses import simulated_log_prob
from models.engines.streamed import PartialOutputs
from models.errors import EngineRefused, WeightsRefused
from tests.models.engines.conftest import on_sglang, opened
from tests.models.engines.forward_reference import by_one, by_spans
from tests.models.engines.harness import (
    SIMULATED,
    Bench,
    Checkpoints,
    Target,
    ask,
    generating,
    one_completion,
    simulated_token,
    until,
)

TOLERANCE = 1e-5
APART = 1e-3  # what two versions differ by, at the least, in most tokens
LENGTH = 900  # no response is meant to get there: after the last update all are ended


@pytest.fixture(params=["embedded", *on_sglang("sglang", "sglang_overlap")])
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[Target]:
    async with opened(request.param, request, "v0", stream_interval=8) as made:
        yield made


class LabelledChunks(PartialOutputs):
    """Remembers how many tokens had arrived with the first chunk of each label."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, int] = {}

    def take(self, raw: bytes) -> ErrorDetail | str | None:
        error = super().take(raw)
        self.first.setdefault(msgspec.json.decode(raw)["meta_info"]["weight_version"], self.tokens)
        return error


@dataclass
class Rollout:
    """One response, resumed as often as it is aborted. Spans count from the response's first token."""

    prompt: list[int]
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    retractions: int = 0
    resumed: int = 0
    ending: bool = False
    partial: LabelledChunks = field(default_factory=LabelledChunks)

    def since(self, label: str) -> int:
        """Tokens that arrived after the first chunk of this label."""
        return self.partial.tokens - self.partial.first.get(label, self.partial.tokens)

    async def run(self, client: EngineClient) -> None:
        while not self.ending:
            self.partial = LabelledChunks()
            request = ask([*self.prompt, *self.ids], max_new_tokens=LENGTH - len(self.ids))
            [output] = await client.generate(request, partial=self.partial)
            start, self.partial = len(self.ids), LabelledChunks()
            self.ids += output.output_ids
            self.log_probs += output.output_log_probs
            self.spans += [VersionSpan(s.version, s.start + start, s.end + start) for s in output.version_spans]
            self.retractions += output.meta_info.num_retractions or 0
            self.resumed += output.aborted and not self.ending


async def roll(target: Target, mode: PauseMode, rollouts: list[Rollout]) -> dict[str, Path]:
    """Run the rollouts through three updates, of which one of our engines has prepared two; the checkpoints by
    label."""
    client = target.client
    ours = "+embedded" in (await client.server_info()).version
    client.early_boundary = await client.has_early_boundaries(mode)
    paths = {"v0": target.model, "v1": target.other, "v2": target.model, "v3": target.other}
    async with asyncio.TaskGroup() as group:
        for rollout in rollouts:
            group.create_task(rollout.run(client))
        for before, label in pairwise(paths):
            await longer(rollouts, before)
            if ours and label != "v2":
                checkpoint = {"model_path": paths[label], "weight_version": label}
                await client.update("/prepare_weights", checkpoint, 60.0)
                await longer(rollouts, before, 60)  # by the weights in use
            await client.pause(mode)
            await client.update_weights_from_disk(paths[label], label, flush_cache=mode != "in_place")
            await client.resume()
        await longer(rollouts, "v3")
        for rollout in rollouts:
            rollout.ending = True
        await client.abort()
    return {label: Path(path) for label, path in paths.items()}


async def longer(rollouts: list[Rollout], label: str, tokens: int = 30) -> None:
    """Wait until so many tokens of each rollout have arrived after one that the server sent under this label. Counted
    from the end of the update, all could be of the weights before, on a machine so busy that they are read late."""

    async def reached() -> bool:
        return all(rollout.since(label) >= tokens for rollout in rollouts)

    await until(reached, timeout_s=60)


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
async def test_log_probs_are_those_of_the_recorded_versions(
    engine: Target, mode: PauseMode, request: pytest.FixtureRequest
) -> None:
    if mode == "abort" and "sglang_overlap" in request.node.callspec.params.values():
        pytest.skip("a response that ended has no boundary inside: overlap scheduling changes nothing")
    rollouts = [Rollout([1, 2, 3]), Rollout([9, 8]), Rollout(list(range(20, 60)))]
    paths = await roll(engine, mode, rollouts)
    apart: list[float] = []
    for rollout in rollouts:
        length = len(rollout.ids)
        assert 100 < length == rollout.spans[-1].end
        assert [span.version for span in rollout.spans] == ["v0", "v1", "v2", "v3"]
        assert [span.start for span in rollout.spans] == [0, *[span.end for span in rollout.spans[:-1]]]
        assert rollout.retractions == (3 if mode == "retract" else 0)
        assert rollout.resumed == (3 if mode == "abort" else 0)
        recorded = torch.tensor(rollout.log_probs)
        true = by_spans(paths, rollout.spans, rollout.prompt, rollout.ids, recomputed=mode != "in_place")
        assert float((recorded - true).abs().max()) < TOLERANCE
        first = rollout.spans[0].end
        alone = by_one(paths["v0"], rollout.prompt, rollout.ids)
        assert float((recorded - alone)[:first].abs().max()) < TOLERANCE
        apart.append(float((recorded - alone)[first].abs()))
        # One token to either side, and it is another story: the boundaries are where they are said to be.
        for shift in (-1, 1):
            moved = [
                VersionSpan(s.version, s.start + shift * (s.start > 0), s.end + shift * (s.end < length))
                for s in rollout.spans
            ]
            wrong = by_spans(paths, moved, rollout.prompt, rollout.ids, recomputed=mode != "in_place")
            assert float((recorded - wrong).abs().max()) > APART
    assert max(apart) > APART, "the first token after the boundary is not of the old version"


async def test_tokens_and_versions_can_be_recomputed(request: pytest.FixtureRequest) -> None:
    """Over HTTP and across an update: every token is the documented function of prompt, seed, position, version."""
    async with opened("simulated", request) as target, asyncio.TaskGroup() as group:
        client = target.client
        task = group.create_task(client.generate(ask([3, 1, 4], n=2, max_new_tokens=300, sampling_seed=42)))
        await generating(client, tokens=60, requests=2)
        await client.pause("retract")
        await client.update_weights_from_disk("/nowhere", "w2")
        await client.resume()
        outputs = await task
    for index, output in enumerate(outputs):
        assert [span.version for span in output.version_spans] == ["first", "w2"]
        assert output.output_ids == [
            simulated_token([3, 1, 4], sample_seed(42, index), 3 + position, span.version, 256)
            for span in output.version_spans
            for position in range(span.start, span.end)
        ]
        assert set(output.output_log_probs) == {simulated_log_prob(256)}


async def test_a_simulated_engine_generates_while_it_prepares_weights() -> None:
    """As the embedded one: what it prepares costs time, but no step."""
    simulated = SimulatedEngineConfig(a_ms=1.0, c_ms=0.0, length_mean=3000.0, length_sigma=0.0, prepare_s=0.2)
    engine = SimulatedEngine(msgspec.structs.replace(SIMULATED, simulated=simulated), "tiny", max_context_len=None)
    engine.start(nowhere, lambda error: None)
    engine.submit([one_completion([3, 1, 4], max_new=3000)])
    await engine.prepare_weights("tiny", "w2")
    engine.load()  # brings the schedule up to now
    assert engine.schedule.totals.engine_steps > 190
    await engine.stop()


# Weights that were prepared: loaded beside those in use, and taken in the pause without a copy.


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The threads that load weights from now on."""
    found: list[str] = []
    original = LiveWeights.load

    def load(weights: LiveWeights, *given: Any, **named: Any) -> None:
        found.append(current_thread().name)
        original(weights, *given, **named)

    monkeypatch.setattr(LiveWeights, "load", load)
    return found


@asynccontextmanager
async def started(path: Path) -> AsyncIterator[Bench]:
    """One whose engine runs."""
    bench = Bench(path)
    bench.engine.start(lambda completions: None, lambda error: None)
    yield bench
    await bench.engine.stop()


@pytest.fixture
async def embedded(checkpoints: Checkpoints) -> AsyncIterator[EmbeddedEngine]:
    async with started(checkpoints()) as bench:
        yield bench.engine


async def test_prepared_weights_are_taken_without_a_load(checkpoints: Checkpoints, loads: list[str]) -> None:
    """And all of them: the engine then has the checksums, and the log-probs, of one that began with them."""
    other = str(checkpoints(seed=1))
    fresh = Bench(Path(other))
    async with started(checkpoints()) as bench:
        engine = bench.engine
        before = await engine.checksums()
        loads.clear()
        await engine.prepare_weights(other, "w2")
        assert len(loads) == 1
        assert loads[0] != "embedded-engine", "the thread that generates"
        assert (await engine.checksums(), engine.label) == (before, "w1")
        await engine.pause("in_place")
        await engine.update_weights(other, "w2", False)
        await engine.resume()
        assert (len(loads), engine._prepared, engine.label) == (1, None, "w2")
        assert await engine.checksums() == fresh.engine._weights.checksums()
        [found], [wanted] = [one.make([5, 6, 7], max_new_tokens=9, temperature=0.0) for one in (bench, fresh)]
        engine.submit([found])
        fresh.run([wanted])

        async def finished() -> bool:
            return found.finish is not None

        await until(finished)
        assert found.log_probs == wanted.log_probs
        await engine.update_weights(str(checkpoints()), "w3", False)
        assert (await engine.checksums(), loads[1:]) == (before, ["embedded-engine"])


def test_slots_stay_mapped_and_each_version_is_read_from_them(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints do not, and a file that takes another's place is another one."""
    monkeypatch.setattr("models.engines.embedded.transformer._mapped", {})  # without slots of other tests
    weights = Bench(checkpoints()).engine._weights
    slots, sources = [tmp_path / f"slot-{index}" for index in range(2)], [checkpoints(seed=seed) for seed in range(3)]

    opened: list[str] = []

    def safe_open(path: Path, framework: str, original: Any = safetensors.safe_open) -> Any:
        opened.extend([path.parent.name] if framework == "pt" else [])  # else only names are read
        return original(path, framework)

    monkeypatch.setattr(safetensors, "safe_open", safe_open)

    def mappings() -> int:
        return len(re.findall(r" rw-p .*/model.safetensors\b", Path("/proc/self/maps").read_text()))

    def loaded(source: Path, directory: Path) -> bool:
        weights.load(directory)
        return weights.checksums() == Bench(source).engine._weights.checksums()

    before = mappings()
    for slot, source in zip(slots, sources, strict=False):
        shutil.copytree(source, slot)
        assert loaded(source, slot)
    assert mappings() == before + 2
    opened.clear()
    for version, slot in enumerate([*slots, *slots], 1):
        file, source = slot / "model.safetensors", sources[version % 3]
        with file.open("r+b") as written:  # as a trainer does, in place
            written.write((source / "model.safetensors").read_bytes())
        assert loaded(source, slot)
    assert not [name for name in opened if name.startswith("slot-")]
    shutil.copy(sources[2] / "model.safetensors", tmp_path / "new")
    (tmp_path / "new").replace(slots[0] / "model.safetensors")
    assert loaded(sources[2], slots[0])
    (tmp_path / "late").mkdir()
    for slot in (tmp_path / "late" / "slot-0", tmp_path / "late" / "slot-1"):
        shutil.copytree(sources[2], slot)
        assert loaded(sources[2], slot)
    assert mappings() == before + 2, "those of the last trainer alone"


@pytest.mark.parametrize("update", [("path", "w3"), ("other", "w2")])
async def test_only_the_prepared_version_is_taken(
    update: tuple[str, str], checkpoints: Checkpoints, loads: list[str], embedded: EmbeddedEngine
) -> None:
    paths = {"path": str(checkpoints(seed=1)), "other": str(checkpoints())}
    await embedded.prepare_weights(paths["path"], "w2")
    await embedded.update_weights(paths[update[0]], update[1], False)
    assert loads[-1] == "embedded-engine"
    assert embedded.label == update[1]
    assert await embedded.checksums() == Bench(Path(paths[update[0]])).engine._weights.checksums()
    await embedded.update_weights(paths["path"], "w2", False)
    assert loads.count("embedded-engine") == 2, "what another update did not take is gone"


async def test_without_room_or_work_to_keep_up_nothing_is_prepared(
    checkpoints: Checkpoints, embedded: EmbeddedEngine, loads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = str(checkpoints(seed=1))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", lambda path: "MemAvailable:   5 kB")
        await embedded.prepare_weights(other, "w2")
    await embedded.pause("in_place")
    await embedded.prepare_weights(other, "w2")
    assert loads == []
    await embedded.resume()
    await embedded.prepare_weights(other, "w2")
    assert embedded._prepared
    await embedded.pause("abort")
    await embedded.release_memory(("weights",))
    assert embedded._prepared is None, "the memory is another process's now"
    await embedded.resume_memory(("weights",))
    await embedded.update_weights(other, "w2", False)
    assert loads[1:] == ["embedded-engine"]


async def test_the_set_that_was_replaced_takes_the_next_version(
    checkpoints: Checkpoints, embedded: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No memory is allocated for a version after the second set is there, unless it is short or was given back."""
    paths = [str(checkpoints(seed=seed)) for seed in range(3)]

    async def updated(number: int) -> int:
        await embedded.prepare_weights(paths[number % 3], f"w{number}")
        await embedded.update_weights(paths[number % 3], f"w{number}", False)
        assert await embedded.checksums() == Bench(Path(paths[number % 3])).engine._weights.checksums()
        return embedded._weights.embed.data_ptr()

    first = embedded._weights.embed.data_ptr()
    second = await updated(2)
    assert [await updated(number) for number in range(3, 7)] == [first, second] * 2
    await embedded.prepare_weights(paths[1], "not taken")
    assert embedded._prepared
    assert embedded._prepared[2].weights.embed.data_ptr() == first
    assert await updated(7) == first, "what was prepared in vain is memory too"
    assert embedded._spare
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", lambda path: "MemAvailable:   5 kB")
        await embedded.prepare_weights(paths[2], "w8")
    assert (embedded._spare, embedded._prepared) == (None, None)
    await updated(8)
    await embedded.pause("abort")
    await embedded.release_memory(("weights",))
    assert embedded._spare is None, "the memory is another process's now"


async def test_weights_that_do_not_fit_are_refused_while_the_engine_goes_on(
    checkpoints: Checkpoints, embedded: EmbeddedEngine, tmp_path: Path
) -> None:
    await embedded.prepare_weights(str(checkpoints(seed=1)), "w2")
    with pytest.raises(WeightsRefused, match="model_path"):
        await embedded.prepare_weights(str(tmp_path), "w3")
    assert embedded._prepared is None, "what the last call named counts"
    assert embedded.label == "w1"


# Memory that is given back and taken again: one suite for all engines, and what the embedded one really frees.


GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 12, "sampling_seed": 7}


async def test_the_turn_of_a_colocated_trainer(target: Target) -> None:
    """abort, give back, take the weights' memory, load, take the cache's, go on: a request that waits is then served
    by the new weights, and what was served before is served as before once its weights are back."""
    client = target.client
    [before] = await client.generate(ask([5, 6, 7], **GREEDY))
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(client.generate(ask([1, 2], max_new_tokens=900)))
        await generating(client, tokens=30)
        await client.pause("abort")
        [partial] = await running
        assert partial.aborted
        waiting = tasks.create_task(client.generate(ask([5, 6, 7], **GREEDY)))
        await client.release_memory(("kv_cache", "weights"))
        assert await client.health()
        await client.resume_memory(("weights",))
        await client.update_weights_from_disk(target.model, "w2")
        await client.resume_memory(("kv_cache",))
        assert not waiting.done()
        await client.resume()
    [after] = waiting.result()
    assert after.version_spans == [VersionSpan("w2", 0, 12)]
    if target.can.seeds and target.can.scores_as_it_samples:  # a model whose tokens hang on its weights alone
        assert after.output_ids == before.output_ids
    [again] = await client.generate(ask([5, 6, 7], **GREEDY))
    assert again.output_ids == after.output_ids or not target.can.seeds


async def refused(call: Awaitable[object], words: str) -> None:
    with pytest.raises(EngineRefused, match=words):
        await call


async def test_what_lacks_memory_does_not_generate_and_loads_nothing(target: Target) -> None:
    if not target.can.refuses_bad_ids:
        pytest.skip("SGLang refuses none of it: without the memory saver nothing is away")
    client = target.client
    words = "while generation is not paused; call /pause_generation with mode abort"
    await refused(client.release_memory(), words)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(client.generate(ask([1, 2], max_new_tokens=900)))
        await generating(client)
        await client.pause("in_place")
        await refused(client.release_memory(), "1 requests are running")
        await client.abort()
        await running
    await client.release_memory(("weights",))
    for _ in range(2):  # only what is news counts
        await client.release_memory(("kv_cache", "weights"))
    await refused(client.resume(), "without the memory of kv_cache, weights")
    load = client.update_weights_from_disk
    await refused(load(target.other, "w2"), "resume_memory_occupation with the tag weights first")
    await refused(client.weights_checker(), "load weights first")
    await client.resume_memory(("weights",))
    await client.resume_memory(("cuda_graph",))
    await refused(client.resume(), "without the memory of kv_cache")
    for _ in range(2):
        await client.resume_memory()
    await refused(client.resume(), "the weights' memory was released; load weights first")
    await load(target.other, "w2")
    await client.resume()
    [output] = await client.generate(ask([1, 2]))
    assert output.version_spans == [VersionSpan("w2", 0, 8)]
    metrics = (await client.call("GET", "/metrics", None, 5.0)).decode()
    assert "sglang:memory_releases_total 2" in metrics


def test_only_what_is_news_counts() -> None:
    account = MemoryAccount()
    assert account.release(("weights", "kv_cache"), paused=True, running=0) == {"weights", "kv_cache"}
    assert account.release(("weights",), paused=True, running=0) == frozenset()
    assert account.resume(("weights", "cuda_graph")) == {"weights"}
    assert account.resume(("weights", "kv_cache")) == {"kv_cache"}


async def test_the_embedded_engine_frees_what_it_gives_back(checkpoints: Checkpoints) -> None:
    path = checkpoints(tie_word_embeddings=False)
    async with started(path) as bench:
        engine = bench.engine
        derived = [spread.untyped_storage() for spread, _ in engine._weights._derived]
        held = [*{t.untyped_storage().data_ptr(): t.untyped_storage() for t in engine._weights.names.values()}.values()]
        held += derived
        sizes = [storage.nbytes() for storage in held]
        assert derived
        assert min(sizes) > 0
        cache_shape = engine._cache.kv.shape
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
