"""The teacher stage among real engine servers: whose log-probs a sample carries, and what it is without them."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from configs.schema.rollout import EngineConfig
from models.engines.client import EngineClient
from models.engines.protocol import GenerateRequest, SamplingParams
from models.engines.serve import EngineServer
from models.engines.simulated.responses import simulated_scores
from models.tiny import TinyRecipe, make_tiny_checkpoint
from stages.messages import Int32Array, RolloutSlice, Sample, wire
from stages.teacher import TeacherStage
from tests.stages.engine_rig import core_of, simulated
from tests.stages.stage_rig import (
    Rig,
    before_calls,
    make_config,
    make_context,
    make_sample,
    make_slice,
    open_rig,
    running,
    take,
    time_limit,
    until,
)
from transport.stream import Inlet, Outlet

VOCABULARY = 256
GROUPS = itertools.count()  # a stream takes each key once


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("policy") / "model")


@dataclass
class World:
    """A teacher stage and its engines."""

    rig: Rig
    stack: AsyncExitStack
    stage: TeacherStage
    prompts: Outlet[Any]
    out: Inlet[Any]

    async def serve(
        self, name: str, model: Path, config: EngineConfig | None = None, incarnation: int = 0
    ) -> EngineServer:
        server = EngineServer(config or simulated(), str(model), max_context_len=None, seed=0)
        await self.stack.enter_async_context(server)
        self.rig.frozen_at(name, server.url, incarnation)
        return server

    async def send(self, slice_: RolloutSlice) -> None:
        await self.prompts.send(slice_, slice_.key)

    async def scored(self, slice_: RolloutSlice) -> tuple[Sample, ...]:
        await self.send(slice_)
        found: RolloutSlice = await take(self.out)
        return found.samples


@asynccontextmanager
async def teaching(
    policy: Path,
    tmp_path: Path,
    names: Sequence[str] = ("teacher",),
    distill: dict[str, Any] | None = None,
    kind: type[TeacherStage] = TeacherStage,
    **rollout: Any,
) -> AsyncIterator[World]:
    config = make_config(
        train={"hf_checkpoint": str(policy)},
        engine={"frozen_engine": tuple(f"{name}=somewhere" for name in names)},
        distill={"use_opd": True, **(distill or {})},
        rollout=rollout,
    )
    async with AsyncExitStack() as stack:
        rig = await stack.enter_async_context(open_rig())
        ports = await rig.join({"in": ("teacher", RolloutSlice)}, {"out": ("group", RolloutSlice)})
        stage = kind(make_context(config, tmp_path))
        world = World(rig, stack, stage, await rig.outlet("teacher"), await rig.inlet("group"))
        async with running(stage, ports):
            yield world


@pytest.fixture
async def world(policy: Path, tmp_path: Path) -> AsyncIterator[World]:
    """The stage with the one teacher `teacher`, whose engine is not up yet."""
    with time_limit():
        async with teaching(policy, tmp_path) as world:
            yield world


def rollouts(*samples: Sample, metadata: dict[str, Any] | None = None, **group: Any) -> RolloutSlice:
    return make_slice(next(GROUPS), *samples, metadata=json.dumps(metadata or {}), **group)


def by_simulation(sample: Sample, model: Path) -> list[float]:
    prompt = sample.prompt_length
    values = simulated_scores(sample.token_ids, prompt, str(model), VOCABULARY)
    return [0.0] * prompt + (values * (sample.loss_mask[prompt:] != 0)).tolist()


async def test_every_response_token_has_its_log_prob(world: World, policy: Path) -> None:
    await world.serve("teacher", policy)
    requested = rollouts(make_sample(0, n=5), make_sample(1, n=1, status="truncated"), make_sample(2, n=9))
    for before, after in zip(requested.samples, await world.scored(requested), strict=True):
        assert after.teacher_log_probs.dtype == np.float32
        assert after.teacher_log_probs.tolist() == pytest.approx(by_simulation(before, policy), abs=1e-6)
        assert after.log_probs.tolist() == before.log_probs.tolist()
        assert (after.status, after.error) == (before.status, None)


async def test_evaluations_and_what_failed_before_pass_unread(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """As what has no trained tokens."""
    sent: list[GenerateRequest] = []
    before_calls(monkeypatch, EngineClient, "generate", lambda client, request: sent.append(request))
    [passed] = await world.scored(rollouts(make_sample(0), purpose="eval"))
    assert (passed.status, len(passed.teacher_log_probs)) == ("completed", 0)
    ended = rollouts(make_sample(0, status="failed", error="grader x: died"), make_sample(1, status="aborted"))
    after = await world.scored(ended)
    assert [(sample.status, sample.error) for sample in after] == [("failed", "grader x: died"), ("aborted", None)]
    after = await world.scored(rollouts(make_sample(0, n=3, mask=[0, 0, 0]), make_sample(1, n=0)))
    assert [sample.teacher_log_probs.tolist() for sample in after] == [[0.0] * 6, [0.0] * 3]
    assert [sample.status for sample in after] == ["completed", "completed"]
    assert sent == []


async def test_the_key_and_the_teachers_are_the_configurations(policy: Path, tmp_path: Path) -> None:
    distill = {"opd_teacher_key": "who", "opd_teacher": ("code",)}
    async with teaching(policy, tmp_path, ("judge", "code"), distill) as world:
        await world.serve("code", policy)
        requested = rollouts(make_sample(0, n=6), metadata={"teacher": "judge"})
        [after] = await world.scored(requested)
        assert after.status == "completed", "the field `teacher` means nothing here"
        [after] = await world.scored(rollouts(make_sample(0, n=6), metadata={"who": "judge"}))
        assert after.status == "failed", "a frozen engine that is no teacher"


async def test_an_unknown_teacher_fails_the_sample_and_names_the_known_ones(policy: Path, tmp_path: Path) -> None:
    async with teaching(policy, tmp_path, ("maths", "code")) as world:
        await world.serve("maths", policy)
        for wrong in ("physics", 7, ["maths"]):
            [after] = await world.scored(rollouts(make_sample(0), metadata={"teacher": wrong}))
            assert after.status == "failed"
            assert f"no engine is called {str(wrong)!r} here; the known names are maths, code" in str(after.error)
            assert len(after.teacher_log_probs) == 0
        [fine] = await world.scored(rollouts(make_sample(0), metadata={"teacher": "maths"}))
        assert fine.status == "completed"


async def test_a_refused_sample_fails_alone_and_at_once(world: World, policy: Path) -> None:
    await world.serve("teacher", policy)  # has positions for 1024 tokens
    requested = rollouts(make_sample(0, n=4), sample_of([1] * 1100), sample_of([9, 5000, 9], index=2))
    after = await world.scored(requested)
    assert [sample.status for sample in after] == ["completed", "failed", "failed"]
    assert "teacher teacher: EngineRefused" in str(after[1].error)
    assert "longer than the model's context length" in str(after[1].error)
    assert "5000, outside the vocabulary of 264 tokens" in str(after[2].error)
    assert world.stage.sampler.retries == 0


def sample_of(ids: list[int], index: int = 1) -> Sample:
    return msgspec.structs.replace(make_sample(index, n=len(ids)), token_ids=wire([1, 2, 3, *ids], Int32Array))


async def test_a_lost_teacher_costs_time_not_samples(world: World, policy: Path) -> None:
    """The first server takes the request and never answers; its successor does."""
    first = await world.serve("teacher", policy)
    await core_of(first).pause("in_place")
    requested = rollouts(make_sample(0, n=4), make_sample(1, n=4))
    await world.send(requested)
    await until(lambda: core_of(first).load().num_waiting_reqs == 2)
    world.rig.topic.drop("engine/teacher")
    await world.serve("teacher", policy, incarnation=1)
    after = (await take(world.out)).samples
    for sample, before in zip(after, requested.samples, strict=True):
        assert sample.teacher_log_probs.tolist() == pytest.approx(by_simulation(before, policy), abs=1e-6)
    assert world.stage.sampler.retries >= 2


async def test_a_teacher_at_an_address_may_come_late(world: World, policy: Path) -> None:
    """An engine that somebody else runs keeps its address through an outage: the stage goes on asking."""
    server = await world.serve("teacher", policy)
    port = int(server.url.rpartition(":")[2])
    await server.__aexit__(None, None, None)
    requested = rollouts(make_sample(0, n=4))
    await world.send(requested)
    await until(lambda: world.stage.sampler.retries > 0)
    late = EngineServer(simulated(), str(policy), max_context_len=None, seed=0, port=port)
    await world.stack.enter_async_context(late)
    [after] = (await take(world.out)).samples
    assert after.status == "completed"


async def test_a_teacher_that_never_comes_fails_the_sample_at_its_deadline(policy: Path, tmp_path: Path) -> None:
    """As one that hangs."""
    async with teaching(policy, tmp_path, request_timeout_secs=0.3) as world:
        [after] = await world.scored(rollouts(make_sample(0)))
        assert after.status == "failed"
        assert "not up within 0.3 s; see logs/frozen-teacher.log" in str(after.error)
        world.rig.frozen_at("teacher", "http://127.0.0.1:9")  # the discard port: nothing listens
        [after] = await world.scored(rollouts(make_sample(0)))
        assert "EngineUnreachable" in str(after.error)
        await core_of(await world.serve("teacher", policy, incarnation=1)).pause("in_place")
        [after] = await world.scored(rollouts(make_sample(0)))
        assert (after.status, "EngineTimeout" in str(after.error)) == ("failed", True)


async def test_a_draining_run_does_not_wait_for_a_lost_teacher(world: World) -> None:
    await world.send(rollouts(make_sample(0)))
    world.rig.topic.publish("drain", b"the user")
    [after] = (await take(world.out)).samples
    assert "the run is stopping" in str(after.error)


def embedded() -> EngineConfig:
    return EngineConfig(engine="embedded", engine_slots=16, engine_device="cpu")


async def rolled_out(server: EngineServer, temperature: float, n: int = 4) -> tuple[Sample, ...]:
    """Rollouts of an engine from the prompt of `make_group`."""
    async with EngineClient(server.url) as client:
        outputs = await client.generate(
            GenerateRequest(
                input_ids=[1, 2, 3],
                sampling_params=SamplingParams(max_new_tokens=24, n=n, temperature=temperature, ignore_eos=True),
                return_logprob=True,
            )
        )
    return tuple(
        msgspec.structs.replace(
            make_sample(index, n=24, log_probs=output.output_log_probs),
            token_ids=wire([1, 2, 3, *output.output_ids], Int32Array),
        )
        for index, output in enumerate(outputs)
    )


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_a_teacher_that_is_the_policy_gives_a_reverse_kl_of_zero(
    policy: Path, tmp_path: Path, temperature: float
) -> None:
    other = make_tiny_checkpoint(tmp_path / "other", TinyRecipe(seed=1))
    async with teaching(policy, tmp_path, ("same", "other"), rollout_temperature=temperature) as world:
        server = await world.serve("same", policy, embedded())
        await world.serve("other", other, embedded())
        samples = await rolled_out(server, temperature)
        for sample in await world.scored(rollouts(*samples)):
            reverse_kl = sample.log_probs - sample.teacher_log_probs
            assert float(np.abs(reverse_kl).max()) < 1e-4
        for sample in await world.scored(rollouts(*samples, metadata={"teacher": "other"})):
            assert float(np.abs(sample.log_probs - sample.teacher_log_probs).max()) > 1e-2


@pytest.mark.parametrize(
    ("config", "reported"), [(simulated(), True), (embedded(), False)], ids=["simulated", "embedded"]
)
async def test_a_teacher_that_scores_at_temperature_one_is_reported(
    policy: Path, tmp_path: Path, config: EngineConfig, reported: bool, caplog: pytest.LogCaptureFixture
) -> None:
    probed: list[bool] = []

    class Watched(TeacherStage):
        async def _probe(self, name: str) -> None:
            await super()._probe(name)
            probed.append(True)

    with caplog.at_level(logging.WARNING, "sluice.teacher"):
        async with teaching(policy, tmp_path, kind=Watched, rollout_temperature=0.7) as world:
            await world.serve("teacher", policy, config)
            await until(lambda: bool(probed))
    assert ("scores at temperature 1, but rollout_temperature is 0.7" in caplog.text) is reported
