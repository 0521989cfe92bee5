"""What may be set while a run goes on, read and refused by the rules of the configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.layers import ConfigError
from configs.load import dump_toml, load
from configs.rules.validate import checked
from configs.schema import Config
from pipeline.control.changed_config import keep, with_settings
from pipeline.errors import UsageError
from pipeline.facts.run_directory import RunDir

FLAGS = ["--prompt-data", "arithmetic", "--hf-checkpoint", "tiny-arithmetic", "--label-key", "label", "--lr", "1e-4"]


def run_of(tmp_path: Path, *flags: str) -> tuple[RunDir, Config]:
    rundir = RunDir(tmp_path / "run")
    loaded = load([*FLAGS, *flags, "--run-dir", str(rundir.path), "--num-rollout", "10"])
    config, _ = checked(loaded.config, loaded.given)
    rundir.path.mkdir()
    rundir.write_config(dump_toml(config))
    return rundir, config


def test_what_is_set_is_what_a_resume_would_have_and_begins_with(tmp_path: Path) -> None:
    rundir, config = run_of(tmp_path, "--dynamic-sampling-filter", "nonzero_std", "reward:0.1_0.9")
    changes = {"max_staleness": "4", "train.lr": "5e-6", "dynamic-sampling-filter": "nonzero_std,reward:0.2_0.8"}
    after, changed = with_settings(rundir, changes)
    assert changed == {
        "asynchrony.max_staleness": 4,
        "train.lr": 5e-6,
        "filter.dynamic_sampling_filter": ("nonzero_std", "reward:0.2_0.8"),
    }
    keep(rundir, after, config)
    assert with_settings(rundir, changes)[1] == {}, "it is kept"
    resumed = load(["--resume", str(rundir.path), "--max-staleness", "3"]).config
    assert (resumed.asynchrony.max_staleness, resumed.train.lr) == (3, 5e-6), "a flag of the resume outranks it"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_staleness": "-1"}, "max-staleness"),
        ({"max_staleness": "many"}, "many"),
        ({"lr": "-1"}, "--lr"),
        ({"temperature": "0"}, "rollout-temperature"),
        ({"top_p": "0.7"}, "--rollout-top-p is 0.7 with TIS or bypass, but must be 1"),
        ({"rollout_batch_size": "8"}, "cannot be set while the run goes on"),
        ({"max_stalenes": "3"}, "max_staleness"),
        ({"dynamic_sampling_filter": "nonzero_std"}, "the numbers can be changed, not which there are"),
        ({"dynamic_sampling_filter": "reward:0.9_0.1"}, "the lower bound 0.9 is above the upper bound 0.1"),
    ],
)
def test_what_cannot_be_set_is_refused_with_the_reason(changes: dict[str, str], words: str, tmp_path: Path) -> None:
    rundir, _ = run_of(tmp_path, "--dynamic-sampling-filter", "reward:0.1_0.9")
    before = rundir.config.read_bytes()
    with pytest.raises((ConfigError, UsageError), match=words):
        with_settings(rundir, changes)
    assert rundir.config.read_bytes() == before


def test_sampling_is_set_by_its_short_or_long_name(tmp_path: Path) -> None:
    rundir, _ = run_of(tmp_path)
    for name in ("temperature", "rollout_temperature", "--rollout-temperature", "rollout.rollout_temperature"):
        assert with_settings(rundir, {name: "0.7"})[1] == {"rollout.rollout_temperature": 0.7}


def test_sampling_is_not_set_where_others_go_by_that_of_the_start(tmp_path: Path) -> None:
    rundir, _ = run_of(tmp_path, "--rollout-function-path", "tests.stages.slime.user_code:whole_batch")
    with pytest.raises(UsageError, match="--rollout-function-path goes by the temperature and top-p with which"):
        with_settings(rundir, {"temperature": "0.7"})


def test_a_bound_without_a_correction_is_refused(tmp_path: Path) -> None:
    """I4 holds for a run that goes on as well."""
    rundir, _ = run_of(tmp_path, "--max-staleness", "0")
    with pytest.raises((ConfigError, UsageError), match="max_staleness"):
        with_settings(rundir, {"max_staleness": "2"})


def test_a_decay_to_a_least_rate_is_not_scaled(tmp_path: Path) -> None:
    rundir, _ = run_of(tmp_path, "--lr-decay-style", "linear", "--min-lr", "1e-5")
    with pytest.raises(UsageError, match="lr decays to --min-lr 1e-05"):
        with_settings(rundir, {"lr": "2e-4"})
