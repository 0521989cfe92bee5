"""Engines that run already: checked, dropped while they are away, taken back, never ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path

import pytest
from fake_servers import FAKE, Told, configured, eventually, outside

from models.engines.protocol import ModelInfo
from pipeline.errors import UsageError
from pipeline.external import ExternalEngine, PolicyConfig, differs
from pipeline.free_port import held_port
from pipeline.lifecycle import EngineSpec


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    path = tmp_path / "fake.py"
    path.write_text(FAKE)
    return path


def external(told: Told, port: int, model: Path, **health: float) -> ExternalEngine:
    config = configured(**health)
    spec = EngineSpec("engine-0", config.engine, str(model), None, 0, 0, external=f"http://127.0.0.1:{port}")
    return ExternalEngine(spec, told, config.health)


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"architectures": ["Tiny"], "vocab_size": 32}')
    return tmp_path


@contextlib.asynccontextmanager
async def watched(run: Callable[[], Coroutine[None, None, None]]) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(run())
        yield
        task.cancel()


async def test_an_external_engine_is_dropped_while_it_is_away_and_taken_back(fake: Path, policy: Path) -> None:
    told = Told()
    with held_port() as port:
        async with watched(external(told, port, policy).run):
            async with outside(fake, port) as process:
                assert (await told.until("up"))[3:] == ("0", "9.9")
                os.kill(process.pid, signal.SIGSTOP)
                away = await told.until("away")
                assert "2 failed health checks in a row (/model_info gave no answer" in away[2]
                assert process.returncode is None, "it is not ours to end"
                os.kill(process.pid, signal.SIGCONT)
                assert (await told.until("up", 2))[3] == "1"
            await told.until("away", 2)
            async with outside(fake, port, "Other"):
                await eventually(lambda: [("said",)] if any("it is left out" in line for line in told.lines) else [])
                assert [e[0] for e in told.events] == ["up", "away", "up", "away"]
            async with outside(fake, port):
                assert (await told.until("up", 3))[3] == "2"
    left_out = [line for line in told.lines if "left out" in line]
    assert left_out == [
        f"engine-0: http://127.0.0.1:{port} is back, but it serves a Other, the policy is a Tiny; it is left out"
    ]


async def test_an_external_engine_of_another_model_is_refused(fake: Path, policy: Path) -> None:
    with held_port() as port:
        async with outside(fake, port, "Other"):
            with pytest.raises(
                UsageError, match="it serves a Other, the policy is a Tiny; start it with the checkpoint"
            ):
                await external(Told(), port, policy).run()


async def test_an_external_engine_that_is_not_there_is_told_with_the_cure(policy: Path) -> None:
    with held_port() as port:
        engine = external(Told(), port, policy, rollout_health_check_first_wait=0.3)
        with pytest.raises(
            UsageError, match=r"--rollout-external-engine-addrs .* no healthy engine answers .* start it"
        ):
            await engine.run()


@pytest.mark.parametrize(
    ("info", "theirs", "found"),
    [
        (ModelInfo(architectures=["Tiny"]), None, None),
        (ModelInfo(), None, None),
        (ModelInfo(architectures=["Tiny"], vocab_size=64), None, "its vocab_size is 64, the policy's is 32"),
        (
            ModelInfo(architectures=["Tiny"]),
            PolicyConfig(("Tiny",), 32, hidden_size=128),
            "its hidden_size is 128, the policy's is 64",
        ),
    ],
)
def test_models_are_told_apart_by_what_is_known(
    info: ModelInfo, theirs: PolicyConfig | None, found: str | None
) -> None:
    assert differs(PolicyConfig(("Tiny",), 32, 64, 2), info, theirs) == found
