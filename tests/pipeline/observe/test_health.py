"""Alarms of a run that goes wrong: none on healthy noisy curves, one for each planted collapse; the best version."""

from __future__ import annotations

import dataclasses
import math
import random
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import launch
from models.checkpoint import Manifest, commit_directory, draft_path, final_path, prune, write_manifest
from pipeline.control.client import table
from pipeline.facts.run_directory import RunDir
from pipeline.observe.report import summarise
from pipeline.observe.summary import closing_text
from pipeline.observe.table import plain_line, render
from pipeline.record.health import ENTROPY, LENGTH, REWARD, TRUNCATED, HealthWatch, OutageWatch
from pipeline.record.kept_files import best_text
from pipeline.record.metrics import JsonlMetrics
from pipeline.record.recorder import Recorder
from stages.agents.hosting import OutageNotice
from stages.messages import EvalDone, Settled, StepDone
from tests.pipeline.control.test_commands import STATUS
from tests.stages.stage_rig import make_config

Row = dict[str, float]


def healthy(seed: int, steps: int, low: float, gain: float, tau: float, noise: float) -> Iterator[Row]:
    """A model that learns: the reward rises with noise that has a memory, and answers get short and certain."""
    rng, drift = random.Random(seed), 0.0
    for step in range(steps):
        drift = 0.5 * drift + rng.gauss(0, noise)
        left = math.exp(-step / tau)
        yield {
            REWARD: low + gain * (1 - left) + drift,
            LENGTH: max(1.0, 200 * (0.05 + 0.95 * left) * math.exp(rng.gauss(0, 0.2))),
            TRUNCATED: min(1.0, max(0.0, 0.9 * left + rng.gauss(0, 0.05))),
            ENTROPY: 2 * left + abs(rng.gauss(0, 0.01)),
            "rollout/zero_std_frac": min(0.95, rng.random()),
            "train/ess": rng.uniform(0.6, 1.0),
        }


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 30), low=st.floats(-1, 0.5), gain=st.floats(0.3, 2), tau=st.sampled_from([10, 60, 300]),
    noise=st.sampled_from([0.005, 0.02, 0.05]),
)  # fmt: skip
def test_a_healthy_run_raises_no_alarm(seed: int, low: float, gain: float, tau: float, noise: float) -> None:
    watch, rng = HealthWatch(make_config()), random.Random(seed)
    for step, row in enumerate(healthy(seed, 250, low, gain, tau, noise), 1):
        assert watch.step(step, row) == []
        if step % 25 == 0:
            right = sum(rng.random() < 0.2 + 0.7 * (1 - math.exp(-step / tau)) for _ in range(64))
            assert watch.evaluated("sums", step, right / 64) == []


def collapse(what: str, row: Row, after: int) -> Row:
    spoilt = {
        "reward": {REWARD: max(0.0, 0.8 - 0.05 * after)},
        "length": {REWARD: 0.0, LENGTH: 1.0},
        "truncated": {TRUNCATED: min(1.0, 0.05 * after)},
        "entropy": {REWARD: 0.0, ENTROPY: 1e-4},
        "exploded": {REWARD: 0.0, ENTROPY: 9.0},
        "ess": {"train/ess": 0.2},
        "signal": {"rollout/zero_std_frac": 1.0},
    }
    return {**row, **spoilt[what]}


@pytest.mark.parametrize(
    ("what", "alarm", "words"),
    [
        ("reward", "reward", "the reward collapsed to 0."),
        ("length", "length", "responses collapsed to "),
        ("truncated", "truncated", "of the responses reach their length limit, once "),
        ("entropy", "entropy", "the entropy collapsed to "),
        ("exploded", "entropy", "the entropy rose to "),
        ("ess", "ess", "train/ess is 0.20, below --ess-warn 0.5"),
        ("signal", "signal", "the rewards of no group differ for 20 batches (mean 0."),
    ],
)
def test_a_planted_collapse_is_reported_soon_and_not_at_each_step(what: str, alarm: str, words: str) -> None:
    watch = HealthWatch(make_config())
    told = []
    for step, row in enumerate(healthy(3, 260, 0.1, 0.7, 60, 0.02), 1):
        told += watch.step(step, row if step <= 200 else collapse(what, row, step - 200))
    mine = [one for one in told if one.what == alarm]
    assert words in mine[0].sentence
    assert 200 < mine[0].since <= 230
    assert f", since step {mine[0].since}; " in mine[0].sentence
    assert len(mine) <= 2, "once, and again after 50 steps"
    assert all(one.since > 200 for one in told)
    assert alarm in watch.active


def test_an_entropy_that_is_measured_now_and_then_is_watched_too() -> None:
    """`--entropy-interval 4`: a mean is over as many measurements, so the alarm comes later."""
    watch, told = HealthWatch(make_config()), []
    for step, row in enumerate(healthy(3, 400, 0.1, 0.7, 60, 0.02), 1):
        row = row if step <= 200 else collapse("entropy", row, step - 200)
        told += watch.step(step, row if step % 4 == 0 else {name: row[name] for name in row if name != ENTROPY})
    (alarm, *_) = [one for one in told if one.what == "entropy"]
    assert 200 < alarm.since <= 200 + 4 * 16


@pytest.mark.parametrize(
    ("values", "at"),
    [
        ([0.1, 0.6, 0.9, 0.15], 3),
        ([0.1, 0.6, 0.9, 0.3, 0.3], 4),
        ([0.1, 0.6, 0.9, 0.8, 0.7, 0.85], None),
        ([0.5, 0.48], None),
        ([0.05, 0.02, 0.02, 0.05], None),  # of an accuracy as small as this, half is noise
        ([-5.0, -1.0, -0.5, -6.0, -6.0], 3),
    ],
)
def test_an_evaluation_far_below_its_best(values: list[float], at: int | None) -> None:
    watch = HealthWatch(make_config())
    told = [number for number, value in enumerate(values) if watch.evaluated("sums", 50 * number, value)]
    assert told[:1] == ([] if at is None else [at])
    if at is not None:
        best = max(values)
        assert f"its best was {best:.3f} at version {50 * values.index(best)}" in watch.active["eval sums"].sentence


def test_groups_that_end_without_a_batch() -> None:
    """A filter drops all groups: no step ends, and no stall is reported since groups end."""
    config = make_config(rollout={"rollout_batch_size": 4})
    watch = HealthWatch(config)
    watch.step(7, {})
    told = [alarm for _ in range(200) for alarm in watch.ended("filtered", "zero_std_0.0")]
    assert [alarm.figures.split(" (")[0] for alarm in told] == [
        "80 groups ended and no batch was trained", "160 groups ended and no batch was trained"
    ]  # fmt: skip
    assert "(80 filtered: zero_std_0.0), since step 7; python launch.py samples RUN --untrained" in told[0].sentence
    watch.step(8, {})
    assert not watch.active


def test_equal_rewards_are_no_alarm_where_a_teacher_teaches_or_batches_differ() -> None:
    for flags in ({"algorithm": {"advantage_estimator": "ppo"}}, {"distill": {"use_opd": True}}):
        watch = HealthWatch(make_config(**flags))
        for step in range(1, 60):
            assert not watch.step(step, {"rollout/zero_std_frac": 1.0, "train/reward_std": 0.5})


# ------------------------------------------------------------------ where alarms are shown


def saved(root: Path, *steps: int) -> None:
    for step in steps:
        draft = draft_path(root, step)
        (draft / "hf").mkdir(parents=True)
        (draft / "hf" / "config.json").write_text("{}")
        (draft / "hf" / "model.safetensors").write_text(f"model {step}")
        write_manifest(draft, Manifest(step=step, version=step, run_generation=0))
        commit_directory(draft, final_path(root, step))


async def test_an_alarm_is_in_lines_displays_advice_and_summary_and_outlives_a_resume(tmp_path: Path) -> None:
    config = make_config(observe={"use_tensorboard": False, "trace": False})
    rows = list(healthy(3, 240, 0.1, 0.7, 60, 0.02))
    lines: list[str] = []
    with RunDir(tmp_path / "run").open(resume=False) as rundir:
        with Recorder(config, rundir) as recorder:
            recorder.lines = lines.append
            saved(rundir.checkpoints, 50, 200)
            for step, row in enumerate(rows, 1):
                row = row if step <= 200 else {**row, REWARD: 0.0}
                await recorder.step(StepDone(step, step, (step,), {**row, "rollout/raw_reward": row[REWARD]}, 1))
                if step in (50, 100):
                    await recorder.evaluated(EvalDone(step, {"eval/sums": step / 200}, True))
        with Recorder(config, rundir, resume_step=240) as again:
            await again.step(StepDone(240, 240, (), {}, 0, publishes=True))
    place = final_path(rundir.checkpoints, 50)
    best = f"version 100, eval sums 0.500, not saved; saved: 50, 0.250, {place}"
    alarms = [line for line in lines if "alarm reward: the reward collapsed to" in line]
    assert len(alarms) == 1
    assert alarms[0].endswith(f"; best so far: {best}")
    assert again.health.active == recorder.health.active
    assert again.points == recorder.points
    summary = summarise(again, config, "finished")
    text = closing_text(summary, {"run": rundir.path}, None, None)
    [sentence] = [alarm.sentence for alarm in recorder.health.active.values() if alarm.what == "reward"]
    assert re.search(rf"^  alarm +{re.escape(sentence)}$", text, re.MULTILINE)
    assert re.search(rf"^  best +{re.escape(best)}$", text, re.MULTILINE)
    snapshot = dataclasses.replace(STATUS.snapshot, alarms=(sentence,))
    assert plain_line(snapshot).split(" | ")[-3] == "alarm reward"
    console = Console(width=200, record=True)
    console.print(render(snapshot, 200))
    assert "alarm reward: the reward collapsed" in console.export_text()
    assert "alarm      reward: the reward collapsed" in table(msgspec.structs.replace(STATUS, snapshot=snapshot))


def test_a_group_without_difference_is_counted_by_the_recorder(tmp_path: Path) -> None:
    config = make_config(rollout={"rollout_batch_size": 1}, observe={"trace": False})
    lines: list[str] = []
    with RunDir(tmp_path / "run").open(resume=False) as rundir, Recorder(config, rundir) as recorder:
        recorder.lines = lines.append
        recorder.settled([(0, Settled(number, "filtered", detail="zero_std_0.0")) for number in range(20)])
    assert len(lines) == 1
    assert "alarm untrained: 20 groups ended" in lines[0]


# ------------------------------------------------------------------ export


def test_export_copies_the_newest_or_the_best_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert launch.main(["export", str(run), "--best"]) == 2
    assert "no evaluated version is saved; set --save-interval" in capsys.readouterr().err
    writer = JsonlMetrics(run / "metrics.jsonl")
    for version, score, complete in ((10, 0.4, 1), (20, 0.9, 1), (30, 0.6, 1), (40, 1.0, 0), (50, 0.1, 1)):
        values = {"eval/version": version, "eval/complete": complete, "eval/a-b": score, "eval/a-b-failed_ratio": 1.0}
        writer.write(version, values, wall_s=1, trained_tokens=1)
    writer.close()
    saved(run / "checkpoints", 10, 20, 30, 50)
    assert launch.main(["export", str(run), "--best", "--to", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "model.safetensors").read_text() == "model 20"
    assert launch.main(["export", str(run)]) == 0
    assert (run / "exported" / "step-00000050" / "model.safetensors").read_text() == "model 50"
    capsys.readouterr()
    prune(run / "checkpoints", 2)
    assert launch.main(["export", str(run), "--best", "--to", str(tmp_path / "out")]) == 0
    place = final_path(run / "checkpoints", 30)
    assert f"best: version 20, eval a-b 0.900, not saved; saved: 30, 0.600, {place}" in capsys.readouterr().out
    assert (tmp_path / "out" / "model.safetensors").read_text() == "model 30"
    (place / "hf" / "model.safetensors").write_text("rotten 0")
    assert launch.main(["export", str(run), "--best", "--to", str(tmp_path / "out")]) == 2
    assert "is damaged" in capsys.readouterr().err
    assert best_text([], run / "checkpoints") == ""


def test_an_environment_works_again_only_where_it_was_said_to_be_out_of_order() -> None:
    """An outage may be over before the controller looks; the summary counts it all the same."""
    watch, newest = OutageWatch(), dict[str, bytes]()

    def lines(*, out: bool, lasted_s: float = 0.0, count: int = 1) -> list[str]:
        newest["environment/world/agents-0"] = msgspec.msgpack.encode(
            OutageNotice("world", out, "away", lasted_s, count)
        )
        return [line.split(" (")[0].split(";")[0] for line in watch.look(SimpleNamespace(items=lambda _: newest))]

    assert lines(out=False, lasted_s=0.25) == []
    assert lines(out=True, count=2) == ["environment world is out of order"]
    assert lines(out=False, lasted_s=3.0, count=2) == ["environment world works again, after 3 s"]
    assert (watch.summary()["world"].outages, watch.summary()["world"].seconds) == (2, 3.2)
