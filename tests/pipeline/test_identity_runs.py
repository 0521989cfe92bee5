"""Token identity of whole runs: batches as they were trained beside what the engine processes noted and what the saved
weights make of it, with everything killed that can be."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from launching import finish, start
from test_kill import kill, pids, wait_for_steps

from models.checkpoint import final_path
from models.tiny import TinyRecipe, make_tiny_checkpoint
from stages.messages import Sample
from stages.rollouts import rollouts
from stages.train.saved_groups import load_batch
from tests.engine_record import noted, noting
from tests.identity import check_identity, check_once
from tests.stages.agents.play import STOPS, Talk, with_template

pytestmark = pytest.mark.slow

RECIPE = """
[[environment]]
name = "talk"
path = "tests.stages.agents.play:Talk"
workers = 2

[[environment]]
name = "openai_client"
retries = 100

[[environment]]
name = "wanderer"
path = "tests.stages.agents.play:Wanderer"
options = {{ rest_s = 0.7 }} # so that a kill meets some of them in the middle
retries = 100

[reward]
rm_type = "random:0.5" # of the client; the others have rewards of their own

[data]
prompt_data = ["{rows}"]
"""
KINDS = ("talk", "openai_client", "wanderer")
ASKED = ("1+2=?", "7", "8-9")  # by a user of the plain client, each behind an answer
REQUESTS = 8  # of one Wanderer


@pytest.fixture
def conversations(tmp_path: Path) -> list[str]:
    """Flags of a run of small conversations that saves all weights and all batches."""
    torch.set_num_threads(1)
    model = make_tiny_checkpoint(
        tmp_path / "model", TinyRecipe(tokenizer="arithmetic", hidden_size=32, num_layers=2, intermediate_size=64,
        max_position_embeddings=256))  # fmt: skip
    users, rows = [{"role": "user", "content": text} for text in ASKED], tmp_path / "rows.jsonl"
    talks = itertools.cycle(Talk.tasks("train", 0))
    with rows.open("w") as file:
        for number in range(66):
            kind = KINDS[number % len(KINDS)]
            metadata = {**(next(talks) if kind == "talk" else {}), "environment": kind}
            file.write(json.dumps({"input": users, "metadata": metadata}) + "\n")
    (tmp_path / "talk.toml").write_text(RECIPE.format(rows=rows))
    return [
        "--config", str(tmp_path / "talk.toml"), "--hf-checkpoint", str(with_template(model)),
        "--save-debug-rollout-data", str(tmp_path / "batches" / "{rollout_id}.msgpack"),
        "--save-interval", "1", "--keep-last-n", "999", "--lr", "1e-2", "--rollout-stop-token-ids", *map(str, STOPS),
        "--rollout-max-response-len", "150", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4",
        "--async-buffer-size", "2", "--no-live", "--log-interval", "1", "--no-use-tensorboard", "--no-use-plot",
    ]  # fmt: skip


def trained(directory: Path) -> list[tuple[int, tuple[Sample, ...]]]:
    """Rollouts by batch, as they were trained."""
    template = str(directory / "batches" / "{rollout_id}.msgpack")
    steps = sorted(int(file.stem) for file in (directory / "batches").glob("*.msgpack"))
    return [
        (step, tuple(parts))
        for step in steps
        for slice_ in load_batch(template, step)
        for parts in rollouts(slice_.samples)
    ]


def check_run(directory: Path, run_dir: Path, *, keeps_cache: bool = True) -> tuple[int, int]:
    """Number of rollouts whose turns saw a change of the weights, and of those that were trained."""
    made, checked = noted(directory / "noted"), trained(directory)
    checkpoints = {0: directory / "model"} | {
        step + 1: final_path(run_dir / "checkpoints", step + 1) / "hf" for step, _ in checked
    }
    looks = [check_identity(parts, made, checkpoints, keeps_cache=keeps_cache) for _, parts in checked]
    check_once([answer for look in looks for answer in look.answers], made)
    return sum(look.boundaries > 0 for look in looks), len(looks)


def kill_workers(run_dir: Path) -> None:
    """Of all environments: a guard's child is the process that hosts the episodes."""
    agents = psutil.Process(*pids(run_dir, "agents-0"))
    guards = [child for child in agents.children() if any("stages.agents.worker" in word for word in child.cmdline())]
    assert guards
    for guard in guards:
        for worker in guard.children():
            worker.kill()


def test_everything_is_killed_and_the_run_resumed(tmp_path: Path, conversations: Sequence[str]) -> None:
    """Episodes of an environment go on where they were. Agents, which ask through the gateway (branches, requests at a
    time, a compacted context), begin anew, and nothing of what was lost is trained."""
    run_dir, env = tmp_path / "run", noting(tmp_path / "noted")
    flags = ["--num-rollout", "7", "--scale", "engine=2", "--max-restarts", "9"]
    process = start(run_dir, *conversations, *flags, **env)
    wait_for_steps(process, run_dir, 1, timeout_s=300)
    kill(run_dir, "generate-0")
    kill(run_dir, "engine-0")
    kill_workers(run_dir)
    wait_for_steps(process, run_dir, 3)
    kill(run_dir, "agents-0")  # with the gateway and all of its sessions
    wait_for_steps(process, run_dir, 5)
    process.kill()
    process.wait()
    process = start(None, "--resume", str(run_dir), **env)
    done = finish(process, run_dir).check()
    mixed, rollouts_ = check_run(tmp_path, run_dir)
    assert rollouts_ == 7 * 4 * 4, done.err[-3000:]
    assert mixed, "no turn saw the weights change"
    assert done.summary["groups"]["failed"] == 0
    played = [parts for _, parts in trained(tmp_path)]
    for kind in KINDS:
        mine = [parts for parts in played if f"env/{kind}/turns" in parts[-1].metrics]
        versions = {version for parts in mine for part in parts for version in part.model_versions}
        assert len(versions) > 1, f"{kind}: trained of versions {versions}"
        if kind != "talk":
            for parts in mine:
                check_one_attempt(parts)


def check_one_attempt(parts: Sequence[Sample]) -> None:
    """As many turns as its agent asks for in one life, or fewer where it met a limit."""
    said, limited = parts[-1].metrics, parts[-1].status == "truncated"
    if "env/wanderer/turns" in said:
        assert said["env/wanderer/turns"] == REQUESTS or (limited and said["env/wanderer/turns"] < REQUESTS), said
        return
    [only] = parts
    made = only.versions >= 0
    assert np.count_nonzero(np.diff(made, prepend=False) & made) == only.turns == said["env/openai_client/turns"]
    assert only.turns == len(ASKED) or (limited and only.turns < len(ASKED))
