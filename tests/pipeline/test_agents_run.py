"""Whole runs in an environment: rows are its own tasks, and each rollout begins and ends there."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from launching import SIMULATED, SMALL, here, made_model, sevens, succeed_here
from scripted_run import Scripted, scripted

import launch as program
from configs.schema import Config, StageConfig
from pipeline.controller import wait_empty
from pipeline.graph import build
from pipeline.record.metrics import read_metrics
from tests.other_programs import interpreter

RECIPE = """
[[environment]]
name = "world"
path = "tests.stages.agents.worlds:World"
workers = 2

[data]
prompt_data = ["world"]

[eval]
eval_interval = 2
eval_prompt_data = ["world@[0:4]"]

[rollout]
num_rollout = 2
rollout_batch_size = 4
n_samples_per_prompt = 4
rollout_max_response_len = 64

[asynchrony]
async_buffer_size = 1
"""
FLAGS = ["--no-live", "--log-interval", "1", "--no-use-tensorboard", "--no-use-plot", "--rollout-shuffle"]


def recipe(directory: Path, text: str = RECIPE) -> list[str]:
    (directory / "world.toml").write_text(text)
    return ["--config", str(directory / "world.toml"), *FLAGS, *made_model(), *SIMULATED]


@pytest.mark.slow
def test_a_run_whose_rollouts_live_in_environments_and_a_resume_goes_on_with_the_next_row(tmp_path: Path) -> None:
    other = RECIPE.partition("[data]")[0].replace('"world"', '"other"').replace("workers = 2", "")
    mixed = other + RECIPE.replace('prompt_data = ["world"]', 'prompt_data = ["world@[0:3]", "other@[0:1]"]', 1)
    flags = [*recipe(tmp_path, mixed), "--save-interval", "2", "--scale", "agents=2", "--scale", "group=2"]
    flags += ["--rollout-max-response-len", "200"]  # no episode is cut short
    run_dir = succeed_here(tmp_path / "run", *flags).run_dir
    assert program.main(["--resume", str(run_dir), "--num-rollout", "4"]) == 0
    rows = list(read_metrics(run_dir / "metrics.jsonl"))
    trained = [row for row in rows if "env/world/turns" in row]
    assert len(trained) == 4
    for row in trained:
        assert 1 <= row["env/world/turns"] <= 3
        # Each episode earns 1 at its end and 0.25 with each turn before; what graders say is not asked for.
        assert row["train/reward_mean"] == pytest.approx(1 + 0.25 * (row["rollout/turns/mean"] - 1))
    assert "env/other/turns" in set().union(*rows)
    assert {row["eval/world"] for row in rows if "eval/world" in row} == {1.0}
    tasks = [json.loads(line) for line in (run_dir / "assets/data/world-train.jsonl").read_text().splitlines()]
    assert len(tasks) == 40
    own = {"turns": 2, "split": "train", "seed": 42, "prompt": ""}
    assert tasks[1] == {"input": "world", **own, "metadata": {**own, "environment": "world"}}
    ledger = [json.loads(line) for line in (run_dir / "ledger.jsonl").read_text().splitlines()]
    positions = [line["position"] for line in ledger if line["type"] == "admit" and not line["requeued"]]
    assert positions == list(range(len(positions)))
    assert len(positions) >= 16


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("World", "Sync"), "Sync has no 'async def step'"),
        (("World", "Wrld"), "has no 'Wrld'"),
        (("workers = 2", "options = { prmpt = 1 }"), "World does not take these options"),
        (("workers = 2", 'python = "/nowhere/python"'), "but that is no program"),
        (('["world"]', '["wrld"]'), "did you mean world?"),
        (('path = "tests', '# path = "tests'), "there is no built-in pack 'world'"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    tmp_path: Path, change: tuple[str, str], words: str
) -> None:
    done = here(tmp_path / "run", *recipe(tmp_path, RECIPE.replace(*change, 1)))
    assert done.code == 2
    assert words in done.err, done.err


# A tiny model visibly learns through clients that know nothing of Sluice, each in the environment that has it.


LEARNING_RECIPE = """
[[environment]]
name = "{pack}"
python = "{python}"
"""


@pytest.mark.full
@pytest.mark.parametrize(("pack", "module"), [("openai_client", "openai"), ("openai_agents", "agents")])
def test_a_model_learns_through_a_client(pack: str, module: str, tmp_path: Path) -> None:
    """A random model's answers have one seven in twenty characters."""
    (tmp_path / "agent.toml").write_text(LEARNING_RECIPE.format(pack=pack, python=interpreter(module)))
    done = succeed_here(
        tmp_path / "run", "--config", str(tmp_path / "agent.toml"), *SMALL, *made_model(), *sevens(tmp_path),
        "--num-rollout", "24", "--rollout-batch-size", "4", "--lr", "2e-3", cwd=tmp_path,
    )  # fmt: skip
    reward = done.summary["reward"]
    assert reward["first"] < 0.2, reward
    assert reward["last"] > 0.45, reward
    assert done.summary["groups"]["failed"] == 0


# A run that is drained while rollouts are in a loop: groups end before the last of their rollouts has come back.


LATE = """
import asyncio
from stages.base import LoopStage

class Late(LoopStage):
    @classmethod
    def wants(cls, config, options, message):
        return message.samples[0].turns == 1

    async def process(self, message):
        await asyncio.sleep(1.5 if message.samples[0].index else 0.0)  # one of a group is back before the others
        return message
"""
LOOP_RECIPE = '[[stage]]\nname = "late"\npath = "late:Late"\nloop = "generate"\nconcurrency = 64\n'


@pytest.mark.slow
def test_what_is_in_a_loop_comes_to_rest_before_streams_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "late.py").write_text(LATE)
    (tmp_path / "late.toml").write_text(LOOP_RECIPE)
    flags = [*SMALL, *made_model(), *SIMULATED, "--config", str(tmp_path / "late.toml"), "--num-rollout", "4000"]

    async def script(run: Scripted) -> None:
        await run.until((run.run_dir / "ledger.jsonl").exists)
        await run.steps(1)
        loop = [run.controller.hubs[name] for name in ("late", "generate.return")]
        await run.until(lambda: len(loop[0].held()) > 4)

    scripted(monkeypatch, tmp_path / "run", script, lambda run_dir: here(run_dir, *flags, cwd=tmp_path).code)


class Emptied:
    """A stream that is empty from its second look on, when the other stream gets the message."""

    def __init__(self) -> None:
        self.looks = 0
        self.following: Emptied | None = None

    def held(self) -> list[Any]:
        self.looks += 1
        if self.looks > 5 and self.following is not None:
            self.following.looks, self.following = 0, None
        return [object()] if self.looks <= 5 else []


async def test_streams_of_a_loop_are_empty_at_the_same_moment() -> None:
    last, first = Emptied(), Emptied()
    last.looks, first.following = 100, last
    hubs: Any = [first, last]
    async with asyncio.timeout(120):
        await wait_empty(hubs)
    assert first.looks > 5
    assert last.looks > 5


# Turns of a rollout meet the same replica of a loop stage, for as long as it lives and has room.


def test_a_loop_stage_is_given_what_it_had() -> None:
    """tests/transport/test_transport_hub.py shows what that means."""
    world = StageConfig(name="world", path="my_world:World", loop="generate", replicas=2)
    graph = build(msgspec.structs.replace(Config(), stage=(world,)))
    assert graph.inlets("world")["in"].routing == "sticky"
    assert graph.inlets("generate")["in"].routing == "least_loaded"
