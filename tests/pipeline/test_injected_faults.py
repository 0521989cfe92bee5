"""A run with faults on purpose in generation, grading and training: it ends, and its books balance."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launching import SIMULATED, SMALL, finish, launch, made_model, start

pytestmark = pytest.mark.slow

FAULTS = ("generate:0.05:kill", "reward:0.05:error", "train:0.05:kill")
SEED = "8237"  # with it, groups 1 to 4 meet all of them in the first life of the run, and hardly any one in the second


def test_faults_in_three_stages_lose_nothing(tmp_path: Path) -> None:
    flags = [flag for fault in FAULTS for flag in ("--fault-inject", fault)]
    first = [*SMALL, *SIMULATED, *made_model(), "--save-interval", "1", "--max-restarts", "20", "--seed", SEED, *flags]
    run_dir, resumes = tmp_path / "run", 0
    done = launch(run_dir, *first)
    while done.code == 1 and "train-0 ended with signal SIGKILL" in done.err and resumes < 5:
        done, resumes = finish(start(None, "--resume", str(run_dir)), run_dir), resumes + 1
    assert done.code == 0, done.err
    done.check_books()
    lines = [json.loads(line) for line in (run_dir / "faults.jsonl").read_text().splitlines()]
    met = {(line["stage"], line["kind"]) for line in lines}
    assert met == {("generate", "kill"), ("reward", "error"), ("train", "kill")}
    assert sum(line["stage"] == "train" for line in lines) >= max(1, resumes)
    assert sum(done.summary["faults_injected"].values()) == len(lines)
    assert "faults on purpose  generate kill" in done.out
