"""Whole runs in an environment: rows are its own tasks, and each rollout begins and ends there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launching import SIMULATED, here, made_model, succeed_here

import launch as program
from pipeline.observe.metrics import read_metrics

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
def test_a_run_whose_rollouts_live_in_an_environment(tmp_path: Path) -> None:
    done = succeed_here(tmp_path / "run", *recipe(tmp_path), "--scale", "agents=2", "--scale", "group=2")
    rows = list(read_metrics(done.run_dir / "metrics.jsonl"))
    trained = [row for row in rows if "env/world/turns" in row]
    assert len(trained) == 2
    assert all(1 <= row["env/world/turns"] <= 3 for row in trained)
    # Each episode earns 1 at its end and 0.25 with each turn before; what graders say is not asked for.
    for row in trained:
        assert row["train/reward_mean"] == pytest.approx(1 + 0.25 * (row["env/world/turns"] - 1))
        assert row["rollout/turns/mean"] == row["env/world/turns"]
    assert [row["eval/world"] for row in rows if "eval/world" in row] == [1.0, 1.0]
    tasks = [json.loads(line) for line in (done.run_dir / "assets/data/world-train.jsonl").read_text().splitlines()]
    assert len(tasks) == 40
    assert tasks[1] == {
        "input": "world",
        "turns": 2,
        "split": "train",
        "seed": 42,
        "prompt": "",
        "metadata": {"turns": 2, "split": "train", "seed": 42, "prompt": "", "environment": "world"},
    }


@pytest.mark.slow
def test_rows_of_two_environments_are_trained_and_a_resume_goes_on_with_the_next_row(tmp_path: Path) -> None:
    other = RECIPE.partition("[data]")[0].replace('"world"', '"other"').replace("workers = 2", "")
    mixed = other + RECIPE.replace('prompt_data = ["world"]', 'prompt_data = ["world@[0:3]", "other@[0:1]"]', 1)
    flags = [*recipe(tmp_path, mixed), "--num-rollout", "1", "--save-interval", "1"]
    run_dir = succeed_here(tmp_path / "run", *flags).run_dir
    assert program.main(["--resume", str(run_dir), "--num-rollout", "3"]) == 0
    ledger = [json.loads(line) for line in (run_dir / "ledger.jsonl").read_text().splitlines()]
    positions = [line["position"] for line in ledger if line["type"] == "admit" and not line["requeued"]]
    assert positions == list(range(len(positions)))
    assert len(positions) >= 12
    names = set().union(*read_metrics(run_dir / "metrics.jsonl"))
    assert {"env/world/turns", "env/other/turns"} <= names


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
