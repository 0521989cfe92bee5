"""Arithmetic prompts as JSONL files: a task that a tiny model learns on a CPU, plain or with a calculator.

Format of a row (one JSON object per line):

- kind "add", two numbers of 0..99:      {"input": "37+48=", "label": "85"}
  The response wanted is the label followed by EOS (a newline in the arithmetic tokenizer).
- kind "tools", product of two of 0..99: {"input": "37*48=", "label": "1776",
                                          "demonstration": "[37*48]1776=1776\\n", "metadata": {"tool_spans": ...}}
  The model calls the calculator by writing `[expression]`; generation pauses at `]`, the tool's result is inserted
  right after it, and the model continues with `=`, the answer and EOS. `demonstration` is the full response of a
  supervised warm start, tool result and EOS included. `metadata.tool_spans` gives the characters of the
  demonstration that the environment wrote, as [start, end) pairs: they carry no loss, because the model never
  produces them.

A recipe for "tools" therefore sets --tool-call-open "[", --tool-call-close "]" and --tool-result-template "{result}",
and grades the last number behind that result, which the model wrote.

Invariants: no torch; train and held-out rows are disjoint; equal arguments give equal bytes; files appear whole.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Final, Literal, NamedTuple

import msgspec
from msgspec import Struct

from models.disk import write_whole

Kind = Literal["add", "tools"]

OPERANDS: Final = 100  # 0 .. 99
PAIRS: Final = OPERANDS * OPERANDS
TOOL_OPEN: Final = "["
TOOL_CLOSE: Final = "]"
EOS: Final = "\n"


class ArithmeticFiles(NamedTuple):
    """The two JSONL files of one data set."""

    train: Path
    heldout: Path


class AddRow(Struct, frozen=True):
    """A sum: the prompt and the digits of its value."""

    input: str
    label: str


class ToolRow(Struct, frozen=True):
    """A product: the prompt, its value, and a full response that calls the calculator."""

    input: str
    label: str
    demonstration: str
    metadata: dict[str, tuple[tuple[int, int], ...]]


def write_arithmetic(directory: Path, *, kind: Kind, train: int, heldout: int, seed: int) -> ArithmeticFiles:
    """Write `<kind>-train.jsonl` and `<kind>-heldout.jsonl` with that many rows; return their paths.

    The operand pairs are a seeded shuffle of all 100 x 100, cut in two. Raises ValueError for more rows than pairs.
    """
    if train < 0 or heldout < 0 or train + heldout > PAIRS:
        raise ValueError(
            f"train={train} and heldout={heldout} rows: there are {PAIRS} pairs of two-digit numbers, which the two "
            f"files share without overlap; ask for at most {PAIRS} in all"
        )
    pairs = [divmod(index, OPERANDS) for index in range(PAIRS)]
    random.Random(seed).shuffle(pairs)
    directory.mkdir(parents=True, exist_ok=True)
    files = ArithmeticFiles(train=directory / f"{kind}-train.jsonl", heldout=directory / f"{kind}-heldout.jsonl")
    _write_rows(files.train, kind, pairs[:train])
    _write_rows(files.heldout, kind, pairs[train : train + heldout])
    return files


def add_row(x: int, y: int) -> AddRow:
    """The row of x + y."""
    return AddRow(input=f"{x}+{y}=", label=str(x + y))


def tool_row(x: int, y: int) -> ToolRow:
    """The row of x * y, with the demonstration of a calculator call."""
    call = f"{TOOL_OPEN}{x}*{y}{TOOL_CLOSE}"
    result = str(x * y)
    return ToolRow(
        input=f"{x}*{y}=",
        label=result,
        demonstration=f"{call}{result}={result}{EOS}",
        metadata={"tool_spans": ((len(call), len(call) + len(result)),)},
    )


def _write_rows(path: Path, kind: Kind, pairs: list[tuple[int, int]]) -> None:
    make = add_row if kind == "add" else tool_row
    encoder = msgspec.json.Encoder()
    write_whole(path, b"".join(encoder.encode(make(x, y)) + b"\n" for x, y in pairs))
