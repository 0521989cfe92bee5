"""`launch.py compare`: what it concludes from segments, and short segments of a run that takes time by a model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from configs.layers import ConfigError
from configs.load import load
from pipeline.errors import UsageError
from pipeline.facts.stats import GoodputFigures
from pipeline.observe.compare import Segment, main, report
from tests.pipeline.launching import NO_DATA, ROOT, SIMULATED, environment, made_model


def segment(mode: str, rate: float, scores: list[tuple[float, float]] | None = None) -> Segment:
    figures = GoodputFigures(0.5, 0.6, {"tail": 0.3, "stale": 0.2})
    return Segment(mode=mode, rollouts_per_s=rate, staleness=1.0, wasted=0.2, goodput=figures, scores=scores or [])


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
