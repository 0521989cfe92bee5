"""The proof of the policy: faults planted into engines that serve weights of a real trainer, and no false alarm."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from configs.resolve import resolve
from configs.schema.rollout import EngineConfig
from models.engines.client import EngineClient, WeightsUpdated
from models.engines.embedded.batch import Prefill
from models.engines.embedded.kv_cache import SlotTable
from models.engines.embedded.transformer import LiveWeights
from models.engines.protocol import ServerInfo
from models.engines.serve import EngineServer
from models.tiny import TinyRecipe, make_tiny_checkpoint
from models.train.build import SimulatedBackend, build_member
from models.train.huggingface.whole_models import TorchModels
from models.train.trainer import Trainer
from pipeline.errors import EXIT_USER_ERROR, exit_code, leaf
from stages.engines.policy_proof import KEPT, precision_of
from stages.engines.weight_routes import WeightRoutes
from stages.engines.weight_transfer import BucketTransfer
from stages.errors import UnprovenPolicy
from stages.train.weights import WeightPublisher, prover_of
from tests.sglang_server import RealServer
from tests.stages.fleet_rig import Fleet, open_fleet
from tests.stages.stage_rig import LIMIT_S, make_config, until

Weights = dict[str, torch.Tensor]
Fault = Callable[[Weights, Weights], None]  # changes what was loaded, given what was there before
LAYER = "model.layers.1."
ADAPTED = f"{LAYER}self_attn.v_proj.weight"


@dataclasses.dataclass
class Proven:
    """A trainer with real weights, and engines that get them."""

    one: Fleet
    trainer: Trainer
    publisher: WeightPublisher

    def move(self, step: float, seed: int = 0) -> None:
        """Every weight by about `step`, as an optimizer does it."""
        models = self.trainer._models
        assert isinstance(models, TorchModels)
        random = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in models.model.parameters():
                parameter += step * torch.randn(parameter.shape, generator=random)

    def add_adapter(self) -> None:
        """The trainer merges an adapter of rank 2 into one of its weights."""
        models = self.trainer._models
        assert isinstance(models, TorchModels)
        weight = dict(models.model.named_parameters())[ADAPTED]
        rows, columns = weight.shape
        with torch.no_grad():
            weight += 0.02 * torch.randn(rows, 2) @ torch.randn(2, columns)

    def publish(self, version: int) -> None:
        self.one.weights.announce(self.publisher.write(version, 0, pinned=False))

    async def land(self, version: int) -> None:
        self.publish(version)
        for engine in range(len(self.one.servers) or 1):
            await self.one.landed(version, engine=engine)

    async def complaint(self, engine: int = 0) -> str:
        return (await self.one.rig.complaint(engine)).reason


@asynccontextmanager
async def open_proven(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    dtype: str = "float32",
    engines: int = 1,
    real: RealServer | None = None,
    route: str = "disk",
) -> AsyncIterator[Proven]:
    """`real`: the only engine, in place of embedded engines."""
    source = (
        make_tiny_checkpoint(tmp_path / "model", TinyRecipe(initializer_range=0.05)) if real is None else real.model
    )
    update = {"update_weight_transport": route, "update_weight_buffer_size": 200_000}
    train = {"hf_checkpoint": str(source), "train_device": "cpu", "train_dtype": dtype}
    config = resolve(make_config(train=train, run={"mode": "sync"}, update=update))
    trainer = build_member(config, 1)
    trainer.setup()
    async with open_fleet(tmp_path, monkeypatch, source=source, update=config.update) as one:
        slots, prove = tmp_path / "published", prover_of(config, trainer)
        publisher = WeightPublisher(config, slots, tmp_path, partial(trainer.write_slot, slots, source), prove)
        one.stack.callback(publisher.close)
        if real is not None:
            await one.stack.enter_async_context(fresh(real))
            one.rig.engine_at(real.url)
        for index in range(engines if real is None else 0):
            engine = msgspec.convert({"engine_device": "cpu", "engine_dtype": dtype, "engine_slots": 8}, EngineConfig)
            server = EngineServer(engine, str(source), max_context_len=64, seed=index)
            one.servers.append(await one.stack.enter_async_context(server))
            one.rig.engine_at(server.url, engine=index)
        yield Proven(one, trainer, publisher)


Open = Callable[..., AbstractAsyncContextManager[Proven]]


@pytest.fixture
def proven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    return partial(open_proven, tmp_path, monkeypatch)


@asynccontextmanager
async def fresh(server: RealServer) -> AsyncIterator[None]:
    async with EngineClient(server.url) as client:
        await server.fresh(client)
        yield
        await client.resume()


def plant(monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    """Every load of the embedded engine leaves the fault behind."""
    original = LiveWeights.load

    def load(weights: LiveWeights, *given: Any, **named: Any) -> None:
        before = {name: tensor.clone() for name, tensor in weights.names.items()}
        original(weights, *given, **named)
        fault(weights.names, before)

    monkeypatch.setattr(LiveWeights, "load", load)
    monkeypatch.setattr(LiveWeights, "has_room", lambda weights, sets: False)  # a load begins from the weights in use


def stale(names: Callable[[str], bool]) -> Fault:
    """The tensors of these names are not loaded."""

    def fault(live: Weights, before: Weights) -> None:
        for name in filter(names, live):
            live[name].copy_(before[name])

    return fault


def transpose(live: Weights, before: Weights) -> None:
    live[f"{LAYER}self_attn.o_proj.weight"].copy_(live[f"{LAYER}self_attn.o_proj.weight"].T.clone())


def swap_layers(live: Weights, before: Weights) -> None:
    for name in [name for name in live if name.startswith(LAYER)]:
        other = name.replace("layers.1", "layers.2")
        first, second = live[name].clone(), live[other].clone()
        live[name].copy_(second)
        live[other].copy_(first)


def round_one(live: Weights, before: Weights) -> None:
    live[f"{LAYER}mlp.down_proj.weight"].copy_(live[f"{LAYER}mlp.down_proj.weight"].bfloat16())


def constant_scores(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    def score(prefill: Prefill, admission: Any, hidden: torch.Tensor, tokens: torch.Tensor) -> None:
        completion = admission.completion
        completion.prompt_log_probs = [None] + [value] * (completion.prompt_tokens - completion.score_from - 1)

    monkeypatch.setattr(Prefill, "_score", score)


def keep_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefix cache serves all versions alike."""
    original = SlotTable.find_prefix

    def find_prefix(table: SlotTable, context: Any, extra_key: str, generation: int, limit: int) -> tuple[int, int]:
        table.generation[table.length > 1] = generation
        table.key[:] = table._keys.setdefault(extra_key, len(table._keys))
        return original(table, context, extra_key, generation, limit)

    monkeypatch.setattr(SlotTable, "flush", lambda table: None)
    monkeypatch.setattr(SlotTable, "find_prefix", find_prefix)


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "the old slot under the new label": lambda patch: plant(patch, stale(lambda name: True)),
    "a layer is not loaded": lambda patch: plant(patch, stale(lambda name: name.startswith(LAYER))),
    "the tied embedding is not loaded": lambda patch: plant(patch, stale(lambda name: "embed" in name)),
    "a square tensor is transposed": lambda patch: plant(patch, transpose),
    "two layers are swapped": lambda patch: plant(patch, swap_layers),
    "a tensor is rounded to bfloat16": lambda patch: plant(patch, round_one),
    "keys and values of earlier weights": keep_keys_and_values,
    "every log-prob is the same": lambda patch: constant_scores(patch, -5.5),
    "every log-prob is NaN": lambda patch: constant_scores(patch, float("nan")),
}
ADAPTER = "an adapter is not loaded"


async def test_a_planted_fault_is_named_and_never_served(proven: Open) -> None:
    """One fault after the other: behind each the engine is started anew, and serves the version."""
    async with proven() as run:
        await run.land(0)
        for version, fault in enumerate((*FAULTS, ADAPTER), 1):
            with run.one.patch.context() as patch:
                if fault == ADAPTER:
                    plant(patch, stale(lambda name: name == ADAPTED))
                    run.add_adapter()
                else:
                    FAULTS[fault](patch)
                    run.move(1e-3, seed=version)
                run.publish(version)
                reason = await run.complaint()
                assert "engine-0 does not s" in reason, fault
                assert f"version {version}" in reason
                assert not run.one.served(), fault
                assert run.one.entry().version == version - 1
                assert run.one.failures() == 2 * version, "all weights were loaded once more"
            run.one.rig.topic.drop("complaint/engine-0")
            run.one.rig.engine_at(run.one.servers[0].url, incarnation=version)
            await run.one.landed(version)
            difference = run.one.entry().proof
            assert difference.mean < difference.largest < 1e-5


async def test_a_proof_costs_a_forward_pass_and_a_request(proven: Open) -> None:
    """For each version, whatever there are of canaries; the engine's facts are asked for once."""
    async with proven() as run:
        models, counts, asked = run.trainer._models, Counter[str](), EngineClient._answer
        assert isinstance(models, TorchModels)
        models.model.model.layers[0].register_forward_pre_hook(lambda *_: counts.update(["forward"]))

        def ask(client: EngineClient, method: str, path: str, *args: Any) -> Any:
            counts[path] += 1
            return asked(client, method, path, *args)

        run.one.patch.setattr(EngineClient, "_answer", ask)
        for version in range(3):
            await run.land(version)
    assert counts["forward"] == counts["/generate"] == 3, counts
    assert counts["/server_info"] == 1, counts


@pytest.mark.slow
@pytest.mark.parametrize("step", [1e-4, pytest.param(1e-3, marks=pytest.mark.full)])
async def test_in_bfloat16_an_engine_that_stands_still_is_seen_below_the_limits(step: float, proven: Open) -> None:
    """The steps move the log-probs by less than kernels may differ: only standing still gives the engine away."""
    async with proven(dtype="bfloat16") as run:
        await run.land(0)
        run.move(step)
        await run.land(1)
        plant(run.one.patch, stale(lambda name: True))
        for version in range(2, 200):
            run.move(step, seed=version)
            run.publish(version)
            await until(lambda version=version: run.one.failures() > 0 or run.one.entry().version == version)
            if run.one.failures():
                break
        reason = await run.complaint()
        assert "since version" in reason
        assert "(limit 0.1), and the engine's by" in reason


async def test_the_second_load_may_cure_it(proven: Open) -> None:
    async with proven() as run:
        await run.land(0)
        loads = 0

        def once(live: Weights, before: Weights) -> None:
            nonlocal loads
            loads += 1
            if loads == 1:
                transpose(live, before)

        plant(run.one.patch, once)
        await run.land(1)
        assert (loads, run.one.failures()) == (2, 1)
        assert run.one.control()._prover.disagreements == 0


async def test_a_fault_that_outlives_a_restart_ends_the_run_with_the_numbers(proven: Open) -> None:
    async def restarted() -> None:
        async with proven() as run:
            plant(run.one.patch, transpose)
            run.publish(0)
            await run.complaint()
            run.one.rig.engine_at(run.one.servers[0].url, incarnation=1)
            await until(lambda: run.one.running.done())

    with pytest.raises(ExceptionGroup) as ended:
        await restarted()
    error = leaf(ended.value)
    assert isinstance(error, UnprovenPolicy)
    for part in ("engine-0", "version 0", "(float32) are 0.0001", "after a restart", "--no-policy-proof"):
        assert part in str(error)
    assert exit_code(error) == EXIT_USER_ERROR, "the supervisor starts nothing again"


async def test_a_worker_that_a_router_would_hide_is_asked_by_itself(proven: Open) -> None:
    async with proven(engines=2) as run:
        await run.land(0)
        original = EngineClient.update_weights_from_disk

        async def update(
            client: EngineClient, path: str, label: str | None, flush_cache: bool = True, **claim: Any
        ) -> WeightsUpdated:
            if client.base_url == run.one.servers[1].url:
                await run.one.servers[1].core.relabel(label)  # type: ignore[union-attr, arg-type]
                return WeightsUpdated("Succeeded", flush_cache)
            return await original(client, path, label, flush_cache, **claim)

        run.one.patch.setattr(EngineClient, "update_weights_from_disk", update)
        run.move(1e-4)
        run.publish(1)
        await run.one.landed(1)
        assert "engine-1 does not sample with version 1" in await run.complaint(1)
        assert (run.one.failures(0), run.one.served(1)) == (0, False)


async def test_no_proof_without_the_setting_or_with_a_simulated_part(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = make_tiny_checkpoint(tmp_path / "model")
    config = make_config(train={"hf_checkpoint": str(source)}, update={"policy_proof": False})
    assert prover_of(config, SimulatedBackend(config.train)) is None
    assert not caplog.records
    caplog.set_level(logging.INFO)
    simulated = make_config(train={"hf_checkpoint": str(source)}, engine={"engine": "simulated"})
    assert prover_of(simulated, SimulatedBackend(config.train)) is None
    assert "the policy is not proven: a simulated trainer or engine" in caplog.text


@pytest.mark.parametrize(
    ("facts", "element_bytes", "expected"),
    [
        ({"dtype": "float32", "device": "cpu"}, 4, "float32"),
        ({"dtype": "float32", "device": "cuda"}, 4, "half"),  # TF32
        ({"dtype": "float32", "device": "cpu"}, 2, "half"),
        ({"dtype": "auto", "device": "cpu"}, 4, "half"),
        ({"dtype": "bfloat16", "quantization": "fp8"}, 2, "quantised"),
        ({"dtype": "float32", "device": "cpu"}, 1, "quantised"),
        ({"dtype": "float32", "device": "cpu", "kv_cache_dtype": "fp8_e5m2"}, 4, "quantised"),
    ],
)
def test_the_limits_follow_the_coarsest_type(facts: dict[str, str], element_bytes: int, expected: str) -> None:
    assert precision_of(ServerInfo(**facts), element_bytes) == expected  # type: ignore[arg-type]


async def test_weights_that_are_not_finite_are_the_trainers_fault(proven: Open) -> None:
    async with proven(engines=0) as run:
        run.move(float("nan"))
        with pytest.raises(UnprovenPolicy, match="the trainer's log-probs of the canary sequences are not finite"):
            run.publish(0)


ON_SGLANG = [pytest.mark.xdist_group("sglang"), pytest.mark.full]


@pytest.mark.slow
@pytest.mark.parametrize("versions", [50, pytest.param(2000, marks=pytest.mark.full)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("engine", ["embedded", pytest.param("sglang", marks=ON_SGLANG)])
async def test_no_version_raises_an_alarm(
    engine: str,
    dtype: str,
    versions: int,
    proven: Open,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    request: pytest.FixtureRequest,
) -> None:
    server = "sglang" if dtype == "float32" else "sglang_bfloat16"
    real: RealServer | None = request.getfixturevalue(server) if engine == "sglang" else None
    monkeypatch.setattr("tests.stages.stage_rig.LIMIT_S", LIMIT_S + versions)
    async with proven(dtype=dtype, real=real) as run:
        for version in range(versions):
            run.move(10.0 ** -(3 + version % 4), seed=version)
            run.publish(version)
            await run.one.weights.landed(version)
            assert run.one.entry().proof is not None
        assert len(run.one.control()._prover._agreed) == KEPT + 1
    assert "does not s" not in caplog.text  # a connection may break in so long a time, which is no alarm


SGLANG_FAULTS = {"disk": "the old slot under the new label", "tensor": "the first bucket is not sent"}


@pytest.mark.slow
@pytest.mark.xdist_group("sglang")
@pytest.mark.parametrize("route", SGLANG_FAULTS)
async def test_faults_of_a_real_sglang_are_named(route: str, proven: Open, sglang: RealServer) -> None:
    async with proven(real=sglang, route=route) as run:
        for version in range(3):
            await run.land(version)
            assert run.one.entry().proof.largest < 1e-5
            run.move(1e-4, seed=version)
        if route == "disk":
            original = EngineClient.update_weights_from_disk

            async def update(client: EngineClient, path: str, *args: Any, **options: Any) -> WeightsUpdated:
                return await original(client, str(sglang.model), *args, **options)

            run.one.patch.setattr(EngineClient, "update_weights_from_disk", update)
        else:
            buckets = BucketTransfer.__init__

            def all_but_one(transfer: BucketTransfer, *args: Any) -> None:
                buckets(transfer, *args)
                del transfer.buckets[0]

            run.one.patch.setattr(BucketTransfer, "__init__", all_but_one)
            run.one.patch.setattr(WeightRoutes, "choose", lambda routes, announced, **_: routes._routes["tensor"])
        run.publish(3)
        reason = await run.complaint()
        assert "engine-0 does not sample with version 3" in reason
        assert not run.one.served()
