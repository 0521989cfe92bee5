"""Agents from the prompt to a reward: in the agents stage, and as command-line programs."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from pipeline.record.kept_files import uncertain_in
from stages.agents.environment import Task
from stages.agents.packs.command import Command
from stages.agents.stage import AgentsStage
from stages.base import GenerateOptions
from stages.chat.messages import Message
from stages.messages import Sample
from stages.records.once import EPISODES_DIR, Once
from stages.rollouts import rollout_fault, trained_masks
from stages.workers.process import WorkerProcess
from tests.other_programs import interpreter
from tests.stages.agents.play import conversing
from tests.stages.engine_rig import AGENTS, World
from tests.stages.gateway.gateway_rig import VOCABULARY, ScriptedWriter, opened, scripted
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
LEFT_BEHIND = """
import os, sys
assert os.listdir() == [], os.listdir()
open(sys.argv[1], "w").write(os.environ["HOME"])
"""
LEAVES = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open(sys.argv[1], "w").write(str(child.pid))
if sys.argv[2] == "stay":
    time.sleep(600)
"""


def four(prompt: str) -> str:
    return "four"


def program(code: str, *arguments: str, **options: Any) -> Command:
    return Command([sys.executable, "-c", code, *arguments], **options)


async def test_a_program_asks_the_policy_and_sees_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "1")
    async with opened(tmp_path, four) as rig:
        files = {".agent/config": "{model} {x}"}
        outcome = await program(LOOKS, "{prompt}", env={"EXTRA": "{model}"}, files=files).run(TASK, rig.endpoint)
        assert (outcome.reward, outcome.metrics["status"], outcome.metrics["late"]) == (None, 0.0, 0.0)
        [sample] = rig.samples()
        assert sample.response == "four"
        assert b"2 + {model}?" in bytes(i for i in sample.token_ids.tolist() if i < 256), "a prompt is no template"


def command_lines(pid: int) -> bytes:
    """Of a process, its parent and its children: what every user of the machine can read."""
    family = {pid, psutil.Process(pid).ppid(), *(child.pid for child in psutil.Process(pid).children(recursive=True))}
    return b" ".join(Path(f"/proc/{number}/cmdline").read_bytes() for number in family)


async def test_no_key_of_a_program_nor_option_stands_in_a_command_line(tmp_path: Path) -> None:
    """The gateway's key is in the program's environment, which other users cannot read."""
    keys = {"KEY": "sk-mine"}
    async with opened(tmp_path, four) as rig, asyncio.TaskGroup() as tasks:
        reported = tmp_path / "pid"
        look = "import os, sys, time; print(os.getpid(), file=open(sys.argv[1], 'w')); time.sleep(60)"
        episode = tasks.create_task(program(look, str(reported), env=keys).run(TASK, rig.endpoint))
        await until(lambda: reported.exists() and bool(reported.read_text()))
        shown = command_lines(int(reported.read_text()))
        episode.cancel()
    assert b"stages.workers.guard" in shown
    assert b"sk-mine" not in shown
    assert rig.endpoint.api_key.encode() not in shown
    options = json.dumps({"argv": ["true"], "env": keys})
    worker = WorkerProcess("stages.agents.worker", (0, f"{Command.__module__}:Command", options, tmp_path))
    try:
        await worker.ready()
        assert worker.pid is not None
        shown = command_lines(worker.pid)
    finally:
        await worker.close()
    assert b"stages.agents.worker" in shown
    assert b"sk-mine" not in shown


async def test_a_program_that_starts_again_has_the_same_path_and_an_empty_home(tmp_path: Path) -> None:
    """The path is in the prompts of some programs, and a prompt that differs would be a new request."""

    async def home(episode: str, run: Path = tmp_path) -> str:
        command = program(LEFT_BEHIND, str(tmp_path / "home"))
        command.once = Once(run, episode)  # type: ignore[attr-defined]
        with rig.another_session() as (_, key):
            await command.run(TASK, msgspec.structs.replace(rig.endpoint, api_key=key))
        found = (tmp_path / "home").read_text()
        assert not Path(found).exists()
        Path(found, "work").mkdir(parents=True)  # as if it had been killed
        Path(found, "work", "result").touch()
        return found

    async with opened(tmp_path, four) as rig:
        first = await home("3/1")
        assert await home("3/1") == first
        others = [await home("3/2"), await home("3/1", tmp_path / "other")]
    assert len({first, *others}) == 3
    for path in (first, *others):
        shutil.rmtree(path)


async def test_what_a_program_started_ends_with_its_episode(tmp_path: Path) -> None:
    async with opened(tmp_path, four) as rig:
        for how in ("leave", "stay"):
            reported = tmp_path / how
            command = program(LEAVES, str(reported), how)
            if how == "leave":  # its child has inherited its output, and must not hold us up
                await command.run(TASK, rig.endpoint)
            else:
                async with asyncio.TaskGroup() as tasks:
                    episode = tasks.create_task(command.run(TASK, rig.endpoint))
                    await until(lambda reported=reported: reported.exists() and bool(reported.read_text()))  # type: ignore[misc]
                    episode.cancel()
            pid = int(reported.read_text())
            await until(lambda pid=pid: not psutil.pid_exists(pid))  # type: ignore[misc]


async def test_a_program_that_fails_says_why_and_one_that_takes_too_long_is_graded_as_it_is(tmp_path: Path) -> None:
    async with opened(tmp_path, four) as rig:
        with pytest.raises(RuntimeError, match="status 3; its last output: no luck"):
            await program("print('no luck'); exit(3)").run(TASK, rig.endpoint)
        with pytest.raises(RuntimeError, match="no-such-program: No such file or directory; is it installed"):
            await Command(["no-such-program"]).run(TASK, rig.endpoint)
        await program("exit(3)", check=False).run(TASK, rig.endpoint)
        outcome = await Command(["sleep", "600"], deadline_s=0.1).run(TASK, rig.endpoint)
        assert (outcome.reward, outcome.metrics["late"]) == (None, 1.0)


PLAIN = "tests.stages.gateway.plain_agents"


@asynccontextmanager
async def agents(
    tmp_path: Path,
    options: dict[str, Any],
    *,
    table: dict[str, Any] | None = None,
    max_context: int = 4096,
    lives: tuple[int, ...] = (0,),
    **sections: Any,
) -> AsyncIterator[tuple[World, ScriptedWriter, AgentsStage]]:
    """Generate and agents stages, and an engine that answers with a number of letters that hangs on the prompt."""
    shared = {"name": "asker", "path": f"{PLAIN}:Asker", "memory_gb": 0, "retries": 1}
    async with scripted(
        tmp_path,
        lambda prompt: "x" * (1 + len(prompt) % 7),
        environment=[{**shared, "options": options, **(table or {})}],
        train={"hf_checkpoint": str(tmp_path / "bare")},
        **AGENTS,
        **sections,
    ) as (world, writer):
        (tmp_path / EPISODES_DIR).mkdir()
        yield world, writer, await world.run_agents(limits=GenerateOptions(max_context, VOCABULARY, lives=lives))


async def played(world: World, n: int = 1, **metadata: Any) -> list[tuple[Sample, ...]]:
    """The rollouts of a group, by their sequences."""
    await world.ask(conversing(0, n, **metadata))
    found: dict[int, list[Sample]] = {}
    while len(found) < n:
        for sample in (await world.answer()).samples:
            found.setdefault(sample.index, []).append(sample)
    return [tuple(found[index]) for index in sorted(found)]


async def test_agents_make_rollouts_of_several_sequences(tmp_path: Path) -> None:
    async with agents(tmp_path, {"turns": 3}) as (world, writer, stage):
        rollouts = await played(world, 4, worth=0.5)
        assert stage.activity.extra["retried"] == 0.0
    assert len(rollouts) == 4
    trained = [int(mask.sum()) for parts in rollouts for mask in trained_masks(parts)]
    assert sum(trained) == sum(len(made) for _, made in writer.answered)
    for index, parts in enumerate(rollouts):
        assert rollout_fault(parts) is None
        helper, main = parts
        assert (helper.turns, main.turns, main.index) == (1, 3, index)
        assert (main.status, main.reward, main.done) == ("completed", 0.5, True)
        assert main.metrics == {"env/asker/asked": 3.0, "env/asker/turns": 4.0, "env/asker/sequences": 2.0}


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "known"), [("kill", 2), ("away", 0)], ids=["recorded", "unrecorded"])
async def test_an_episode_that_infrastructure_ended_is_begun_again(fault: str, known: int, tmp_path: Path) -> None:
    options = {"fault": fault, "once": str(tmp_path / "once")}
    async with agents(tmp_path, options, lives=(0,) if known else ()) as (world, writer, stage):
        [parts] = await played(world)
        assert stage.activity.extra["retried"] == 1.0
        assert stage.activity.extra["restored"] == float(known > 0)
        assert len(writer.answered) == 2 + 3 - known, "what it was answered before, it is answered again"
    made = writer.answered[2 - known :]
    assert sum(int(mask.sum()) for mask in trained_masks(parts)) == sum(len(ids) for _, ids in made)
    assert parts[-1].reward == 1.0
    assert parts[-1].metrics.get("env/asker/uncertain") == (1.0 if known else None)
    assert uncertain_in(tmp_path / EPISODES_DIR) == (known > 0)


@pytest.mark.slow
async def test_what_engines_do_not_answer_is_no_fault_of_the_agent(tmp_path: Path) -> None:
    patient, once = {"retries": 1000}, {"max_retries": 0}
    async with agents(tmp_path, {"turns": 2}, table=patient, proxied=True, rollout=once) as (world, _, stage):
        [hosting] = stage._hostings
        world.proxies[0].answer_generate_with(500)
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(played(world))
            await until(lambda: hosting.retried > 0)
            world.proxies[0].answer_generate_with(0)
        [parts] = await task
    assert (parts[-1].status, parts[-1].reward) == ("completed", 1.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({"turns": 9}, {"rollout": {"max_turns": 3}}),
        ({"turns": 9}, {"max_context": 60}),
        ({"fault": "sleep"}, {"table": {"episode_deadline_s": 2.0}}),
    ],
    ids=["turns", "context", "deadline"],
)
async def test_an_agent_that_meets_a_limit_is_graded_as_it_is(
    options: dict[str, Any], limit: dict[str, Any], tmp_path: Path
) -> None:
    async with agents(tmp_path, options, **limit) as (world, _, stage):
        [parts] = await played(world)
        assert (parts[-1].status, parts[-1].reward) == ("truncated", 0.0), "no grader, and no reward of its own"
        assert rollout_fault(parts) is None
        assert stage.activity.extra["retried"] == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("cut_last", [True, False])
async def test_an_agent_that_fails_over_an_answer_that_was_cut_is_truncated(cut_last: bool, tmp_path: Path) -> None:
    """What it was answered is trained; the fault is not its program's. One that fails later has failed."""
    strict = {"path": f"{PLAIN}:Strict"}
    async with agents(tmp_path, {"limits": [50, 1] if cut_last else [1, 50]}, table=strict) as (world, writer, stage):
        [[sample]] = await played(world)
        assert stage.activity.extra["retried"] == 0.0
    if cut_last:
        assert (sample.status, sample.reward, sample.error, sample.turns) == ("truncated", 0.0, None, 2)
        assert int(sample.loss_mask.sum()) == sum(len(made) for _, made in writer.answered)
    else:
        assert (sample.status, sample.reward) == ("failed", None)
        assert sample.error == "environment asker: ValueError: the last answer is completed: None"


@pytest.mark.slow
async def test_openai_agents_whose_answer_is_cut_is_truncated(tmp_path: Path) -> None:
    """It takes a response that is incomplete for a fault of the model, and raises."""
    pack = {"path": "stages.agents.packs.openai_agents:OpenaiAgents", "python": interpreter("agents")}
    short = {"rollout_max_response_len": 1}
    async with agents(tmp_path, {"api": "responses"}, table=pack, rollout=short) as (world, writer, stage):
        [[sample]] = await played(world)
        assert stage.activity.extra["retried"] == 0.0
    assert (sample.status, sample.reward, sample.turns) == ("truncated", 0.0, 1)
    [(prompt, made)] = writer.answered
    assert sample.token_ids.tolist() == [*prompt, *made]
    assert sample.loss_mask.tolist() == [0] * len(prompt) + [1] * len(made)


@pytest.mark.slow
async def test_a_drain_ends_agents(tmp_path: Path) -> None:
    async with agents(tmp_path, {"turns": 1000}) as (world, writer, _), asyncio.TaskGroup() as tasks:
        task = tasks.create_task(played(world))
        await until(lambda: len(writer.answered) > 3)
        world.rig.topic.publish("drain", b"1")
        [[sample]] = await task
    assert sample.status == "aborted"
