"""What the user sees of a run: its view and table, and `launch.py samples`.

Golden numbers over a made-up run, on wide and narrow terminals; colours of tokens, filters, and missing samples.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import launch
from pipeline.control.client import table
from pipeline.facts.stats import LedgerCounts, RunSnapshot, StageStats
from pipeline.observe.samples import main
from pipeline.observe.samples import render as render_sample
from pipeline.observe.table import LiveTable, PlainLog, open_display, plain_line, quantity, render
from pipeline.record.view import RunView
from stages.sample_log import SAMPLES_FILE, SampleRow, TurnRow
from tests.pipeline.control.test_commands import STATUS

T0 = 1000.0


def made_up_run() -> RunView:
    """Two engines and a trainer, 20 s, four steps of 100 tokens, one evaluation."""
    stages = ("prompts", "generate", "train")
    view = RunView(RunSnapshot("async", total_steps=10, staleness_bound=2), T0, stages, window_s=10.0)
    for second in range(21):
        for i, rate in enumerate((1.0, 0.5)):
            view.stage(
                StageStats(
                    "generate", f"g{i}", T0 + second, busy_s=second * rate, starved_s=second * (1 - rate),
                    items_in=second * 3, items_out=second * 2, tokens=second * 1000, in_flight=4, failures=i,
                    extra={"queue_depth": 3.0},
                )
            )  # fmt: skip
    for step in range(1, 5):
        view.step(
            step, at_s=T0 + 5 * step, metrics={"reward/mean": step / 10}, tokens=100, staleness={0: 25, 1: 50, 2: 25}
        )
    view.run.version, view.run.in_flight, view.run.may_enter = 4, 6, 12
    view.waste["stale"] = 100
    view.run.ledger = LedgerCounts(admitted=30, trained=16, filtered=3, stale=1, failed=2, discarded=0, open=8)
    view.evaluated("heldout", 3, 0.625)
    view.run.advice = "train is the bottleneck"
    return view


@given(st.lists(st.tuples(st.integers(0, 100), st.booleans()), min_size=1, max_size=30))
def test_work_before_a_restart_is_never_lost_or_counted_twice(increments) -> None:
    view = RunView(RunSnapshot("async"), T0)
    counter = total = 0
    for second, (increment, restart) in enumerate(increments):
        if restart:
            counter = 0
        elif second:
            total += increment
            counter += increment
        view.stage(StageStats(stage="s", replica="r", unix_s=T0 + second, items_out=counter, busy_s=counter))
        view.stage(StageStats(stage="s", replica="r", unix_s=T0 + second - 5, items_out=10**6))  # late: ignored
    assert view.snapshot(T0 + 100).stages[0].items_out == total
    seconds = len(increments) - 1
    assert view.busy_shares(0).get("s", 0.0) * seconds == pytest.approx(total)


def test_retired_replicas_keep_their_work_and_lose_their_place() -> None:
    view = made_up_run()
    view.retire("generate", "g1")
    row = view.snapshot(T0 + 20).stages[1]
    assert (row.replicas, row.busy, row.items_out) == (1, 1.0, 80)
    assert view.busy_shares(0)["generate"] == pytest.approx(0.75), "its work is that of two"


def test_busy_shares_are_of_the_training_phase_and_by_the_clock_of_the_reports() -> None:
    """Loading a model is no work of the phase, and a stage that never rests is busy all the time, not more."""
    view = RunView(RunSnapshot("async"), T0)

    def report(at_s: float, busy_s: float, engines_s: float) -> None:
        view.stage(StageStats(stage="train", replica="train-0", unix_s=T0 + at_s, busy_s=busy_s))
        view.stage(StageStats(stage="generate", replica="generate-0", unix_s=T0 + at_s, busy_s=busy_s))
        extra = {"engine_busy_s": engines_s}
        view.stage(StageStats(stage="engines", replica="engines-0", unix_s=T0 + at_s, extra=extra))

    report(0, 0, 0)
    report(30, 30, 1)  # torch is imported, the model is loaded
    view.begin()
    report(40, 40, 6)
    assert view.busy_shares(0)["train"] == 1.0
    assert view.busy_shares(2)["generate"] == pytest.approx(5 / 20)
    assert max(view.busy_shares(2).values()) == 1.0


def drawn(width: int, view: RunView | None = None) -> str:
    console = Console(record=True, width=width, file=io.StringIO(), color_system=None)
    console.print(render((view or made_up_run()).snapshot(T0 + 20), width, ("checkpoint step-4 saved",)))
    return console.export_text()


def test_supervised_steps_are_called_what_they_are() -> None:
    view = RunView(RunSnapshot("warm start", total_steps=700, staleness_bound=2, supervised=True), T0)
    view.step(11, at_s=T0 + 5, metrics={"train/loss": 1.25}, tokens=100, staleness={0: 100})
    line = plain_line(view.snapshot(T0 + 7))
    assert line == "warm start step 11/700 | loss 1.250 | 0 trained tok/s | 0:07"
    text = drawn(80, view)
    assert "warm start" in text
    assert "loss 1.250" in text
    for word in ("reward", "staleness", "in flight", "version", "busiest"):
        assert word not in text


@pytest.mark.parametrize("width", [140, 100, 80, 60, 40])
def test_the_table_fits_and_keeps_what_matters(width: int) -> None:
    text = drawn(width)
    assert all(len(line) <= width for line in text.splitlines())
    joined = " ".join(text.split())
    for words in (
        "async", "step 4/10", "version 4", "in flight 6, may enter 12", "40%", "generate", "75%", "0.400", "2 failed",
        "8 in flight", "eval heldout 0.625 at v3", "mean 1.00 max 2 (bound 2)", "busiest stage (generate) busy 75%",
        "ETA 0:30", "advice train is the bottleneck",
    ):  # fmt: skip
        assert words in joined, words


def test_wide_terminals_show_every_column_and_narrow_ones_the_first() -> None:
    assert {"stalled", "starved", "blocked", "tok/s", "restarts"} <= set(drawn(140).split())
    assert "stalled" not in drawn(80)
    assert {"starved", "tok/s"} <= set(drawn(80).split())
    assert "starved" not in drawn(60)


def test_the_live_table_draws_and_gives_the_terminal_back() -> None:
    out = io.StringIO()
    with contextlib.suppress(RuntimeError), LiveTable(Console(file=out, force_terminal=True, width=120)) as display:
        display.note("evaluation of version 3: 0.625")
        display.update(made_up_run().snapshot(T0 + 20))
        raise RuntimeError
    text = out.getvalue()
    assert "generate" in text
    assert "evaluation of version 3" in text
    assert text.rindex("\x1b[?25h") > text.index("\x1b[?25l")  # the cursor is shown again


def test_plain_lines_come_once_per_interval_and_unwrapped() -> None:
    out = io.StringIO()
    console = Console(file=out, width=40)
    view = made_up_run()
    with PlainLog(console, every=2) as display:
        display.update(view.snapshot(T0 + 20))
        display.update(view.snapshot(T0 + 21))
        view.step(5, at_s=T0 + 25, metrics={"reward/mean": float("nan")}, tokens=1, staleness={})
        display.update(view.snapshot(T0 + 25))
        display.note("replica [reward-1] restarted")
        for step in (9, 10):
            view.step(step, at_s=T0 + 5 * step, metrics={}, tokens=1, staleness={})
            display.update(view.snapshot(T0 + 60))
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in out.getvalue().splitlines())
    lines = [line[9:] for line in out.getvalue().splitlines()]
    assert [line.split(" | ")[0] for line in lines] == [
        "step 4/10",
        "replica [reward-1] restarted",
        "step 9/10",  # the view is looked at now and then: the multiple itself may be missed
        "step 10/10",
    ]
    assert lines[0] == plain_line(made_up_run().snapshot(T0 + 20))
    assert "reward 0.400 | eval heldout 0.625 (v3) | staleness mean 1.00 max 2 (bound 2) | v4" in lines[0]


def test_what_is_not_known_yet_is_left_out_of_a_line() -> None:
    """As at the first look after a resume."""
    line = plain_line(RunSnapshot("async", step=19, total_steps=22, version=-1))
    assert line == "step 19/22 | 0 trained tok/s | in flight 0 | wasted 0.0% | 0:00"


def test_failed_rollouts_are_shown_with_their_commonest_reason() -> None:
    """In groups that were trained nevertheless: nothing else of a run tells of them."""
    view = made_up_run()
    assert "failed rollouts" not in drawn(140, view) + plain_line(view.snapshot(T0 + 20))
    why = "grader m:f: KeyError: 'x'"
    for i, reasons in enumerate(({"a tool": 1.0, why: 3.0}, {why: 2.0})):
        extra = {f"failed/{reason}": n for reason, n in reasons.items()}
        view.stage(StageStats("group", f"group-{i}", T0 + 20, extra={"filtered": 7.0, **extra}))
    snapshot = view.snapshot(T0 + 20)
    assert snapshot.failed_rollouts == {"a tool": 1, why: 5}
    assert f"failed rollouts 6, most often (5): {why}" in drawn(140, view)
    assert " | failed rollouts 6 | " in plain_line(snapshot)
    snapshot = dataclasses.replace(snapshot, failed_rollouts={"a\n  b\x1b": 1})
    assert "failed     1: a b\u241b" in table(msgspec.structs.replace(STATUS, snapshot=snapshot))


def test_the_display_is_chosen_by_the_output() -> None:
    pipe, terminal = Console(file=io.StringIO()), Console(file=io.StringIO(), force_terminal=True)
    assert isinstance(open_display(None, log_interval=5, console=pipe), PlainLog)
    assert isinstance(open_display(None, log_interval=5, console=terminal), LiveTable)
    assert isinstance(open_display(False, log_interval=5, console=terminal), PlainLog)


@given(st.floats(0, 1e9))
def test_quantities_are_short(value: float) -> None:
    assert len(quantity(value)) <= 5


def with_engines(count: int) -> RunView:
    view = made_up_run()
    for i in range(count):  # the newest reports: they outrank those of the made-up run
        extra = {f"engine-{i}/idle": i / 16}
        view.stage(StageStats(stage="engines", replica=f"engines-{i}", unix_s=T0 + 20, extra=extra))
    view.engines({f"engine-{i}": (4, 0.25 + i) for i in range(count)})
    return view


def test_engines_have_their_idle_share_and_their_newest_update_one_by_one_while_they_are_few() -> None:
    view = with_engines(3)
    view.engines({"engine-0": (4, 0.25), "engine-2": None})
    rows = view.snapshot(T0 + 20).engines
    shown = [(row.up, row.version, row.idle, row.update_s) for row in rows]
    assert shown == [(True, 4, 0.0, 0.25), (False, None, None, None), (True, None, 2 / 16, None)]
    text = drawn(120, view)
    assert "engine-0 v4 idle 0% update 0.25 s" in text
    assert "engine-1 lost" in text
    assert "engine-2 no weights idle 12% update -" in text
    assert "engines " not in drawn(120)


def test_many_engines_are_one_line() -> None:
    text = drawn(120, with_engines(16))
    assert "engines 16 of 16 up   idle 47%, most 94%   update 7.8 s, most 15.2 s" in text
    assert [row.name for row in with_engines(12).snapshot(T0).engines][-2:] == ["engine-10", "engine-11"]
    assert "engine-0" in drawn(60, with_engines(2))
    assert "engine-0" not in drawn(60, with_engines(3)), "a narrow terminal has no room for three"


def test_a_stage_that_reports_once_counts_from_its_start() -> None:
    """A run of a second is over before a second look: its stages had been at work for what their accounts add up to."""
    view = RunView(RunSnapshot("async"), T0)
    view.begin()
    view.stage(StageStats(stage="train", replica="train-0", unix_s=T0 + 1, busy_s=0.5, starved_s=0.25, blocked_s=0.25))
    assert view.busy_shares(0)["train"] == pytest.approx(0.5)


def a_row(**changes: Any) -> SampleRow:
    """`12=` -> `abcd` of two versions, the last token masked; then the observation `!`."""
    values: dict[str, Any] = {
        "step": 10, "outcome": "trained", "group": 3, "index": 1, "label": "x", "status": "completed", "reward": 0.5,
        "prompt": "12=", "turns": (TurnRow("model", 4, "abcd", 0.25), TurnRow("observation", 1, "!")),
        "prompt_tokens": 3, "response_tokens": 5, "loss_mask": ((0, 3), (1, 3), (0, 2)),
        "versions": ((-1, 3), (7, 2), (8, 2), (-1, 1)), "ids": (0, 1, 2, 3, 4, 5, 6, 7), **changes,
    }  # fmt: skip
    return SampleRow(**values)


def decode(ids: Any) -> str:
    return "".join("12=abcd!"[i] for i in ids)


def write(run: Path, *rows: SampleRow, torn: bytes = b"") -> Path:
    run.mkdir(exist_ok=True)
    (run / SAMPLES_FILE).write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows) + torn)
    return run


def shown(*argv: str, width: int = 80) -> str:
    out = io.StringIO()
    assert main(argv, Console(file=out, width=width, highlight=False)) == 0
    return out.getvalue()


def test_trained_tokens_have_the_colour_of_their_version_and_the_others_none() -> None:
    text = render_sample(a_row(), decode)
    styles = {text.plain[span.start : span.end]: str(span.style) for span in text.spans}
    assert styles["ab"] != styles["c"], "two versions"
    assert styles["d"] == styles["!"] == "dim", "not trained"
    assert {styles["ab"], styles["c"]}.isdisjoint({"dim"})
    assert "model 4 tokens, v7:2 v8:2, 1 masked, reward 0.25: abcd" in text.plain
    assert "observation 1 tokens: !" in text.plain


def test_rows_with_columns_of_tokens_are_read_beside_those_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = {"log_probs": (None, None, None, -0.5, -1.25, -2.0, None, None), "advantages": ((None, 3), (0.5, 3))}
    run = write(tmp_path / "run", a_row(), a_row(**columns))
    text = shown(str(run), "-n", "1")
    assert text.partition("1 of")[0] == shown(str(write(tmp_path / "old", a_row()))).partition("1 of")[0]
    assert main([str(run), "--json"]) == 0
    old, new = msgspec.json.decode(capsys.readouterr().out)["samples"]
    assert not old.keys() & columns.keys(), "unknown, not null"
    assert new["log_probs"][3:6] == [-0.5, -1.25, -2.0]
    assert new["advantages"] == [[None, 3], [0.5, 3]]


def test_commands_of_a_terminal_are_shown_not_obeyed() -> None:
    evil = a_row(prompt="\x1b[2J", turns=(TurnRow("model", 4, "\x1b]0;x\x07", None),), label="\x9b1m", error="\x1b[1m")
    assert not set(render_sample(evil, None).plain) & {"\x1b", "\x07", "\x9b"}


def test_off_a_terminal_it_is_plain_text_of_eighty_columns(tmp_path: Path) -> None:
    run = write(tmp_path / "run", a_row(prompt="long " * 60), torn=b'{"step"')
    messages = shown(str(run))
    assert "\x1b" not in messages
    assert max(map(len, messages.splitlines())) <= 80
    assert "group 3 rollout 1 | trained in step 10 | reward 0.5" in messages
    assert "1 of 2 samples; 1 lines could not be read" in messages


@pytest.mark.parametrize(
    ("flags", "groups"),
    [
        ((), [2, 3, 4, 5]),
        (("-n", "2"), [4, 5]),
        (("--step", "20"), [3]),
        (("--group", "4"), [4]),
        (("--reward", ">0.5"), [3]),
        (("--reward", "0"), [2, 5]),
        (("--failed",), [4, 5]),
        (("--untrained",), [5]),
        (("--failed", "--reward", "<=0"), [5]),
    ],
)
def test_filters(tmp_path: Path, flags: tuple[str, ...], groups: list[int]) -> None:
    run = write(
        tmp_path / "run",
        a_row(group=2, reward=0.0),
        a_row(group=3, reward=1.0, step=20),
        a_row(group=4, reward=None, status="failed", error="boom"),
        a_row(group=5, reward=0.0, outcome="failed", detail="insufficient_members"),
    )
    messages = shown(str(run), *flags)
    assert [group for group in range(2, 6) if f"group {group} " in messages] == groups


def test_a_directory_without_samples_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(path: Path) -> str:
        assert launch.main(["samples", str(path)]) == 2
        return capsys.readouterr().err

    assert "is no directory" in refused(tmp_path / "nowhere")
    run = tmp_path / "runs" / "one"
    run.mkdir(parents=True)
    (run / "config.toml").write_text("[observe]\nsamples_interval = 10\n")
    assert f"for example {run}" in refused(tmp_path)
    assert "the first samples are written when its first batch is trained" in refused(run)
    (run / "config.toml").write_text("[observe]\nsamples_interval = 0\n")
    assert "--samples-interval 0" in refused(run)
