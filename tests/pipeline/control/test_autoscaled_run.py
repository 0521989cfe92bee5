"""A run with a slow reward stage brings it up by itself, loses nothing, and leaves it to the user who scales it.

From one of each it comes as far as the planner says that a split can.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import done, until
from launching import SIMULATED, SMALL, finish, made_model, start
from msgspec.structs import replace

from bench.plan_cluster import simulate
from bench.plan_world import Cluster
from pipeline.control.client import ask
from pipeline.control.endpoint import Drain, Scale
from pipeline.observe.metrics import read_metrics

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


# Seconds and tokens of a job that is slow with one engine and one grader. An engine has 8 slots, a batch 8 groups of 4.
STEP_S, BATCHES, COUNTED = 1.2, 57, 12
JOB = Cluster(
    engines=1, slots=8, a_s=0.01, c_s=0.00025, prefill_s=0.00001, groups=8, members=4, mean=64.0, sigma=0.5, cap=256,
    staleness=2, update_s=0.05, graders=1, reward_s=0.1, batches=16, warm_up=4, token_s=STEP_S / (8 * 4 * 64),
)  # fmt: skip


def planned_rate() -> float:
    """Rollouts per second of the fastest split within the limits of the run, in virtual time."""
    splits = ((engines, graders) for engines in (1, 2, 4, 6) for graders in (1, 2, 4, 8))
    steps = (simulate(replace(JOB, engines=engines, graders=graders)).step_s for engines, graders in splits)
    return JOB.groups * JOB.members / min(steps)


@pytest.mark.full
def test_a_run_that_scales_itself_becomes_as_fast_as_the_planners_split(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    simulated = {
        "a_ms": 1e3 * JOB.a_s, "c_ms": 1e3 * JOB.c_s, "prefill_ms_per_token": 1e3 * JOB.prefill_s,
        "length_mean": JOB.mean, "length_sigma": JOB.sigma, "length_cap": JOB.cap, "update_s": JOB.update_s,
        "vocab_size": 32,
    }  # fmt: skip
    flags = [
        "--mode", "async", "--async-buffer-size", str(JOB.staleness), *made_model(), "--prompt-data", "arithmetic",
        "--label-key", "label", "--engine", "simulated", "--engine-slots", str(JOB.slots),
        "--scale", "engine=1", "reward=1", "--autoscale", "engine=1..6", "reward=1..8", "--autoscale-window-s", "5",
        "--train-backend", "simulated", "--simulated-step-s", str(STEP_S), "--rm-type", f"sleep:{JOB.reward_s}",
        "--rollout-batch-size", str(JOB.groups), "--n-samples-per-prompt", str(JOB.members),
        "--num-rollout", str(BATCHES), "--rollout-max-response-len", str(JOB.cap),
        "--rollout-max-context-len", str(4 * JOB.cap), "--seed", "1", "--rollout-seed", "1", "--samples-interval", "0",
        "--no-live", "--no-trace", "--no-use-tensorboard", "--no-use-plot", "--log-interval", "100",
        *(f"engine.simulated.{key}={value:g}" for key, value in simulated.items()),
    ]  # fmt: skip
    ended = finish(start(run_dir, *flags), run_dir)
    assert ended.code == 0, ended.err
    ended.check_books()
    rows = [row for row in read_metrics(run_dir / "metrics.jsonl") if "ledger/trained" in row]
    first, last = rows[-COUNTED - 1], rows[-1]
    groups = last["ledger/trained"] - first["ledger/trained"]
    rate = groups * JOB.members / (last["wall_s"] - first["wall_s"])
    assert ended.summary["changes"], "one of each is too few"
    assert rate >= 0.8 * planned_rate()
