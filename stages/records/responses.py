"""Responses in the making, on the disk: the responses of a killed process go on where they were.

`RUN/episodes/<group>/responses-*.log` (stages/records/growing_records.py) gets a record of a response each time that
`--response-journal-tokens` more of its tokens are certain, and one when it has ended. Shorter responses are not worth a
record. A turn that begins, on another replica or after a resume, begins with the most that was written of it, as it
would go on after the loss of its engine.

Invariants:
- What is restored was made behind the very tokens that the turn begins with, with this group's prompt, seed and
  settings, and by weights that are part of the run's history and not older than the bound of staleness lets.
- Nothing waits for a record: of a response that grows faster than the disk writes, only the newest state is written.
- Records reach the operating system and are not synced: a machine that fails loses the records of its last seconds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import xxhash
from msgspec.structs import replace

from configs.schema import Config
from stages.messages import PromptGroup, Sample
from stages.records.growing_records import RESPONSES, GrowingRecords, Key, Kind
from stages.sampling.requests import SampleResult

log = logging.getLogger("sluice.generate")

NOTHING: Final = SampleResult()
KIND: Final = Kind(RESPONSES, SampleResult, ("token_ids", "log_probs"), "text", synced=False)


class ResponseJournal:
    """The responses of one replica. `lives` as in `GrowingRecords`; without any, nothing is written or restored."""

    def __init__(self, directory: Path, config: Config, lives: Sequence[int]) -> None:
        self._directory = directory
        self._records = GrowingRecords(directory, KIND, config, lives)
        self.tokens = config.checkpoint.response_journal_tokens if self._records.writes else 0
        self._reads = bool(lives) and config.checkpoint.response_journal_tokens > 0
        self._due: dict[tuple[str, Key], tuple[PromptGroup, SampleResult]] = {}
        self._changed = asyncio.Event()
        self.restored_tokens = 0

    def keep(self, group: PromptGroup, sample: Sample, result: SampleResult) -> None:
        """Have it written down what a turn of `sample` has brought so far."""
        worth = 0 < self.tokens <= len(result.token_ids) and result.finish in ("aborted", "stop", "length")
        if worth and not result.reason and group.purpose == "train":
            self._due[group.key, _turn(sample)] = group, result
            self._changed.set()

    async def run(self) -> None:
        """Waits for what is to be written; runs until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self.flush()

    async def flush(self) -> None:
        """Write what is due."""
        due, self._due = self._due, {}
        await asyncio.to_thread(self._write, due)

    def _write(self, due: dict[tuple[str, Key], tuple[PromptGroup, SampleResult]]) -> None:
        if not self._directory.is_dir():
            return  # another host: nothing would ever remove what is left there
        for (_, turn), (group, result) in due.items():
            self._records.append(group, turn, result, grows=result.finish == "aborted")

    async def restore(self, group: PromptGroup, samples: Sequence[Sample], oldest: int) -> tuple[SampleResult, ...]:
        """What other processes have left of this turn of each sample; empty if they left nothing at all.

        `oldest`: no version before this may be trained by the batches that come."""
        if not self._reads or group.purpose == "eval":
            return ()
        found = await asyncio.to_thread(self._found, group, {_turn(sample) for sample in samples}, oldest)
        if not found:
            return ()
        tokens = sum(len(result.token_ids) for result in found.values())
        self.restored_tokens += tokens
        log.info(
            "group %s: %d responses go on behind %d tokens, which another process left", group.key, len(found), tokens
        )
        return tuple(found.get(_turn(sample), NOTHING) for sample in samples)

    def _found(self, group: PromptGroup, turns: set[Key], oldest: int) -> dict[Key, SampleResult]:
        best: dict[Key, SampleResult] = {}
        for newest, turn, result in self._records.read(group, this_life=True):
            if turn not in turns or not _is_whole(result):
                continue
            versions = [run.version for run in result.runs]
            if oldest <= min(versions) and max(versions) <= newest and _better(result, best.get(turn)):
                best[turn] = result
        return {turn: replace(result, reused_tokens=len(result.token_ids)) for turn, result in best.items()}


def _turn(sample: Sample) -> Key:
    """Which rollout and sequence, its turn, times begun anew, hash of its tokens."""
    begins = xxhash.xxh3_64_intdigest(np.ascontiguousarray(sample.token_ids).tobytes())
    return sample.index, sample.sequence, sample.turns, sample.replaced, begins


def _is_whole(result: SampleResult) -> bool:
    n = len(result.token_ids)
    lengths = len(result.log_probs), sum(run.n_tokens for run in result.runs)
    return n > 0 and lengths == (n, n) and result.error is None


def _better(result: SampleResult, than: SampleResult | None) -> bool:
    """Whether more is done: it has ended, or it is longer."""
    if than is None:
        return True
    return (result.finish != "aborted", len(result.token_ids)) > (than.finish != "aborted", len(than.token_ids))
