"""The documents of a run: exact numbers from its files, whatever these go through."""

from __future__ import annotations

import json
import math
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from models.checkpoint import Manifest, write_manifest
from models.disk import write_whole
from pipeline.control.advice import Advice
from pipeline.control.endpoint import CONTROL_FILE, EngineStatus, QueueStatus, Reply, RunStatus
from pipeline.errors import CommandRefused, UsageError
from pipeline.facts.run_directory import RunDir
from pipeline.facts.stats import GoodputFigures, RunSnapshot, StageStats
from pipeline.record.journal import RolledBack
from pipeline.record.view import RunView
from pipeline.view import documents as module
from pipeline.view import run_files
from pipeline.view.documents import RunDocuments
from pipeline.view.rollouts import Query
from tests.pipeline.view.made_run import HOSTILE, START_S, journalled, lines, made_run, sample, span


@pytest.fixture
def made(tmp_path: Path) -> RunDir:
    return made_run(tmp_path / "run")


def test_a_killed_run_is_told_from_its_files(made: RunDir) -> None:
    run = RunDocuments(made.path).run()
    expected = {
        "state": "killed", "live": False, "may_steer": False, "name": "run", "step": 2, "total_steps": 7, "version": 2,
        "mode": "async", "elapsed_s": 4.0, "eta_s": None, "staleness": [[0, 10], [1, 2]], "engines": [], "advice": "",
        "resume": f"python launch.py --resume {made.path}", "checkpoint": None, "checkpoints": [], "alarms": [],
        "changes": [{"step": 1, "what": "set lr", "value": "1e-6"}],
    }  # fmt: skip
    assert {name: run[name] for name in expected} == expected
    assert run["settings"]["rollout.num_rollout"] == 7
    assert [stage["name"] for stage in run["stages"]][:3] == ["prompts", "generate", "reward"]
    assert run["stages"][1]["busy"] is None  # nobody knows
    edges = {(stream["name"], stream["source"], stream["target"]) for stream in run["streams"]}
    assert {("generate", "prompts", "generate"), ("train", "group", "train"), ("settle", "train", "prompts")} <= edges


def test_the_ledger_and_the_losses_add_up_and_reasons_are_counted(made: RunDir) -> None:
    run = RunDocuments(made.path).run()
    ledger = run["ledger"]
    assert ledger == {
        "admitted": 8, "trained": 3, "filtered": 3, "stale": 0, "failed": 1, "discarded": 0, "in_flight": 1
    }  # fmt: skip
    assert ledger["admitted"] == sum(ledger.values()) - ledger["admitted"]
    assert run["dropped"] == [
        {"outcome": "filtered", "detail": "zero_std_0.0", "groups": 2},
        {"outcome": "filtered", "detail": "too_long", "groups": 1},
        {"outcome": "failed", "detail": "insufficient_members: 0 of 4", "groups": 1},
    ]
    lost = {"tail": 0.25, "update": 0, "starvation": 0.125, "trainer": 0, "stale": 0, "variance": 0.125}
    assert run["goodput"] == {"goodput": 0.5, "attainable": None, "lost": lost}
    assert run["goodput"]["goodput"] + sum(lost.values()) == 1


def test_metrics_are_one_row_for_a_step(made: RunDir) -> None:
    found = RunDocuments(made.path).metrics()
    assert found["steps"] == [1, 2]
    assert found["columns"]["train/loss"] == [0.5, None]  # it was not finite
    assert found["columns"]["eval/sums"] == [None, 0.75]
    assert found["columns"]["wall_s"] == [2.0, 4.0]
    assert "nonfinite" not in found["columns"]
    assert RunDocuments(made.path).metrics(after=1)["steps"] == [2]


def test_a_bar_has_the_tokens_and_versions_that_were_recorded(made: RunDir) -> None:
    found = RunDocuments(made.path).lanes()
    assert (found["from_s"], found["to_s"], found["cut"]) == (START_S + 2.5 - 60, START_S + 2.5, 0)
    [lane] = found["lanes"]
    assert lane["name"] == "engine-0"
    assert lane["updates"] == [{"start_s": START_S + 1.25, "end_s": START_S + 1.5, "version": 1}]
    first, second = lane["bars"]
    assert first == {
        "group": 0, "start_s": START_S, "end_s": START_S + 2, "versions": [[0, 3], [1, 7]], "tokens": 10,
        "reward": 0.5, "outcome": "trained", "tools": [[START_S + 1, START_S + 1.25]],
    }  # fmt: skip
    assert (second["group"], second["versions"], second["tokens"]) == (6, [[1, 8]], 8)
    assert (second["reward"], second["outcome"], second["tools"]) == (None, "failed", [])
    assert found["steps"] == [{"step": 1, "at_s": START_S + 1}]
    early = RunDocuments(made.path).lanes(seconds=1, until=START_S + 1.1)
    assert [bar["group"] for bar in early["lanes"][0]["bars"]] == [0]
    assert early["lanes"][0]["updates"] == []
    assert RunDocuments(made.path).lanes(seconds=1)["steps"] == []  # step 1 was before


def test_a_group_of_two_engines_has_a_bar_in_each_lane(made: RunDir) -> None:
    lines(made.trace / "engines-0.jsonl", span("update_weights", 1.25, 0.25, detail="engine-1 version 1"))
    moved = span("request", 2.0, 1, group_id=6, detail="engine-1, 5 tokens of version 1, 3 tokens of version 2")
    lines(made.trace / "generate-0.jsonl", moved)
    found = {lane["name"]: lane for lane in RunDocuments(made.path).lanes()["lanes"]}
    assert {name: (len(lane["bars"]), len(lane["updates"])) for name, lane in found.items()} == {
        "engine-0": (2, 1), "engine-1": (1, 1)
    }  # fmt: skip
    assert [bar["versions"] for bar in found["engine-1"]["bars"]] == [[[1, 5], [2, 3]]]
    assert [bar["versions"] for bar in found["engine-0"]["bars"]] == [[[0, 3], [1, 7]], [[1, 8]]]


def test_too_many_bars_are_cut_and_counted(made: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.view.lanes.MOST_BARS", 1)
    found = RunDocuments(made.path).lanes()
    assert ([bar["group"] for bar in found["lanes"][0]["bars"]], found["cut"]) == ([6], 1)


@pytest.mark.parametrize(
    ("query", "keys"),
    [
        (Query(), [2, 1, 0]),
        (Query(outcome="filtered"), [2]),
        (Query(step=2), []),
        (Query(group=0), [1, 0]),
        (Query(reward=">0.5"), [0]),
        (Query(text="ONERROR"), [1]),
        (Query(text="1+2"), [2, 1, 0]),
        (Query(min_tokens=6), []),
        (Query(offset=1, limit=1), [1]),
    ],
)
def test_the_list_of_rollouts_is_filtered(query: Query, keys: list[int], made: RunDir) -> None:
    places = [0]
    for line in (made.path / "samples.jsonl").read_bytes().splitlines(keepends=True):
        places.append(places[-1] + len(line))
    found = RunDocuments(made.path).rollouts(query)
    assert [row["key"] for row in found["rows"]] == [str(places[key]) for key in keys]
    assert (found["total"], found["read"]) == (3 if query.limit == 1 else len(keys), 3)


def test_a_text_is_found_behind_what_the_list_shows(made: RunDir) -> None:
    long = sample(turns=[{"role": "model", "tokens": 5, "text": "x" * 5000 + "needle"}])
    lines(made.path / "samples.jsonl", long)
    found = RunDocuments(made.path).rollouts(Query(text="needle"))
    assert (found["total"], len(found["rows"][0]["text"])) == (1, 200)


def test_a_bound_that_is_none_is_refused(made: RunDir) -> None:
    with pytest.raises(UsageError, match="'much' is no bound; write a number"):
        RunDocuments(made.path).rollouts(Query(reward="much"))


def test_the_tokens_of_a_rollout_have_the_versions_that_made_them(
    made: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The middle tokens are a character together, of which a part alone decodes to a replacement.
    texts = {5: "1", 6: "=", 7: "a", 10: "\n", 11: "b"}

    def decode(ids: Any) -> str:
        whole = "".join(texts.get(one, chr(one)) for one in ids)
        return whole.replace("\x08\x09", "é").replace("\x08", "\ufffd").replace("\x09", "\ufffd")

    monkeypatch.setattr(module, "decoder_of", lambda run: decode)
    documents = RunDocuments(made.path)
    found = documents.rollout("0")
    assert found is not None
    tokens = found["tokens"]
    assert [token["text"] for token in tokens] == ["1", "=", "a", "", "é", "\n", "b"]
    assert [token["id"] for token in tokens] == [5, 6, 7, 8, 9, 10, 11]
    assert [token["version"] for token in tokens] == [None, None, 0, 0, 0, 1, 1]
    assert [token["trained"] for token in tokens] == [False, False, True, True, True, True, True]
    assert [token["log_prob"] for token in tokens] == [None, None, -0.1, -0.2, -0.3, -0.4, -0.5]
    assert [token["advantage"] for token in tokens] == [None, None, 1.5, 1.5, 1.5, 1.5, 1.5]
    assert tokens[6]["train_log_prob"] == -0.25
    assert [token["ratio"] for token in tokens] == [None, None, 1.0, 1.0, 1.0, 1.0, pytest.approx(math.exp(0.25))]
    without = documents.rollout(found["siblings"][0]["key"])
    assert without is not None
    assert [(token["log_prob"], token["advantage"]) for token in without["tokens"]] == 7 * [(None, None)]
    assert found["published"] == {"0": None, "1": START_S + 1.125}
    assert [(row["group"], row["index"], row["text"]) for row in found["siblings"]] == [(0, 1, HOSTILE)]
    assert found["row"]["turns"][0]["text"] == "three"
    assert documents.rollout("1") is None  # the middle of a line
    assert documents.rollout("../config.toml") is None


def test_a_torn_line_is_read_once_it_is_whole_and_a_bad_one_is_skipped(made: RunDir) -> None:
    documents = RunDocuments(made.path)
    assert documents.rollouts(Query())["total"] == 3
    whole = json.dumps(sample(group=9)) + "\n"
    path = made.path / "samples.jsonl"
    with path.open("a") as file:
        file.write("{no json}\n\n" + whole[:40])
    assert documents.rollouts(Query())["total"] == 3
    with path.open("a") as file:
        file.write(whole[40:])
    assert documents.rollouts(Query())["rows"][0]["group"] == 9
    with made.metrics.open("ab") as file:
        file.write(b'\xff\xfe\n{"step": 3, "wall_s": 1}\n[3]\n{"step": 4')
    assert documents.metrics()["steps"] == [1, 2, 3]
    assert documents.run()["step"] == 3


def test_only_what_is_new_is_read(made: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = RunDocuments(made.path)
    documents.metrics()
    text = made.metrics.read_bytes()
    last = text.splitlines(keepends=True)[-1]
    made.metrics.write_bytes(b"x" * (len(text) - len(last)) + last + b'{"step": 3, "wall_s": 1}\n')
    assert documents.metrics()["steps"] == [1, 2, 3]  # else the spoilt beginning were missing


def test_a_file_that_a_resumed_run_cut_begins_again(made: RunDir) -> None:
    documents = RunDocuments(made.path)
    assert documents.run()["step"] == 2
    rows = made.metrics.read_bytes().splitlines(keepends=True)
    write_whole(made.metrics, rows[0] + b'{"step": 2, "wall_s": 9.0, "staleness/token_hist/0": 1.0}\n' + rows[0] * 9)
    assert "eval/sums" not in documents.metrics()["columns"]
    assert documents.run()["staleness"] == [[0, 61]]  # ten times the first row, and the new second one
    os.truncate(made.path / "samples.jsonl", 0)
    lines(made.path / "samples.jsonl", sample(group=4))
    found = documents.rollouts(Query())
    assert ([row["group"] for row in found["rows"]], found["read"]) == ([4], 1)


def test_a_rolled_back_step_never_happened(made: RunDir) -> None:
    documents = RunDocuments(made.path)
    documents.run()
    # Step 1 stays with groups 0 and 1; group 3, filtered later, is open again, and groups 6 and 7 were never admitted.
    journalled(made.ledger, RolledBack(1, 1, 6, (3,)))
    run = documents.run()
    assert run["ledger"] == {
        "admitted": 6, "trained": 2, "filtered": 2, "stale": 0, "failed": 0, "discarded": 0, "in_flight": 2
    }  # fmt: skip
    assert {(one["detail"], one["groups"]) for one in run["dropped"]} == {("zero_std_0.0", 1), ("too_long", 1)}


def test_histories_are_bounded(made: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_files, "MOST_ROLLOUTS", 2)
    monkeypatch.setattr(run_files, "MOST_STEPS", 40)
    monkeypatch.setattr(module, "MOST_POINTS", 10)
    monkeypatch.setattr(run_files, "MOST_REASONS", 2)
    lines(made.metrics, *({"step": step, "wall_s": 1.0, "a": step} for step in range(3, 1000)))
    documents = RunDocuments(made.path)
    found = documents.rollouts(Query())
    assert (found["read"], [row["group"] for row in found["rows"]]) == (2, [3, 0])
    assert documents.rollout("0") is None  # it is no longer in the list
    steps = documents.metrics()["steps"]
    assert len(steps) <= 10
    assert steps[-1] == 999
    assert steps == sorted(steps)
    assert [(one["detail"], one["groups"]) for one in documents.run()["dropped"]][-1] == ("other", 1)
    gaps = [b - a for a, b in pairwise(steps)]
    assert max(gaps[1:-1]) == min(gaps[1:-1]) == 128


def test_of_two_rows_the_one_with_an_evaluation_is_kept() -> None:
    rows: dict[int, run_files.MetricsRow] = {step: {"step": float(step)} for step in range(1, 9)}
    rows[3] = rows[3] | {"eval/version": 3.0}
    assert list(run_files.thinned(rows, 5)) == [1, 3, 5, 7, 8]


def test_logs_are_merged_by_time_and_continue_at_the_cursor(made: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = RunDocuments(made.path)
    found = documents.logs()
    assert [(line["process"], line["text"]) for line in found["lines"]] == [
        ("controller", "controller: one"),
        ("controller", "  more of it"),
        ("train-0", "INFO root: two"),
        ("train-0", "100% done"),  # what a progress bar showed last
        ("controller", "c: three"),
    ]
    assert found["lines"][1]["at_s"] == found["lines"][0]["at_s"]
    assert found["lines"][2]["at_s"] - found["lines"][0]["at_s"] == 0.75
    assert documents.logs(found["cursor"])["lines"] == []
    with (made.logs / "train-0.log").open("a") as file:
        file.write(" now\n")
    assert [line["text"] for line in documents.logs(found["cursor"])["lines"]] == ["not whole now"]
    assert [line["text"] for line in documents.logs(text="TWO")["lines"]] == ["INFO root: two"]
    assert len(documents.logs("no cursor")["lines"]) == 6
    monkeypatch.setattr("pipeline.view.log_lines.MOST_LINES", 1)
    assert [line["text"] for line in documents.logs()["lines"]] == ["c: three"]


# ------------------------------------------------------------------ a running run


def answer(**fields: Any) -> RunStatus:
    """What the control socket of a run would tell."""
    view = RunView(RunSnapshot("async", total_steps=9, staleness_bound=3), 0.0)
    for at_s in (0.0, 10.0):
        view.stage(StageStats("generate", "generate-0", at_s, busy_s=0.75 * at_s, items_out=int(2 * at_s)))
    view.run.goodput = GoodputFigures(0.25, 0.5, {"trainer": 0.5, "no_variance": 0.25})
    view.run.alarms = ("ess: train/ess is 0.10, below --ess-warn 0.3, since step 4; " + CURE,)
    snapshot = view.snapshot(20.0)
    engines = (EngineStatus("engine-0", "serving", 4, 2, 1, 8, 0.5),)
    return RunStatus("", "running", snapshot, engines=engines, queues=(QueueStatus("train", 3, 2, 1),), **fields)


CURE = (
    "the policy is far from the policy that sampled; lower --async-buffer-size or --lr, or bound the weights "
    "more tightly with --tis-clip"
)


@pytest.mark.parametrize(
    ("fields", "stage", "why"),
    [
        ({}, "generate", "generate is busy 75% of the time, more than any other stage"),
        ({"advice": Advice(kind="up", sentence="reward 1 -> 2", stage="reward")}, "reward", "reward 1 -> 2"),
        ({"waits": "train waits for groups"}, None, "train waits for groups"),
    ],
)
def test_a_running_run_tells_of_itself(
    fields: dict[str, Any], stage: str | None, why: str, made: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = answer(**fields)
    (made.path / CONTROL_FILE).touch()
    monkeypatch.setattr(module, "ask", lambda run, command: Reply(True, status=replaced(status, made.path)))
    assert RunDocuments(made.path).run()["checkpoints"] == []
    for step in (2, 4):
        draft = made.checkpoints / f"draft-{step}"
        draft.mkdir(parents=True)
        write_manifest(draft, Manifest(step=step, version=step, run_generation=0))
    run = RunDocuments(made.path).run(may_steer=True)
    assert run["checkpoints"] == [4, 2]
    assert (run["live"], run["may_steer"], run["state"], run["bound"], run["total_steps"]) == (
        True, True, "running", 3, 9
    )  # fmt: skip
    assert run["bottleneck"] == {"stage": stage, "why": why}
    assert run["stages"] == [
        {
            "name": "generate", "replicas": 1, "busy": 0.75, "starved": 0.0, "blocked": 0.0, "stalled": 0.0, "queue": 0,
            "in_flight": 0, "items_per_s": 2.0, "tokens_per_s": 0.0, "items_out": 20, "failures": 0, "restarts": 0,
        }
    ]  # fmt: skip
    [trained] = [stream for stream in run["streams"] if stream["name"] == "train"]
    assert (trained["queued"], trained["leased"]) == (3, 2)
    assert run["engines"] == [
        {"name": "engine-0", "state": "serving", "version": 4, "running": 2, "waiting": 1, "limit": 8, "idle": 0.5}
    ]
    assert run["alarms"] == [
        {"name": "ess", "text": "train/ess is 0.10, below --ess-warn 0.3, since step 4", "cure": CURE}
    ]
    assert run["goodput"]["goodput"] + sum(run["goodput"]["lost"].values()) == 1
    assert (run["goodput"]["lost"]["variance"], run["ledger"]["admitted"]) == (0.25, 0)


def replaced(status: RunStatus, run: Path) -> RunStatus:
    """The same of another run."""
    return RunStatus(**{**{name: getattr(status, name) for name in status.__struct_fields__}, "run": str(run)})


def test_a_run_that_hangs_is_asked_once_and_says_so(made: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def hangs(run: Path, command: object) -> Reply:
        asked.append(run)
        raise CommandRefused(["the run did not answer within 30 s"])

    monkeypatch.setattr(module, "ask", hangs)
    (made.path / CONTROL_FILE).touch()
    documents = RunDocuments(made.path)
    run = documents.run()
    assert (run["live"], run["bottleneck"]["why"]) == (False, "the run did not answer within 30 s")
    documents.run()
    assert len(asked) == 1
