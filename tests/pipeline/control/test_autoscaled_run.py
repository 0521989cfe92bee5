"""A run with a slow reward stage brings it up by itself, loses nothing, and leaves it to the user who scales it."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import done, until
from launching import SIMULATED, SMALL, finish, made_model, start

from pipeline.control.client import ask
from pipeline.control.messages import Drain, Scale

pytestmark = pytest.mark.slow

FLAGS = [
    *SMALL, *made_model(), *SIMULATED, "--rm-type", "sleep:0.06", "--num-rollout", "4000", "--autoscale", "reward=1..2",
    "--autoscale-window-s", "1", "--simulated-step-s", "0.01", "--log-interval", "100",
]  # fmt: skip


def test_the_slow_stage_is_scaled_and_the_user_outranks(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start(run_dir, *FLAGS)
    try:
        until(process, run_dir, lambda status: status.replicas.get("reward") == 2)
        refused = ask(run_dir, Scale({"reward": 3}))
        assert not refused.ok
        assert "--autoscale reward=1..2 does not hold the 3 replicas" in refused.lines[0]
        assert done(run_dir, Scale({"reward": 1})).lines == ("reward: 2 -> 1",)
        by_hand = until(process, run_dir, lambda _: True).snapshot.step
        later = until(process, run_dir, lambda s: s.snapshot.step >= by_hand + 8 and s.advice is not None)
        assert later.replicas["reward"] == 1, "it is the user's own"
        assert later.advice is not None
        assert later.advice.kind not in ("up", "down"), "there is nothing left to scale"
        assert later.snapshot.advice == later.advice.sentence
        done(run_dir, Drain())
    except BaseException:
        process.kill()
        raise
    ended = finish(process, run_dir)
    assert ended.code == 130, ended.err
    ended.check_books()
    assert ended.summary["restarts"] == {}
    assert ended.summary["groups"]["failed"] == 0
    changes = [(change["what"], change["value"]) for change in ended.summary["changes"]]
    assert changes == [("autoscale reward", "2"), ("scale reward", "1"), ("drain", "")]
    said = next(line for line in ended.out.splitlines() if line.startswith("autoscale: "))
    assert "reward 1 -> 2" in said
    assert ended.summary["advice"]
