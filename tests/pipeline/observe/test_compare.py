"""`launch.py compare`: modes by short segments of a run, and RUN RUN side by side, in whatever state they are."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import launch
from configs.layers import ConfigError
from configs.load import load
from pipeline.errors import UsageError
from pipeline.facts.run_directory import RunDir
from pipeline.facts.stats import GoodputFigures
from pipeline.observe import compare
from pipeline.observe.compare import Segment, figures, main, names_runs, report
from tests.pipeline.launching import NO_DATA, ROOT, SIMULATED, environment, made_model


def segment(mode: str, rate: float, scores: list[tuple[float, float]] | None = None) -> Segment:
    goodput = GoodputFigures(0.5, 0.6, {"tail": 0.3, "stale": 0.2})
    return Segment(mode=mode, rollouts_per_s=rate, staleness=1.0, wasted=0.2, goodput=goodput, scores=scores or [])


def test_asynchrony_is_taken_only_where_it_pays() -> None:
    lines = report(
        [segment("sync", 10.0), segment("async N=1", 10.2), segment("sync", 10.0), segment("async N=1", 10.4)]
    )
    assert lines[-1] == "take sync: the best async mode trains 1.03 times as many rollouts per second, and older tokens"
    lines = report([segment("sync", 10.0), segment("async N=1", 14.0), segment("async N=2", 16.0)])
    assert lines[-1] == "take async N=2: it trains 1.60 times as many rollouts per second as sync"
    assert any(re.fullmatch(r"async N=2 +16 \(16 to 16\) +1.00 +20.0%", line) for line in lines)
    assert "  sync          0.500 of the slot time, attainable 0.60; lost to tail 0.30, stale 0.20" in lines


def test_scores_are_compared_at_equal_time() -> None:
    """Sync evaluates at 0 and 20 s, async at 0 and 10 s: at 10 s sync is halfway."""
    slow, fast = [(0.0, 0.2), (20.0, 0.8)], [(0.0, 0.2), (10.0, 0.3)]
    lines = report([segment("sync", 10.0, slow), segment("async N=1", 20.0, fast)])
    assert any(re.fullmatch(r"sync +10 \(10 to 10\) +1.00 +20.0% +0.800 +0.500", line) for line in lines)
    assert lines[-1] == "but sync scores higher after 0:10: 0.500 against 0.300"
    noisy = report([segment("sync", 10.0, slow), segment("sync", 10.0, fast), segment("async N=1", 20.0, fast)])
    assert "no mode scores higher by more than the rounds differ (0.200)" in noisy[-1]


def test_what_is_compared_is_not_a_flag_and_a_fault_of_the_user_is_one_sentence() -> None:
    with pytest.raises(UsageError, match=r"--mode, --num-rollout is what is compared; leave it out"):
        main(["--mode", "sync", "--num-rollout", "5"], "launch.py")
    with pytest.raises(UsageError, match="--batches 4 --rounds 2: at least 5 batches"):
        main(["--batches", "4"], "launch.py")
    with pytest.raises(UsageError, match=r"--buffers lr=1: each must be a whole number or auto"):
        main(["--buffers", "2", "lr=1"], "launch.py")
    with pytest.raises(ConfigError, match="no-such-flag"):
        main(["--no-such-flag"], "launch.py")


def test_segments_of_the_quickstart_get_its_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment names the model of the warm start, and a command line that names one gets no recipe by itself."""
    runs: list[list[str]] = []

    def stop(program: str, flags: list[str], place: Path, name: str) -> None:
        runs.append(list(flags))
        raise UsageError("stopped")

    monkeypatch.setattr("pipeline.observe.compare._run", stop)
    for given, recipes in (
        ([], ["quickstart"]),
        (["--config", "async_tis"], ["toy"]),
        (["--config", "quickstart"], []),
    ):
        with pytest.raises(UsageError, match="stopped"):
            main(given, "launch.py")
        flags = runs.pop()
        assert flags[2 : 2 + 2 * len(recipes)] == (["--config", *recipes] if recipes else [])
        load([*flags, "--hf-checkpoint", "tiny-arithmetic"])


@pytest.mark.slow
def test_segments_are_run_measured_and_kept(tmp_path: Path) -> None:
    place = NO_DATA.index("--num-rollout")
    given = [*NO_DATA[:place], *NO_DATA[place + 2 :], *made_model(), "--prompt-data", "arithmetic", *SIMULATED]
    command = ["compare", "--batches", "6", "--rounds", "1", "--buffers", "1", "--output", str(tmp_path / "kept")]
    command += [*given, "--eval-prompt-data", "held=arithmetic@[0:4]"]
    done = subprocess.run(
        [sys.executable, "launch.py", *command],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    sync, ahead = json.loads((tmp_path / "kept" / "compare.json").read_text())
    assert (sync["mode"], sync["staleness"], ahead["mode"]) == ("sync", 0.0, "async N=1")
    assert ahead["staleness"] > 0
    assert min(sync["rollouts_per_s"], ahead["rollouts_per_s"]) > 0
    assert len(sync["scores"]) >= 2
    assert re.search(r"^take (sync|async N=1): ", done.stdout, re.MULTILINE)


# Runs side by side.


COUNTS = {"admitted": 0, "trained": 0, "filtered": 0, "stale": 0, "failed": 0, "discarded": 0, "open": 0}
SUMMARY = {
    "mode": "async", "exit_reason": "completed", "steps": 30, "wall_s": 83.0, "groups": COUNTS,
    "staleness": {"mean": 0.5}, "reward": {"first": 0.25, "last": 0.75}, "eval": {"first": 0.1, "best": 0.625},
    "tokens_per_s": 1234.0, "goodput": {"goodput": 0.4}, "wasted_share": 0.125,
}  # fmt: skip
ROWS: list[dict[str, float]] = [
    {"step": 0, "wall_s": 3.0, "trained_tokens": 0, "eval/sums": 0.25, "eval/version": 0, "eval/complete": 1},
    {"step": 1, "wall_s": 4.0, "trained_tokens": 100, "reward/mean": 0.5, "goodput/share": 0.1},
    {"step": 2, "wall_s": 8.0, "trained_tokens": 500, "reward/mean": 1.0, "goodput/share": 0.3},
]


def test_what_counts_from_each_start_is_added_up(tmp_path: Path) -> None:
    with a_run(tmp_path / "run", lr=1e-6) as rundir:
        again = {"step": 3, "wall_s": 10.0, "trained_tokens": 300, "staleness/token_hist/0": 300, "reward/mean": 1.0}
        rundir.metrics.write_text("".join(f"{json.dumps(row)}\n" for row in [*ROWS, again]))
        found = figures(rundir)
    assert (found["wall_s"], found["tokens_per_s"]) == (8.0 + 10.0, (500 + 300 - 100) / (18.0 - 4.0))


def a_run(place: Path, *, lr: float, title: str = "x", summary: dict[str, Any] | None = None) -> RunDir:
    """A run that holds its directory."""
    rundir = RunDir(place).open(resume=False)
    rundir.write_config(f'[run]\nrun_dir = "{place}"\nseed = 1\n[train]\nlr = {lr}\nhf_checkpoint = "{title}"\n')
    rundir.metrics.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    if summary is not None:
        rundir.summary.write_text(json.dumps(summary))
    return rundir


@pytest.fixture
def ended(tmp_path: Path) -> Path:
    a_run(tmp_path / "ended", lr=1e-6, summary=SUMMARY).close()
    return tmp_path / "ended"


@pytest.fixture
def running(tmp_path: Path) -> Iterator[RunDir]:
    """Resumed after it had ended, so that it has the summary of an earlier start."""
    rundir = a_run(tmp_path / "running", lr=2e-6, summary=SUMMARY)
    yield rundir
    rundir.close()


def test_figures_and_the_settings_that_differ_stand_side_by_side(
    ended: Path, running: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch.main(["compare", str(ended), str(running.path)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    cells = {row[0]: row[1:] for row in (re.split(r"  +", line) for line in lines)}
    assert head.split() == ["ended", "running"]
    assert cells["state"] == ["completed", "running"]
    assert cells["steps"] == ["30", "2"]
    assert cells["reward, first"] == ["0.250", "0.750"]
    assert cells["reward, last"] == ["0.750", "0.750"]
    assert cells["eval, best"] == ["0.625", "0.250"]
    assert cells["staleness, mean"] == ["0.500", "-"]
    assert cells["trained tokens/s"] == ["1.2k", "100"], "400 tokens in 4 s, not from the start"
    assert cells["goodput"] == ["0.400", "0.300"]
    assert cells["wasted tokens"] == ["12.5%", "-"]
    assert cells["wall time"] == ["1:23", "0:08"]
    assert cells["train.lr"] == ["1e-06", "2e-06"]
    assert not cells.keys() & {"run.seed", "run.run_dir", "train.hf_checkpoint"}


def test_as_json(ended: Path, running: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    running.close()
    running.summary.unlink()
    assert launch.main(["compare", str(ended), str(running.path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["runs"] == [str(ended), str(running.path)]
    assert found["settings"] == {"train.lr": [1e-6, 2e-6]}
    assert [one["state"] for one in found["figures"]] == ["completed", "killed"]
    assert found["figures"][0]["reward_last"] == 0.75
    assert found["figures"][1]["wasted_share"] is None


def test_columns_of_equal_names_are_paths_and_values_are_cut_and_visible(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, title in (("a", "\\u001b[2J"), ("b", "y" * 90)):
        a_run(
            tmp_path / name / "run", lr=1e-6, title=title, summary={**SUMMARY, "exit_reason": "failed: \x1b[2J"}
        ).close()
    assert launch.main(["compare", str(tmp_path / "a" / "run"), str(tmp_path / "b" / "run")]) == 0
    shown = capsys.readouterr().out
    assert f"{'y' * 28}..." in shown
    assert "y" * 29 not in shown
    assert "\x1b" not in shown
    assert shown.split()[:2] == [str(tmp_path / "a" / "run"), str(tmp_path / "b" / "run")]


def test_what_is_no_run_is_named(ended: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["compare", str(ended)]) == 2
    assert "compare has one run" in capsys.readouterr().err
    assert launch.main(["compare", str(ended), str(tmp_path / "nowhere")]) == 2
    assert "nowhere holds no run (no config.toml)" in capsys.readouterr().err
    (ended / "summary.json").write_text("{")
    assert launch.main(["compare", str(ended), str(ended)]) == 2
    assert "is no run summary" in capsys.readouterr().err


def test_settings_of_another_version_and_of_stages_are_compared_too(
    ended: Path, running: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    running.write_config('[run]\nseed = 1\n[train]\nolder = true\n[[stage]]\nname = "penalty"\n')
    assert launch.main(["compare", str(ended), str(running.path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["settings"]
    assert found.pop("train.hf_checkpoint") == ["x", None]
    assert found == {"train.lr": [1e-6, None], "train.older": [None, True], "stage": [None, [{"name": "penalty"}]]}
    assert launch.main(["compare", str(ended), str(running.path)]) == 0
    assert '[{"name": "penalty"}]' in capsys.readouterr().out
    running.write_config("[run\n")
    assert launch.main(["compare", str(ended), str(running.path)]) == 2
    assert "config.toml cannot be read" in capsys.readouterr().err


def test_flags_are_still_those_of_an_experiment(ended: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert names_runs([str(ended), "runs/other", "--json"])
    assert not names_runs([])
    assert not names_runs(["--json"])
    assert not names_runs(["--config", "quickstart"])
    assert not names_runs(["train.lr=1e-4"])
    assert not names_runs([str(ended), "--mode", "sync"])
    monkeypatch.setattr(compare, "compare_runs", lambda argv: pytest.fail("these are flags"))
    assert launch.main(["compare", "--batches", "4"]) == 2
