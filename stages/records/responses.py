"""Records of partial responses on the disk, from which another process continues after a kill.

`RUN/episodes/<group>/responses-*.log` (stages/records/growing_records.py) gets a record of a response for every
`--response-journal-tokens` final tokens, and one at its end. Shorter responses get no record. A turn that starts on
another replica or after a resume begins with the longest record of it, as after the loss of an engine.

Invariants:
- A restored response follows exactly the tokens with which the turn begins, with this group's prompt, seed and
  settings. Its weights are part of the run's history and within the bound of staleness.
- Nothing waits for a record: if a response grows faster than the disk writes, only its newest state is written.
- Records reach the operating system and are not synced: a machine failure loses the last seconds.
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
    """The responses of one replica. `lives` as in `GrowingRecords`; empty: no records are written or restored."""

    def __init__(self, directory: Path, config: Config, lives: Sequence[int]) -> None:
        self._directory = directory
        self._records = GrowingRecords(directory, KIND, config, lives)
        self.tokens = config.checkpoint.response_journal_tokens if self._records.writes else 0
        self._reads = bool(lives) and config.checkpoint.response_journal_tokens > 0
        self._due: dict[tuple[str, Key], tuple[PromptGroup, SampleResult]] = {}
        self._changed = asyncio.Event()
        self.restored_tokens = 0

    def keep(self, group: PromptGroup, sample: Sample, result: SampleResult) -> None:
        """Queue a record of the partial result of a turn of `sample`."""
        worth = 0 < self.tokens <= len(result.token_ids) and result.finish in ("aborted", "stop", "length")
        if worth and not result.reason and group.purpose == "train":
            self._due[group.key, _turn(sample)] = group, result
            self._changed.set()

    async def run(self) -> None:
        """Write queued records; runs until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self.flush()

    async def flush(self) -> None:
        """Write the queued records."""
        due, self._due = self._due, {}
        await asyncio.to_thread(self._write, due)

    def _write(self, due: dict[tuple[str, Key], tuple[PromptGroup, SampleResult]]) -> None:
        if not self._directory.is_dir():
            return  # another host: nothing would ever remove its files
        for (_, turn), (group, result) in due.items():
            self._records.append(group, turn, result, grows=result.finish == "aborted")

    async def restore(self, group: PromptGroup, samples: Sequence[Sample], oldest: int) -> tuple[SampleResult, ...]:
        """Recorded partial results of this turn, one for each sample; empty if there are none at all.

        `oldest`: the oldest version that later batches may train.
        """
        if not self._reads or group.purpose == "eval":
            return ()
        records = await asyncio.to_thread(self._read, group, {_turn(sample) for sample in samples}, oldest)
        if not records:
            return ()
        tokens = sum(len(result.token_ids) for result in records.values())
        self.restored_tokens += tokens
        log.info("group %s: %d responses continue after %d recorded tokens", group.key, len(records), tokens)
        return tuple(records.get(_turn(sample), NOTHING) for sample in samples)

    def _read(self, group: PromptGroup, turns: set[Key], oldest: int) -> dict[Key, SampleResult]:
        best: dict[Key, SampleResult] = {}
        for newest, turn, result in self._records.read(group, this_life=True):
            if turn not in turns or not _is_whole(result):
                continue
            versions = [run.version for run in result.runs]
            if oldest <= min(versions) and max(versions) <= newest and _better(result, best.get(turn)):
                best[turn] = result
        return {turn: replace(result, reused_tokens=len(result.token_ids)) for turn, result in best.items()}


def _turn(sample: Sample) -> Key:
    """Rollout, sequence, turn, number of restarts, hash of the tokens."""
    prefix_hash = xxhash.xxh3_64_intdigest(np.ascontiguousarray(sample.token_ids).tobytes())
    return sample.index, sample.sequence, sample.turns, sample.replaced, prefix_hash


def _is_whole(result: SampleResult) -> bool:
    n = len(result.token_ids)
    lengths = len(result.log_probs), sum(run.n_tokens for run in result.runs)
    return n > 0 and lengths == (n, n) and result.error is None


def _better(result: SampleResult, than: SampleResult | None) -> bool:
    """Whether a result is further: it has ended, or it is longer."""
    if than is None:
        return True
    return (result.finish != "aborted", len(result.token_ids)) > (than.finish != "aborted", len(than.token_ids))
