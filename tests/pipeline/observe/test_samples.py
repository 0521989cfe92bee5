"""`launch.py samples`: what is shown, in which colours, and what is said where there is nothing to show."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

import launch
from pipeline.observe.samples import main, render
from stages.sample_log import SAMPLES_FILE, SampleRow, TurnRow

ROOT = Path(__file__).parents[3]


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
    text = render(a_row(), decode)
    styles = {text.plain[span.start : span.end]: str(span.style) for span in text.spans}
    assert styles["ab"] != styles["c"], "two versions"
    assert styles["d"] == styles["!"] == "dim", "not trained"
    assert {styles["ab"], styles["c"]}.isdisjoint({"dim"})
    assert "model 4 tokens, v7:2 v8:2, 1 masked, reward 0.25: abcd" in text.plain
    assert "observation 1 tokens: !" in text.plain


def test_commands_of_a_terminal_are_shown_not_obeyed() -> None:
    evil = a_row(prompt="\x1b[2J", turns=(TurnRow("model", 4, "\x1b]0;x\x07", None),), label="\x9b1m", error="\x1b[1m")
    assert not set(render(evil, None).plain) & {"\x1b", "\x07", "\x9b"}


def test_off_a_terminal_it_is_plain_text_of_eighty_columns(tmp_path: Path) -> None:
    run = write(tmp_path / "run", a_row(prompt="long " * 60), torn=b'{"step"')
    said = shown(str(run))
    assert "\x1b" not in said
    assert max(map(len, said.splitlines())) <= 80
    assert "group 3 rollout 1 | trained in step 10 | reward 0.5" in said
    assert "1 of 2 samples; 1 lines could not be read" in said


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
    said = shown(str(run), *flags)
    assert [group for group in range(2, 6) if f"group {group} " in said] == groups


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


def test_the_command_line_shows_a_run(tmp_path: Path) -> None:
    run = write(tmp_path / "run", a_row())
    command = [sys.executable, "launch.py", "samples", str(run), "-n", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "model 4 tokens" in done.stdout
    assert done.stdout.isprintable() or "\x1b" not in done.stdout
