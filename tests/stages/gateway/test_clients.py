"""Unmodified clients and packages of environments, each in a Python environment that has them installed.

Their packages conflict, so they need several environments: see tests/other_programs.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.other_programs import interpreter
from tests.stages.agents.play import playing, world
from tests.stages.gateway.gateway_rig import Rig, log_prob, opened
from tests.stages.gateway.test_agent_episodes import agents, played
from tests.stages.stage_rig import numbers

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parent / "clients.py"
CALLS = {
    "bash": ('{"command": "echo 3"}', '{"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo It is 3."}'),
    "add": ('{"a": 1, "b": 2}',),
}

FULL = pytest.mark.full
# The module that a client needs, and turns of the model by sequence. openai-agents asks twice, and leaves the reasoning
# out of chat completions; smolagents writes the calls that it sends back in words of its own.
CLIENTS = (
    ("openai_chat", "openai", [2]),
    ("openai_responses", "openai", [2]),
    ("anthropic_messages", "anthropic", [2]),
    ("openai_agents_chat", "agents", [1, 2, 1, 2]),
    ("openai_agents_responses", "agents", [2, 1, 2]),
    pytest.param("smolagents", "smolagents", [1, 1], marks=FULL),
    pytest.param("mini_swe_agent", "minisweagent", [2], marks=FULL),
)


def policy(prompt: str) -> str:
    """Calls the tool that is offered first, and then says what came of it."""
    turns = prompt.count("[assistant\n") - 1
    name = next((name for name in CALLS if f'"name": "{name}"' in prompt), None)
    if name is not None and turns < len(CALLS[name]):
        return f'<think>easy</think><tool_call>{{"name": "{name}", "arguments": {CALLS[name][turns]}}}</tool_call>'
    if '"name": "final_answer"' in prompt:
        return '<tool_call>{"name": "final_answer", "arguments": {"answer": "It is 3."}}</tool_call>'
    return "It is 3."


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some clients take long to be imported."""
    monkeypatch.setattr("tests.stages.stage_rig.LIMIT_S", 300.0)


async def run(client: str, module: str, rig: Rig, **environment: str) -> Any:
    """What the client says of its task."""
    python = interpreter(module)
    home = rig.world.stage.context.run_dir / "home"
    home.mkdir(exist_ok=True)
    process = await asyncio.create_subprocess_exec(
        *(python, str(SCRIPT), client, rig.endpoint.base_url, rig.endpoint.api_key, rig.endpoint.model),
        stdout=asyncio.subprocess.PIPE,
        cwd=home,
        env={"PATH": os.environ["PATH"], "HOME": str(home), "OMP_NUM_THREADS": "1", **environment},
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    return json.loads(output.splitlines()[-1])


@pytest.mark.parametrize(("client", "module", "turns"), CLIENTS)
async def test_a_client_uses_a_tool(client: str, module: str, turns: list[int], tmp_path: Path) -> None:
    interpreter(module)
    async with opened(tmp_path, policy, max_context=1 << 16) as rig:
        assert await run(client, module, rig) == "It is 3."
        assert [part.turns for part in rig.samples()] == turns


@FULL
async def test_openenv_finds_tokens(tmp_path: Path) -> None:
    interpreter("openenv")
    async with opened(tmp_path, policy) as rig:
        assert await run("openenv", "openenv", rig) == [True, "tokens", "ok", []]


@FULL
async def test_the_training_client_of_verifiers_gets_tokens_and_log_probs(tmp_path: Path) -> None:
    interpreter("verifiers")
    async with opened(tmp_path, policy) as rig:
        text, prompt, made, log_probs = await run("verifiers", "verifiers", rig, CHECKPOINT=str(tmp_path / "bare"))
        assert text == "It is 3."
        [sample] = rig.samples()
        assert sample.token_ids.tolist() == [*prompt, *made]
        assert log_probs == [log_prob(place) for place in range(len(prompt), len(prompt) + len(made))]


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


@FULL
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


@FULL
async def test_an_environment_of_verifiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own taskset, harness and reward; what the policy was asked and answered is what is trained."""
    here = Path(__file__).parent
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(here.parents[2]), str(here)]))
    table = {"name": "verifiers", "path": "stages.agents.packs.verifiers:Verifiers", "python": interpreter("verifiers")}
    async with agents(tmp_path, {"env": {"taskset": {"id": "letters_taskset"}}}, table=table) as (world, writer, _):
        rollouts = await played(world, 3, index=3)
    for (sample,) in rollouts:
        assert sample.error is None
        prompt, made = next(one for one in writer.answered if len(one[1]) == sample.new_tokens)
        assert numbers(sample.token_ids) == prompt + made
        assert (sample.done, sample.reward) == (True, float(len(made) > 2)), "the end of the turn is a token as well"
        assert sample.metrics["env/verifiers/long"] == sample.reward
