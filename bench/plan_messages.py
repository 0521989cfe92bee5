"""What the stages of a simulation are given in place of data, records and tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from stages.data.prompt_set import PreparedPrompt
from stages.messages import Float32Array, Int32Array, Sample, Settled, StepDone, UInt8Array, VersionRun, wire


class NoRecord:
    """The controller's part: the ledger knows all that is wanted."""

    def __init__(self, batches: int) -> None:
        self.batches, self.whole = batches, asyncio.Event()  # set when the ledger has the last batch

    def admitted(self, group: Any) -> None:
        pass

    def settled(self, groups: Sequence[tuple[int, Settled]]) -> None:
        pass

    async def step(self, report: StepDone) -> None:
        if report.step == self.batches:
            self.whole.set()

    async def evaluated(self, report: Any) -> None:
        pass

    async def commit(self, report: Any, ledger: Any) -> None:
        pass


class OnePrompt:
    def __init__(self, tokens: int) -> None:
        self.prompt = PreparedPrompt("", wire([0] * tokens, Int32Array), None, "{}", "[]")

    def __len__(self) -> int:
        return 1

    def get(self, index: int) -> PreparedPrompt:
        return self.prompt


class NoSpans:
    def add(self, *_: Any, **__: Any) -> None:
        pass


async def unrecorded(*_: Any) -> None:
    """Groups that end untrained are counted by the ledger."""


def turns_of(length: int, turns: int) -> list[int]:
    """The tokens of each turn: as even as they can be, none without a token."""
    turns = min(turns, length)
    return [length * (i + 1) // turns - length * i // turns for i in range(turns)]


def sample_of(index: int, runs: Sequence[tuple[int, int]], reward: float) -> Sample:
    """A rollout as the stages see it, with one token for each version: they look at nothing else of its tokens."""
    n = len(runs)
    return Sample(
        index=index,
        status="completed",
        response="",
        token_ids=wire([0] * n, Int32Array),
        prompt_length=0,
        loss_mask=wire([1] * n, UInt8Array),
        log_probs=wire([0.0] * n, Float32Array),
        version_runs=tuple(VersionRun(version, 1) for version, _ in runs),
        turns=1,
        reward=reward,
    )
