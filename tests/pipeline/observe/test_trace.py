"""Traces: what processes write is what the merged file shows, in the form that Chrome's format demands."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import TraceError
from pipeline.facts.trace import Dropped, Span, TraceWriter, merge, read_records
from stages.evaluate import EVAL_BASE

T0 = 1_700_000_000.0


def pipeline_trace(directory: Path, groups: int = 3, samples: int = 2) -> None:
    """Groups through prompts -> generate (two replicas) -> reward -> train, in lockstep."""
    prompts, train = (
        TraceWriter(directory, "prompts-0", stage="prompts"),
        TraceWriter(directory, "train-0", stage="train"),
    )
    engines = [TraceWriter(directory, f"generate-{i}", stage="generate") for i in range(2)]
    reward = TraceWriter(directory, "reward-0", stage="reward")
    for g in range(groups):
        start = T0 + g
        prompts.add("admit", start, 0.01, group=g)
        for s in range(samples):
            engine = engines[s % 2]
            engine.add("rollout", start + 0.1, 0.5, group=g, sample=s, detail="turn 1")
            engine.add("turn", start + 0.2, 0.1, group=g, sample=s)
            reward.add("grade", start + 0.65, 0.05, group=g, sample=s)
        train.add("train", start + 0.8, 0.2, group=g)
    for writer in (prompts, train, reward, *engines):
        writer.close()


def load(path: Path) -> tuple[dict, dict[str, list[dict]]]:
    document = json.loads(path.read_text())
    by_phase: defaultdict[str, list[dict]] = defaultdict(list)
    for event in document["traceEvents"]:
        by_phase[event["ph"]].append(event)
        by_phase["in order"].append(event)
    return document, by_phase


def test_merge_makes_processes_and_nested_spans(tmp_path: Path) -> None:
    pipeline_trace(tmp_path / "trace")
    report = merge(tmp_path / "trace", tmp_path / "trace.json")
    document, events = load(tmp_path / "trace.json")
    assert document["displayTimeUnit"] == "ms"
    assert (report.spans, report.replicas, report.kept_one_group_in) == (3 * 8, 5, 1)
    titles = [event["args"]["name"] for event in events["M"] if event["name"] == "process_name"]
    assert titles == [
        "prompts: prompts-0",
        "generate: generate-0",
        "generate: generate-1",
        "reward: reward-0",
        "train: train-0",
    ]
    assert len(events["b"]) == len(events["e"]) == 24
    rollout = next(event for event in events["b"] if event["name"] == "rollout")
    assert rollout["args"] == {"detail": "turn 1", "group_id": 0, "sample": 0}
    assert rollout["ts"] == pytest.approx(100_000, abs=1)
    ends = [event["ts"] for event in events["e"] if (event["name"], event["id"]) == ("rollout", rollout["id"])]
    assert ends == [pytest.approx(600_000, abs=1)]
    turn = next(event for event in events["b"] if event["name"] == "turn")
    assert (turn["pid"], turn["id"]) == (rollout["pid"], rollout["id"])


def test_an_arrow_follows_each_sample_from_its_prompt_to_training(tmp_path: Path) -> None:
    pipeline_trace(tmp_path / "trace")
    merge(tmp_path / "trace", tmp_path / "trace.json")
    _, events = load(tmp_path / "trace.json")
    flows: defaultdict[int, list[dict]] = defaultdict(list)
    spans = spans_of(events)
    for event in events["b"] + events["n"]:
        if "bind_id" in event:
            flows[event["bind_id"]].append(event)
            assert any(
                pid == event["pid"] and number == event["id"] and start <= event.get("ts", 0) <= end
                for pid, number, start, end in spans
            ), "each end of an arrow is in a span"
    assert len(flows) == 3 * 2
    for flow in flows.values():
        flow.sort(key=lambda event: event.get("ts", 0))
        directions = [(event.get("flow_in", False), event.get("flow_out", False)) for event in flow]
        assert directions == [(False, True), (True, True), (True, True), (True, False)]
        assert [event["cat"] for event in flow] == ["prompts", "generate", "reward", "train"]


def spans_of(events: dict[str, list[dict]]) -> list[tuple[int, int, float, float]]:
    """(process, id, start, end) of all spans. An end closes the newest open begin of its id, in the file's order."""
    open_begins: defaultdict[tuple[int, int], list[dict]] = defaultdict(list)
    found = []
    for event in events["in order"]:
        if event["ph"] == "b":
            open_begins[event["pid"], event["id"]].append(event)
        elif event["ph"] == "e":
            begin = open_begins[event["pid"], event["id"]].pop()
            assert begin["name"] == event["name"]
            found.append((event["pid"], event["id"], begin.get("ts", 0), event.get("ts", 0)))
    assert not any(open_begins.values())
    return found


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.integers(0, 20), st.integers(-1, 4), st.integers(-1, 2)),
        min_size=1,
        max_size=40,
    )
)
def test_spans_of_an_id_nest_or_do_not_touch(tmp_path_factory, spans) -> None:
    path = tmp_path_factory.mktemp("lanes")
    writer = TraceWriter(path / "trace", "r", stage="s")
    for start, dur, group, sample in spans:
        writer.add("x", T0 + start, float(dur), group=group, sample=sample)
    writer.close()
    merge(path / "trace", path / "t.json")
    _, events = load(path / "t.json")
    found = spans_of(events)
    assert sorted((end - start) / 1e6 for *_, start, end in found) == sorted(dur for _, dur, *_ in spans)
    tracks: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    for _, number, start, end in found:
        tracks[number].append((start, end))
    for track in tracks.values():
        for i, (a, b) in enumerate(track):
            for c, d in track[i + 1 :]:
                assert b <= c or d <= a or (a <= c and d <= b) or (c <= a and b <= d)
    for number in tracks:
        times = [event.get("ts", 0) for event in events["in order"] if event.get("id") == number]
        assert times == sorted(times), "events of an id are in the order of time"


def test_a_torn_line_and_a_killed_writer_cost_only_themselves(tmp_path: Path) -> None:
    pipeline_trace(tmp_path)
    with (tmp_path / "train-0.jsonl").open("r+b") as file:
        file.truncate((tmp_path / "train-0.jsonl").stat().st_size - 4)
    unflushed = TraceWriter(tmp_path, "late", stage="x")
    unflushed.add("lost", T0, 1.0)
    records = list(read_records(tmp_path))
    assert len(records) == 24 - 1
    unflushed.flush()
    assert sum(1 for record in read_records(tmp_path) if isinstance(record, Span) and record.name == "lost") == 1
    unflushed.close()


def test_a_writer_stops_at_its_size_and_says_how_much_it_dropped(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, "a/b c", stage="s", max_bytes=2000)
    for i in range(100):
        writer.add("x", T0 + i, 1.0, group=i)
    writer.close()
    writer.close()
    assert writer.path.name == "a_b_c.jsonl"
    assert writer.path.stat().st_size < 2100
    records = list(read_records(tmp_path))
    assert isinstance(records[-1], Dropped)
    assert len(records) - 1 + records[-1].records == 100
    assert merge(tmp_path, tmp_path / "t.json").dropped_by_writers == writer.dropped > 0


def test_a_merge_beyond_its_size_keeps_whole_groups(tmp_path: Path) -> None:
    pipeline_trace(tmp_path / "trace", groups=20)
    report = merge(tmp_path / "trace", tmp_path / "t.json", max_events=60)
    _, events = load(tmp_path / "t.json")
    assert report.kept_one_group_in == 3
    kept = {event["args"]["group_id"] for event in events["b"]}
    assert kept == set(range(0, 20, 3))
    assert len(events["b"]) == 8 * len(kept)


def test_a_writer_that_is_off_writes_nothing(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "trace", "r", stage="s", enabled=False) as writer:
        writer.add("work", T0, 1.0, group=4)
        writer.flush()
    assert not (tmp_path / "trace").exists()


def test_nothing_to_merge_is_an_error_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="holds no trace records"):
        merge(tmp_path / "trace", tmp_path / "t.json")
    assert not (tmp_path / "t.json").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_ends_the_trace_and_not_the_run(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").symlink_to("/dev/full")
    writer = TraceWriter(tmp_path, "r", stage="s")
    for i in range(1000):
        writer.add("x", T0, 1.0, group=i)
    writer.close()
    assert writer.dropped == 1000


def test_groups_of_an_evaluation_are_called_so(tmp_path: Path) -> None:
    for replica in ("generate", "group"):
        with TraceWriter(tmp_path / "trace", f"{replica}-0", stage=replica) as spans:
            spans.add(replica, 100.0, 1.0, group=EVAL_BASE + 3)
    merge(tmp_path / "trace", tmp_path / "trace.json")
    _, events = load(tmp_path / "trace.json")
    assert {event["args"]["evaluates"] for event in events["b"]} == {"evaluation prompt 3"}
    assert len({event["bind_id"] for event in events["b"]}) == 1
