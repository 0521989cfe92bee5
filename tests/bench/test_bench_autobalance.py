"""What the planner is asked is what is run, and what is compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.autobalance import JOB, MOST, STEP_S, Outcome, flags, planned, report
from configs.graph import autoscale_limits
from configs.load import load
from configs.rules.validate import checked


def test_the_run_is_the_planners_job(tmp_path: Path) -> None:
    loaded = load(flags(JOB, 50, (1, 1), tmp_path, 10.0))
    config, _ = checked(loaded.config, loaded.given)
    model = config.engine.simulated
    assert (model.a_ms / 1e3, model.c_ms / 1e3) == pytest.approx((JOB.a_s, JOB.c_s))
    assert (model.length_mean, model.length_sigma, model.length_cap) == (JOB.mean, JOB.sigma, JOB.cap)
    assert (config.rollout.rollout_batch_size, config.rollout.n_samples_per_prompt) == (JOB.groups, JOB.members)
    assert config.asynchrony.max_staleness == JOB.staleness
    assert config.engine.engine_slots == JOB.slots
    assert autoscale_limits(config) == {stage: (1, most) for stage, most in MOST.items()}
    assert planned(JOB).token_s * JOB.mean * JOB.groups * JOB.members == pytest.approx(STEP_S)
    loaded = load(flags(JOB, 50, (4, 3), tmp_path))
    assert loaded.config.run.scale == {"engine": 4, "reward": 3}
    assert not loaded.config.run.autoscale


def test_the_table_compares_with_the_planners_split(capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = {"the planner's split": Outcome(10.0, (4, 3)), "one of each, --autoscale": Outcome(9.5, (4, 4), 5, 40)}
    series = report(11.0, outcomes)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].split() == ["one", "of", "each,", "--autoscale", "4", "4", "9.50", "95%", "5", "batch", "40"]
    assert [one.values for one in series] == [[11.0], [10.0], [9.5]]
