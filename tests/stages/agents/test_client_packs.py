"""Packs for environments of other libraries, hosted by interpreters of their own, against the real libraries."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from models.tiny import make_tiny_checkpoint
from tests.agent_clients import interpreter
from tests.stages.agents.play import playing, world
from tests.stages.gateway.test_agent_episodes import agents, played
from tests.stages.stage_rig import numbers

OPENENV = "stages.agents.packs.openenv:Openenv"
SERVER = Path(__file__).with_name("openenv_server.py")


@asynccontextmanager
async def openenv_server(python: str, home: Path) -> AsyncIterator[str]:
    """A server of its own; its address."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        process = await asyncio.create_subprocess_exec(
            python, str(SERVER), str(door.fileno()), pass_fds=[door.fileno()], cwd=home, stdout=asyncio.subprocess.PIPE
        )
        port = door.getsockname()[1]
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"up\n"
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        await process.wait()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The packages take long to be imported."""
    monkeypatch.setattr("tests.stages.stage_rig.LIMIT_S", 300.0)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return make_tiny_checkpoint(tmp_path / "tiny", tokenizer="arithmetic", hidden_size=32, num_layers=1)


@pytest.mark.slow
@pytest.mark.full
async def test_an_environment_of_openenv(tiny: Path, tmp_path: Path) -> None:
    python = interpreter("openenv")
    async with openenv_server(python, tmp_path) as url:
        options = {"url": url, "action": "guess", "observation": "hint", "reset": {"least": 1}}
        async with playing(tiny, world(OPENENV, "openenv", options=options, python=python, retries=1)) as play:
            begun = await play.begin(reset={"seed": 7})
            (sample,) = begun.samples
            assert play.tokenizer.decode(numbers(sample.token_ids)).endswith("1-9:"), sample.error
            other = await play.begin(1, reset={"seed": 7, "least": 2})
            after = await play.turn(begun, "3\n")
            refused = await play.turn(after, "x\n")
            raised = (await play.turn(refused, "99\n")).samples[0].response
            # The tokenizer knows few letters.
            assert "+x\nerror: " in raised, "a guess that is no number is refused by the server, with words"
            assert "\nerror: 99 " in raised, "and what the environment raises is read as well"
            (won,) = (await play.turn(other, "7\n")).samples
            assert (won.done, won.reward, won.metrics["env/openenv/steps"]) == (True, 1.0, 1.0)
            assert [one.reward for one in after.samples[0].turn_rewards] == [-0.5]
    async with playing(tiny, world(OPENENV, "openenv", options={"url": url}, python=python, retries=1)) as play:
        (lost,) = (await play.begin()).samples
        assert (lost.status, lost.reward) == ("failed", None)
        assert "infrastructure failed 2 times" in (lost.error or "")


@pytest.mark.slow
@pytest.mark.full
async def test_an_environment_of_verifiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own taskset, harness and reward; what the policy was asked and answered is what is trained."""
    here = Path(__file__).parent
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(here.parents[2]), str(here)]))
    table = {
        "name": "verifiers",
        "path": "stages.agents.packs.verifiers:Verifiers",
        "python": interpreter("verifiers"),
    }
    async with agents(tmp_path, {"env": {"taskset": {"id": "letters_taskset"}}}, table=table) as (world, writer, _):
        rollouts = await played(world, 3, index=3)
    for (sample,) in rollouts:
        assert sample.error is None
        prompt, made = next(one for one in writer.answered if len(one[1]) == sample.new_tokens)
        assert numbers(sample.token_ids) == prompt + made
        assert (sample.done, sample.reward) == (True, float(len(made) > 2)), "the end of the turn is a token as well"
        assert sample.metrics["env/verifiers/long"] == sample.reward
