"""Command-line programs as agents: real processes that ask the gateway over HTTP."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from stages.agents.environment import Task
from stages.agents.packs.command import Command, filled
from stages.chat.messages import Message
from tests.stages.gateway.gateway_rig import opened
from tests.stages.stage_rig import until

TASK = Task(messages=(Message("system", "s"), Message("user", "2 + {model}?")))
ASKS = """
import json, os, sys, urllib.request
body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": sys.argv[1]}]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""
LOOKS = f"""
import os, sys
assert os.getcwd() == os.environ["HOME"] + "/work" and os.listdir() == [], os.getcwd()
assert open(os.environ["HOME"] + "/.agent/config").read() == "policy {{x}}"
assert "SECRET" not in os.environ and os.environ["EXTRA"] == "policy", dict(os.environ)
{ASKS}
"""
LEAVES = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open(sys.argv[1], "w").write(str(child.pid))
if sys.argv[2] == "stay":
    time.sleep(600)
"""


async def test_a_program_asks_the_policy_and_sees_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "1")
    async with opened(tmp_path, lambda prompt: "four") as rig:
        command = Command(
            [sys.executable, "-c", LOOKS, "{prompt}"],
            env={"EXTRA": "{model}"},
            files={".agent/config": "{model} {x}"},
        )
        outcome = await command.run(TASK, rig.endpoint)
        assert (outcome.reward, outcome.metrics["status"], outcome.metrics["late"]) == (None, 0.0, 0.0)
        [sample] = rig.samples()
        assert sample.response == "four"
        assert b"2 + {model}?" in bytes(i for i in sample.token_ids.tolist() if i < 256), "a prompt is no template"


@pytest.mark.parametrize("how", ["leave", "stay"])
async def test_what_a_program_started_ends_with_its_episode(how: str, tmp_path: Path) -> None:
    async with opened(tmp_path, lambda prompt: "four") as rig:
        told = tmp_path / "pid"
        command = Command([sys.executable, "-c", LEAVES, str(told), how])
        if how == "leave":  # its child has inherited its output, and must not hold us up
            await command.run(TASK, rig.endpoint)
        else:
            async with asyncio.TaskGroup() as tasks:
                episode = tasks.create_task(command.run(TASK, rig.endpoint))
                await until(lambda: told.exists() and bool(told.read_text()))
                episode.cancel()
        pid = int(told.read_text())
        await until(lambda: not os.path.exists(f"/proc/{pid}"))


async def test_a_program_that_takes_too_long_is_ended_and_graded_as_it_is(tmp_path: Path) -> None:
    async with opened(tmp_path, lambda prompt: "four") as rig:
        outcome = await Command(["sleep", "600"], deadline_s=0.1).run(TASK, rig.endpoint)
        assert (outcome.reward, outcome.metrics["late"]) == (None, 1.0)


async def test_a_program_that_fails_says_why(tmp_path: Path) -> None:
    async with opened(tmp_path, lambda prompt: "four") as rig:
        with pytest.raises(RuntimeError, match="status 3; its last output: no luck"):
            await Command([sys.executable, "-c", "print('no luck'); exit(3)"]).run(TASK, rig.endpoint)
        with pytest.raises(RuntimeError, match="no-such-program: No such file or directory; is it installed"):
            await Command(["no-such-program"]).run(TASK, rig.endpoint)
        await Command([sys.executable, "-c", "exit(3)"], check=False).run(TASK, rig.endpoint)


def test_templates_are_filled_in_one_pass() -> None:
    assert filled("{a}{b} {c} {{a}}", {"a": "{b}", "b": "2"}) == "{b}2 {c} {{b}}"
