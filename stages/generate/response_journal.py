"""Responses in the making, on the disk: so that those of a killed process go on where they were.

`RUN/episodes/<group>/responses-*.log` (stages/generate/rollout_records.py) has a record of a response each time that
`--response-journal-tokens` more of its tokens are certain, and one when it has ended: only what stands behind the
record before. Shorter responses are not worth a record. A turn that is begun, by another replica or after a resume,
begins with the most that was written of it, as it would go on after the loss of its engine.

Invariants: what is restored was made behind the very tokens that the turn begins with, with this group's prompt, seed
and settings, and by weights that are part of the run's history and not older than the bound of staleness lets; nobody
waits for a record: of a response that grows faster than the disk writes, only the newest state is written. Records
reach the operating system and are not synced: a machine that fails takes those of its last seconds.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import xxhash
from msgspec import Struct
from msgspec.structs import replace

from configs.schema import Config
from stages.generate.rollout_records import RESPONSES, RolloutRecords
from stages.messages import PromptGroup, Sample
from stages.sampling.requests import SampleResult

log = logging.getLogger("sluice.generate")

_KNOWN: Final = 65_536  # responses of which is known what was written last
NOTHING: Final = SampleResult()

Turn = tuple[int, int, int, int, int]  # which rollout and sequence, its turn, times begun anew, hash of its tokens


class Piece(Struct, frozen=True, array_like=True):
    """What a turn has more than in the records before this one."""

    about: bytes  # see RolloutRecords.about
    turn: Turn
    tokens: int  # that stand in the records before; the lists of the result begin behind them
    characters: int
    result: SampleResult  # its counts, finish and version runs are those of the whole


class ResponseJournal:
    """The responses of one replica. `lives` as in `RolloutRecords`; without any, nothing is written or restored."""

    def __init__(self, directory: Path, config: Config, lives: Sequence[int]) -> None:
        self._directory = directory
        self._records = RolloutRecords(directory, RESPONSES, Piece, config, lives, synced=False)
        self.tokens = config.checkpoint.response_journal_tokens if self._records.writes else 0
        self._reads = bool(lives) and config.checkpoint.response_journal_tokens > 0
        self._due: dict[tuple[str, Turn], tuple[PromptGroup, SampleResult]] = {}
        self._changed = asyncio.Event()
        self._written: OrderedDict[tuple[str, Turn], tuple[int, int, int]] = OrderedDict()  # tokens, hash, characters
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

    def _write(self, due: dict[tuple[str, Turn], tuple[PromptGroup, SampleResult]]) -> None:
        if not self._directory.is_dir():
            return  # another host: nobody would ever remove what is left there
        for name, (group, result) in due.items():
            tokens, was, characters = self._written.pop(name, (0, 0, 0))
            if len(result.token_ids) < tokens or _hash(result.token_ids[:tokens]) != was:
                tokens = characters = 0  # it was begun anew
            behind = replace(
                result,
                token_ids=result.token_ids[tokens:],
                log_probs=result.log_probs[tokens:],
                text=result.text[characters:],
            )
            piece = Piece(self._records.about(group), name[1], tokens, characters, behind)
            if self._records.append(group, piece) and result.finish == "aborted":
                self._written[name] = len(result.token_ids), _hash(result.token_ids), len(result.text)
        while len(self._written) > _KNOWN:
            self._written.popitem(last=False)

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

    def _found(self, group: PromptGroup, turns: set[Turn], oldest: int) -> dict[Turn, SampleResult]:
        best: dict[Turn, SampleResult] = {}
        about = self._records.about(group)
        for newest, pieces in self._records.read(group, this_life=True):
            so_far: dict[Turn, SampleResult] = {}
            for piece in pieces:
                if piece.about != about or piece.turn not in turns:
                    continue
                had = so_far.pop(piece.turn, NOTHING) if piece.tokens else NOTHING
                result = _joined(had, piece)
                if result is None:
                    continue
                so_far[piece.turn] = result
                versions = [run.version for run in result.runs]
                if oldest <= min(versions) and max(versions) <= newest and _better(result, best.get(piece.turn)):
                    best[piece.turn] = result
        return {turn: replace(result, reused_tokens=len(result.token_ids)) for turn, result in best.items()}


def _turn(sample: Sample) -> Turn:
    begins = xxhash.xxh3_64_intdigest(np.ascontiguousarray(sample.token_ids).tobytes())
    return sample.index, sample.sequence, sample.turns, sample.replaced, begins


def _joined(had: SampleResult, piece: Piece) -> SampleResult | None:
    """The turn with one more piece; None for one that cannot be."""
    result = piece.result
    if len(had.token_ids) != piece.tokens or len(had.text) != piece.characters:
        return None
    whole: SampleResult = replace(
        result,
        token_ids=had.token_ids + result.token_ids,
        log_probs=had.log_probs + result.log_probs,
        text=had.text + result.text,
    )
    n = len(whole.token_ids)
    fits = n > 0 and len(whole.log_probs) == n == sum(run.n_tokens for run in whole.runs)
    return whole if fits and whole.error is None else None


def _better(result: SampleResult, than: SampleResult | None) -> bool:
    """Whether more is done: it has ended, or it is longer."""
    if than is None:
        return True
    return (result.finish != "aborted", len(result.token_ids)) > (than.finish != "aborted", len(than.token_ids))


def _hash(token_ids: Sequence[int]) -> int:
    return xxhash.xxh3_64_intdigest(np.asarray(token_ids, dtype=np.int32).tobytes())
