"""Turns that have ended, on the disk: what a killed controller takes with it, since every hub lives in its process.

`RUN/episodes/<group>/turns-*.log` (stages/generate/rollout_records.py) has a record for each message that came with a
turn of the model: only what stands behind the turn before. When a run is resumed and a rollout is begun that an earlier
life had begun, it goes on from the newest of its turns whose weights are part of the run's history.

Invariants: a record is on the disk before the environment sees its turn; records of this life are never read, so what
is begun anew on purpose is; of another message format, sampling or prompt nothing is restored.
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
from stages.generate.rollout_records import TURNS, RolloutRecords
from stages.messages import PromptGroup, Sample, joined

log = logging.getLogger("sluice.agents")

_KNOWN: Final = 65_536  # rollouts of which is known what was written last


class Kept(Struct, frozen=True, array_like=True):
    """A rollout with a turn that its environment has not answered yet."""

    about: bytes  # see RolloutRecords.about
    tokens: int  # that stand in the record before this one of the same rollout; the arrays begin behind them
    characters: int  # of its response
    sample: Sample


class TurnJournal:
    """The turns of one replica. `lives`: the step from which each life of the run went on; the last one is this."""

    def __init__(self, directory: Path, config: Config, lives: Sequence[int]) -> None:
        self._records = RolloutRecords(directory, TURNS, Kept, config, lives, synced=True)
        self._last: OrderedDict[str, tuple[int, int, int]] = OrderedDict()  # tokens, their hash, characters
        self.restored = 0

    async def keep(self, group: PromptGroup, sample: Sample) -> None:
        """Write a rollout down that has come with a turn. A disk that fails is told; the run goes on."""
        if not self._records.writes or group.purpose == "eval":
            return
        name = f"{group.key}/{sample.index}"
        tokens, was, characters = self._last.pop(name, (0, 0, 0))
        if sample.extras or sample.length < tokens or _hash(sample, tokens) != was:
            tokens = characters = 0
        kept = Kept(self._records.about(group), tokens, characters, _behind(sample, tokens, characters))
        if not await asyncio.to_thread(self._records.append, group, kept):
            return
        self._last[name] = sample.length, _hash(sample, sample.length), len(sample.response)
        if len(self._last) > _KNOWN:
            self._last.popitem(last=False)

    async def restore(self, group: PromptGroup, sample: Sample) -> Sample:
        """The rollout with the turns that earlier lives have left of it, or as it is."""
        if len(self._records.lives) < 2 or group.purpose == "eval":
            return sample
        found = await asyncio.to_thread(self._found, group, sample.index)
        if found is None:
            return sample
        self.restored += 1
        log.info(
            "group %s: rollout %d goes on from turn %d, which an earlier life left",
            group.key,
            sample.index,
            found.turns,
        )
        return found

    def _found(self, group: PromptGroup, index: int) -> Sample | None:
        newest, about = None, self._records.about(group)
        for bound, records in self._records.read(group, this_life=False):
            before: dict[int, Sample] = {}
            for kept in records:
                sample = kept.sample
                if kept.tokens:
                    sample = _joined(before[sample.index], sample)
                before[sample.index] = sample
                fits = sample.index == index and kept.about == about and max(sample.model_versions, default=0) <= bound
                if fits and (newest is None or sample.turns > newest.turns):
                    newest = sample
        return newest


def _behind(sample: Sample, tokens: int, characters: int) -> Sample:
    return replace(
        sample,
        token_ids=sample.token_ids[tokens:],
        loss_mask=sample.loss_mask[tokens:],
        log_probs=sample.log_probs[tokens:],
        response=sample.response[characters:],
    )


def _joined(before: Sample, behind: Sample) -> Sample:
    return replace(
        behind,
        token_ids=joined(before.token_ids, behind.token_ids),
        loss_mask=joined(before.loss_mask, behind.loss_mask),
        log_probs=joined(before.log_probs, behind.log_probs),
        response=before.response + behind.response,
    )


def _hash(sample: Sample, tokens: int) -> int:
    """Of the beginning of a sequence, everything that a later record leaves out."""
    arrays = sample.token_ids, sample.loss_mask, sample.log_probs
    return xxhash.xxh3_64_intdigest(b"".join(np.ascontiguousarray(array[:tokens]).tobytes() for array in arrays))
