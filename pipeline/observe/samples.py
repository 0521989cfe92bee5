"""`python launch.py samples RUN`: samples of a run in the terminal, tokens coloured by loss mask and weights version.

Invariants: the picture is a function of the rows and the width alone; without a terminal it is plain text with the
same information in words; an unreadable line is skipped and counted, because the run may be writing it.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle, groupby, islice
from operator import ge, gt, le, lt
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console
from rich.text import Text

from configs.load import CONFIG_FILE, read_recipe
from pipeline.errors import UsageError
from pipeline.facts.run_log import show
from pipeline.facts.stats import visible
from stages.chat.messages import TokenizerError
from stages.chat.tokenizer import Tokenizer, load_tokenizer
from stages.sample_log import SAMPLES_FILE, Run, SampleRow

UNTRAINED: Final = "dim"
_PALETTE: Final = ("cyan", "yellow", "green", "magenta", "blue", "red")
_BOUND = re.compile(r"(<=|>=|<|>|=)?\s*(-?\d+(?:\.\d+)?(?:e-?\d+)?)")

COMPARED: Final[dict[str, Callable[[float, float], bool]]] = {"<": lt, "<=": le, ">": gt, ">=": ge}

Decode = Callable[[Sequence[int]], str]


def main(argv: Sequence[str], console: Console | None = None) -> int:
    """Show samples; returns the exit code. Raises UsageError for a directory without any."""
    arguments = _parser().parse_args(argv)
    wanted = _filter(arguments)
    selected: deque[SampleRow] = deque(maxlen=arguments.n)
    read = unreadable = 0
    for row in read_samples(Path(arguments.run)):
        read += 1
        if row is None:
            unreadable += 1
        elif wanted(row):
            selected.append(row)
    if arguments.json:
        show("", {"samples": list(selected), "read": read, "unreadable": unreadable}, as_json=True)
        return 0
    console = console or Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    decode = decoder_of(Path(arguments.run))
    for row in selected:
        console.print(render(row, decode))
    console.print(_count(len(selected), read, unreadable), style="bold")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="launch.py samples",
        description="Show samples of a run: prompt, turns, rewards, tokens coloured by loss mask and weights version.",
    )
    parser.add_argument("run", metavar="RUN", help="directory of a run, or a samples.jsonl")
    parser.add_argument("--step", type=int, help="only samples of this step")
    parser.add_argument("--group", type=int, help="only samples of this group")
    parser.add_argument("--reward", type=read_bound, metavar="BOUND", help="only with this reward: 1, '>0.5', '<=0'")
    parser.add_argument("--failed", action="store_true", help="only failed rollouts, and groups that ended as failed")
    parser.add_argument("--untrained", action="store_true", help="only groups that were not trained")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("-n", type=int, default=8, help="how many, the newest (8)")
    return parser


def read_bound(text: str) -> Callable[[float], bool]:
    """Whether a reward is within a bound such as `1` or `>0.5`. Raises UsageError for another text."""
    match = _BOUND.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"reward {text!r} is no bound; write a number, or <, <=, > or >= before it")
    sign, limit = match[1] or "=", float(match[2])
    if sign == "=":
        return lambda reward: abs(reward - limit) < 1e-9
    return lambda reward: COMPARED[sign](reward, limit)


def _filter(arguments: argparse.Namespace) -> Callable[[SampleRow], bool]:
    def wanted(row: SampleRow) -> bool:
        return (
            (arguments.step is None or row.step == arguments.step)
            and (arguments.group is None or row.group == arguments.group)
            and (arguments.reward is None or (row.reward is not None and arguments.reward(row.reward)))
            and (not arguments.failed or row.outcome == "failed" or row.status in ("failed", "aborted"))
            and (not arguments.untrained or row.outcome != "trained")
        )

    return wanted


def read_samples(run: Path) -> Iterator[SampleRow | None]:
    """The rows of a run in the order in which they were written; None for a line that cannot be read."""
    path = run if run.is_file() else run / SAMPLES_FILE
    if not path.is_file():
        raise UsageError(_missing(run))
    decoder = msgspec.json.Decoder(SampleRow)
    with path.open("rb") as file:
        for line in file:
            try:
                yield decoder.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                yield None


def _missing(run: Path) -> str:
    if not run.is_dir():
        return f"{run} is no directory; give the directory of a run, which it printed at its start"
    if not (run / CONFIG_FILE).is_file():
        return f"{run} holds no run (no {CONFIG_FILE}); give the directory of one, for example {_example(run)}"
    if read_recipe(str(run / CONFIG_FILE)).values.get("observe.samples_interval") == 0:
        return f"{run} was run with --samples-interval 0, so that it wrote no samples; leave that out next time"
    return f"{run} has no {SAMPLES_FILE} yet: the first samples are written when its first batch is trained"


def _example(place: Path) -> str:
    runs = sorted(path.parent for path in (*place.glob(f"*/{CONFIG_FILE}"), *place.glob(f"*/*/{CONFIG_FILE}")))
    return str(runs[-1]) if runs else "runs/20260101-120000"


def decoder_of(run: Path) -> Decode | None:
    """Tokens to text by the run's tokenizer; None where that cannot be had, and then turns have one colour each."""
    config = (run.parent if run.is_file() else run) / CONFIG_FILE
    if not config.is_file():
        return None
    name = str(read_recipe(str(config)).values.get("train.hf_checkpoint", ""))
    built_in = config.parent / "assets" / name
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the run has it; asking takes long where no hub answers
    try:
        tokenizer: Tokenizer = load_tokenizer(str(built_in if name and built_in.is_dir() else name))
    except TokenizerError:
        return None
    return partial(tokenizer.decode, skip_special_tokens=False)


def render(row: SampleRow, decode: Decode | None) -> Text:
    """One sample: a heading, the prompt, the turns."""
    text = _head(row)
    for title, message in (("error", row.error), ("why", row.detail)):
        if message:
            text.append(f"{title}: {visible(message)}\n", "red")
    text.append("prompt: ", "bold").append(f"{visible(row.prompt)}\n", UNTRAINED)
    start = row.prompt_tokens
    for turn in row.turns:
        pieces = _pieces(row, start, start + turn.tokens)
        start += turn.tokens
        text.append(_heading(turn.role, turn.tokens, pieces), "bold")
        text.append(f", reward {_number(turn.reward)}" if turn.reward is not None else "", "bold").append(": ", "bold")
        text.append_text(_coloured(row, turn.text, pieces, decode)).append("\n")
    return text


def _head(row: SampleRow) -> Text:
    text = Text()
    text.append(f"group {row.group}", "bold").append(f" rollout {row.index}")
    if row.sequences > 1:
        text.append(f" sequence {row.sequence + 1} of {row.sequences}")
        if row.prefix is not None:
            text.append(f" (its first {row.prefix.length} tokens are those of sequence {row.prefix.sequence + 1})")
    text.append(f" | {row.outcome}" + (f" in step {row.step}" if row.outcome == "trained" else f" at step {row.step}"))
    text.append(f" | reward {_number(row.reward)}", "bold")
    if row.raw_reward is not None and row.raw_reward != row.reward:
        text.append(f" (raw {_number(row.raw_reward)})")
    if row.is_correct is not None:
        text.append(" | correct" if row.is_correct else " | wrong")
    text.append(f" | {row.status} | {row.prompt_tokens} + {row.response_tokens} tokens")
    text.append(" | removed from training" if row.removed else "")
    text.append(f" | label {visible(row.label)}" if row.label is not None else "").append("\n")
    return text


def _heading(role: str, tokens: int, pieces: Sequence[tuple[int, int, int, int]]) -> str:
    """`model 12 tokens, v3:8 v4:4, 2 masked`"""
    versions = Counter[int]()
    for begin, end, version, _ in pieces:
        versions[version] += end - begin
    counts = [f"v{version}" + (f":{n}" if len(versions) > 1 else "") for version, n in versions.items() if version >= 0]
    masked = sum(end - begin for begin, end, _, mask in pieces if not mask)
    parts = [f"{role} {tokens} tokens", " ".join(counts)]
    if role == "model" and masked:
        parts.append(f"{masked} masked")
    return ", ".join(part for part in parts if part)


def _pieces(row: SampleRow, start: int, end: int) -> list[tuple[int, int, int, int]]:
    """(begin, end, version, mask) of the tokens of a turn, cut where version or mask changes."""
    tokens = zip(_per_token(row.versions), _per_token(row.loss_mask), strict=False)
    pieces: list[tuple[int, int, int, int]] = []
    for (version, mask), run in groupby(islice(tokens, start, end)):
        begin, start = start, start + len(list(run))
        pieces.append((begin, start, version, mask))
    return pieces


def _per_token(runs: Sequence[Run]) -> list[int]:
    return [value for value, n in runs for _ in range(n)]


def _coloured(row: SampleRow, whole: str, pieces: Sequence[tuple[int, int, int, int]], decode: Decode | None) -> Text:
    """Trained tokens in the colour of their version, the others dim."""
    colour = dict(zip(sorted({version for version, _ in row.versions if version >= 0}), cycle(_PALETTE), strict=False))
    text = Text()
    styles = [colour[version] if mask else UNTRAINED for _, _, version, mask in pieces]
    if len(pieces) <= 1 or decode is None:
        return text.append(visible(whole), max(set(styles), key=styles.count) if styles else None)
    shown = 0
    for (_, end, _, _), style in zip(pieces, styles, strict=True):
        before = decode(row.ids[pieces[0][0] : end])  # from the start of the turn: a character may span two pieces
        text.append(visible(before[shown:]), style)
        shown = len(before)
    return text


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"


def _count(shown: int, read: int, unreadable: int) -> str:
    hidden = f"; {unreadable} lines could not be read" if unreadable else ""
    if not shown:
        return f"none of {read} samples matches the filters{hidden}"
    return f"{shown} of {read} samples{hidden}"
