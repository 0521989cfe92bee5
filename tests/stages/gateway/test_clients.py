"""Real clients, unmodified, in an environment of their own: whoever has them installed there sees them work.

The packages of the clients refuse each other, so that they need several environments: see tests/agent_clients.py.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.agent_clients import interpreter
from tests.stages.gateway.gateway_rig import Rig, log_prob, opened

SCRIPT = Path(__file__).parent / "clients.py"
CALLS = {
    "bash": ('{"command": "echo 3"}', '{"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo It is 3."}'),
    "add": ('{"a": 1, "b": 2}',),
}

# Of the model, by sequence. openai-agents asks twice, and leaves the reasoning out of chat completions; smolagents
# writes the calls that it sends back in words of its own.
TURNS = {
    "openai_chat": [2],
    "openai_responses": [2],
    "anthropic_messages": [2],
    "openai_agents_chat": [1, 2, 1, 2],
    "openai_agents_responses": [2, 1, 2],
    "smolagents": [1, 1],
    "mini_swe_agent": [2],
}


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("client", "module"),
    [
        ("openai_chat", "openai"),
        ("openai_responses", "openai"),
        ("anthropic_messages", "anthropic"),
        ("openai_agents_chat", "agents"),
        ("openai_agents_responses", "agents"),
        pytest.param("smolagents", "smolagents", marks=pytest.mark.full),
        pytest.param("mini_swe_agent", "minisweagent", marks=pytest.mark.full),
    ],
)
async def test_a_client_uses_a_tool(client: str, module: str, tmp_path: Path) -> None:
    interpreter(module)
    async with opened(tmp_path, policy, max_context=1 << 16) as rig:
        assert await run(client, module, rig) == "It is 3."
        parts = rig.samples()
    assert [part.turns for part in parts] == TURNS[client]


@pytest.mark.slow
@pytest.mark.full
async def test_openenv_finds_tokens(tmp_path: Path) -> None:
    interpreter("openenv")
    async with opened(tmp_path, policy) as rig:
        assert await run("openenv", "openenv", rig) == [True, "tokens", "ok", []]


@pytest.mark.slow
@pytest.mark.full
async def test_the_training_client_of_verifiers_gets_tokens_and_log_probs(tmp_path: Path) -> None:
    interpreter("verifiers")
    async with opened(tmp_path, policy) as rig:
        text, prompt, made, log_probs = await run("verifiers", "verifiers", rig, CHECKPOINT=str(tmp_path / "bare"))
        assert text == "It is 3."
        [sample] = rig.samples()
        assert sample.token_ids.tolist() == [*prompt, *made]
        assert log_probs == [log_prob(place) for place in range(len(prompt), len(prompt) + len(made))]
