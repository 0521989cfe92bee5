"""Filter metrics, the bias report and the warning about the effective sample size, from settlements alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.facts.run_directory import RunDir
from pipeline.facts.stats import StageStats
from pipeline.record.group_outcomes import MOST_REASONS, GroupOutcomes
from pipeline.record.recorder import Recorder
from pipeline.record.report import summarise
from stages.messages import Settled, StepDone
from stages.prompts.ledger import Ledger, LedgerSnapshot
from stages.topic_values import EngineAddress, EngineEntry
from tests.stages.stage_rig import make_config
from tests.transport.memory_link import MemoryNetwork, MemoryNode


def step(n: int, *groups: int, **metrics: float) -> StepDone:
    values = {name.replace("__", "/"): value for name, value in metrics.items()}
    return StepDone(n, n, groups, values, tokens=10 * len(groups))


def filtered(
    group_id: int, reason: str, *, tokens: int = 40, rate: float | None = None, reward: float = 0.0
) -> Settled:
    return Settled(group_id, "filtered", reason, tokens=tokens, reward=reward, pass_rate=rate)


def test_drops_are_counted_by_reason_since_the_last_step() -> None:
    group_outcomes = GroupOutcomes(4)
    for group_id, reason in enumerate(["zero_std_0.0", "zero_std_0.0", "zero_std_1.0", "my own: reason!"]):
        group_outcomes.settled(filtered(group_id, reason))
    metrics = group_outcomes.step(step(1, 10, 11, rollout__raw_reward=0.5))
    assert {name: value for name, value in metrics.items() if "drop_" in name} == {
        "filter/drop_zero_std_0.0": 2,
        "filter/drop_zero_std_1.0": 1,
        "filter/drop_my_own_reason": 1,
    }
    assert metrics["filter/wasted_tokens"] == 160
    assert metrics["filter/accept_ratio"] == pytest.approx(2 / 6)
    assert metrics["filter/oversample_ratio"] == 3.0
    again = group_outcomes.step(step(2, 12, rollout__raw_reward=0.5))
    assert not any("drop_" in name for name in again)
    assert (again["filter/wasted_tokens"], again["filter/accept_ratio"]) == (0.0, 1.0)


def test_the_mean_reward_is_over_all_graded_groups_and_before_shaping() -> None:
    group_outcomes = GroupOutcomes(4)
    group_outcomes.settled(filtered(0, "zero_std_0.0", reward=0.0))
    group_outcomes.settled(Settled(1, "failed", "grader died"))  # nobody graded it
    metrics = group_outcomes.step(step(1, 2, 3, 4, rollout__raw_reward=1.0, train__reward_mean=-0.5))
    assert metrics["reward/mean"] == 0.75


def test_pass_rates_of_all_groups_are_averaged() -> None:
    group_outcomes = GroupOutcomes(4)
    group_outcomes.settled(filtered(0, "pass_rate_low", rate=0.0))
    group_outcomes.settled(Settled(1, "trained", step=1, pass_rate=0.5))
    group_outcomes.settled(Settled(2, "trained", step=1))
    metrics = group_outcomes.step(step(1, 1, 2))
    assert metrics["passrate/mean"] == 0.25
    assert metrics["filter/pass_rate_gap"] == 0.25


def test_the_bias_report_compares_what_was_trained_with_what_was_not(tmp_path: Path) -> None:
    group_outcomes = GroupOutcomes(4)
    group_outcomes.settled(Settled(0, "stale", tokens=4 * 100, reward=0.0, pass_rate=0.0))
    group_outcomes.settled(Settled(1, "discarded", tokens=4))  # cut short: it has no length of its own
    group_outcomes.settled(Settled(2, "trained", step=1, pass_rate=1.0))
    group_outcomes.settled(Settled(3, "trained", step=1, pass_rate=0.25))
    lengths = {"rollout/group_len/16": 1.0, "rollout/group_len/32": 1.0, "rollout/response_len/mean": 20.0}
    metrics = group_outcomes.step(StepDone(1, 1, (2, 3), lengths, 80))
    assert metrics["filter/trained_len_ratio"] == pytest.approx(20 / ((100 + 20 + 20) / 3))
    group_outcomes.write(tmp_path / "bias.json")
    report = json.loads((tmp_path / "bias.json").read_text())
    assert report["trained"] == {
        "groups": 2,
        "length_mean": 20.0,
        "pass_rate_mean": 0.625,
        "lengths": {"16": 1, "32": 1},
        "pass_rates": {"0.2": 1, "1.0": 1},
    }
    assert report["stale"]["lengths"] == {"128": 1}
    assert report["discarded"] == {
        "groups": 1,
        "length_mean": None,
        "pass_rate_mean": None,
        "lengths": {},
        "pass_rates": {},
    }


@given(st.lists(st.text(max_size=12), max_size=80))
def test_names_of_metrics_stay_few_and_plain_whatever_the_reasons_are(reasons: list[str]) -> None:
    group_outcomes = GroupOutcomes(1)
    for group_id, reason in enumerate(reasons):
        group_outcomes.settled(filtered(group_id, reason))
    drops = {name: n for name, n in group_outcomes.step(step(1, 99)).items() if name.startswith("filter/drop_")}
    assert sum(drops.values()) == len(reasons)
    assert len(drops) <= MOST_REASONS + 1
    assert all(name.isascii() and " " not in name and name.count("/") == 1 for name in drops)


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    config = make_config(observe={"use_tensorboard": False, "trace": False}, correction={"ess_warn": 0.5})
    with RunDir(tmp_path / "run").open(resume=False) as rundir, Recorder(config, rundir) as one:
        yield one


async def test_a_small_effective_sample_size_is_told_once_in_fifty_steps(recorder: Recorder) -> None:
    lines: list[str] = []
    recorder.lines = lines.append
    for number in range(1, 120):
        ess = 0.9 if number == 1 else float("nan") if number == 2 else 0.31
        await recorder.step(step(number, number, train__ess=ess, rollout__raw_reward=0.0))
    assert [line.split(":")[0] for line in lines] == ["step 3", "step 53", "step 103"]
    assert "train/ess is 0.31, below --ess-warn 0.5" in lines[0]
    assert "lower --async-buffer-size" in lines[0]


async def test_the_recorder_writes_what_the_tally_counts(recorder: Recorder) -> None:
    recorder.settled([(0, filtered(0, "too_long", tokens=7, reward=1.0, rate=1.0))])
    recorder.settled([(1, Settled(1, "trained", step=1, pass_rate=0.5))])
    await recorder.step(step(1, 1, rollout__raw_reward=0.5, rollout__response_len__mean=3.0))
    assert recorder.rewards == [0.75]
    recorder.__exit__(None, None, None)
    row = json.loads(recorder.rundir.metrics.read_text())
    assert (row["filter/drop_too_long"], row["passrate/mean"], row["ledger/skipped"]) == (1, 0.75, 0)
    report = json.loads((recorder.rundir.path / "bias.json").read_text())
    assert {outcome: line["groups"] for outcome, line in report.items()} == {"filtered": 1, "trained": 1}


async def test_the_recorder_tells_of_the_weights_on_their_way(recorder: Recorder) -> None:
    await recorder.step(step(1, 1))
    extra = {"delta_ratio": 12.5, "publish_s": 0.5}
    async with MemoryNode("run", "test", MemoryNetwork()) as node:
        topic = await node.topic_server("topic")
        topic.publish("stats/train-0", StageStats(stage="train", replica="train-0", unix_s=1.0, extra=extra).encode())
        for i, update_s in enumerate((0.25, 0.75)):
            entry = EngineEntry(f"engine-{i}", "", 0, state="serving", run_generation=0, version=1, update_s=update_s)
            topic.publish(f"directory/engine-{i}", msgspec.msgpack.encode(entry))
        for i in range(3):
            address = EngineAddress(f"engine-{i}", "", 0)
            topic.publish(f"engine/engine-{i}", msgspec.msgpack.encode(address))
        judge = EngineAddress("frozen-judge", "", 0, "judge")
        topic.publish("engine/frozen-judge", msgspec.msgpack.encode(judge))
        recorder.observe(topic, {}, 0, 1)
    await recorder.step(step(2, 2))
    rows = recorder.view.engine_rows()
    assert [(row.name, row.version, row.update_s) for row in rows] == [
        ("engine-0", 1, 0.25),
        ("engine-1", 1, 0.75),
        ("engine-2", None, None),
    ]
    weights = summarise(recorder, recorder.config, "finished").weight_versions
    assert (weights.transport, weights.delta_ratio) == ("disk", 12.5)
    recorder.__exit__(None, None, None)
    first, second = map(json.loads, recorder.rundir.metrics.read_text().splitlines())
    names = ("perf/delta_ratio", "perf/publish_weights_time", "perf/update_weights_time")
    assert [second[name] for name in names] == [12.5, 0.5, 0.75]
    assert first.keys().isdisjoint(names), "nothing is told of what was not seen"


def test_the_waste_of_a_resumed_run_is_counted_from_its_resume_on(tmp_path: Path) -> None:
    """As its trained tokens are: the ledger of the checkpoint knows of earlier ones."""
    with RunDir(tmp_path / "run").open(resume=False) as rundir:
        recorder = Recorder(make_config(), rundir, resume_step=4)
        recorder.ledger = Ledger(LedgerSnapshot(4, 4, {"filtered": 4}, (), tokens={"filtered": 4000}))
        recorder.view.step(5, at_s=1.0, metrics={}, tokens=300, staleness={0: 300})
        recorder.view.wasted_tokens += 100
        summary = summarise(recorder, recorder.config, "finished")
    assert (summary.wasted_tokens, summary.wasted_share) == (100, 0.25)
