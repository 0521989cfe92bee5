"""Records of finished turns on the disk, for a resume after the controller was killed: all hubs live in its process.

`RUN/episodes/<group>/turns-*.log` (stages/records/growing_records.py) has a record for each message with a new turn of
the model. In a resumed run, a rollout that an earlier life had started continues from its newest recorded turn whose
weights are part of the run's history.

Invariants: a record is on the disk before the environment gets its turn; records of the current life are never read, so
an intended restart is complete; records of another message format, sampling or prompt are not restored.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from configs.schema import Config
from stages.messages import PromptGroup, Sample
from stages.records.growing_records import TURNS, GrowingRecords, Kind

log = logging.getLogger("sluice.agents")

KIND: Final = Kind(TURNS, Sample, ("token_ids", "loss_mask", "log_probs"), "response", synced=True)


class TurnJournal:
    """The turns of one replica. `lives`: the step from which each life of the run continued; the last is the current
    life.

    A record is a rollout whose last turn has no answer of the environment yet."""

    def __init__(self, directory: Path, config: Config, lives: Sequence[int]) -> None:
        self._records = GrowingRecords(directory, KIND, config, lives)
        self.restored = 0

    async def keep(self, group: PromptGroup, sample: Sample) -> None:
        """Record a rollout with a new turn. A disk failure is logged, and the run continues."""
        if self._records.writes and group.purpose != "eval":
            # extras do not grow with the tokens, so a rollout with extras is written whole each time
            await asyncio.to_thread(self._records.append, group, (sample.index,), sample, grows=not sample.extras)

    async def restore(self, group: PromptGroup, sample: Sample) -> Sample:
        """The rollout with the turns that earlier lives recorded, or unchanged."""
        if len(self._records.lives) < 2 or group.purpose == "eval":
            return sample
        recorded = await asyncio.to_thread(self._read, group, sample.index)
        if recorded is None:
            return sample
        self.restored += 1
        log.info(
            "group %s: rollout %d continues from turn %d of an earlier life",
            group.key,
            sample.index,
            recorded.turns,
        )
        return recorded

    def _read(self, group: PromptGroup, index: int) -> Sample | None:
        newest: Sample | None = None
        for bound, (rollout,), sample in self._records.read(group, this_life=False):
            fits = rollout == index and max(sample.model_versions, default=0) <= bound
            if fits and (newest is None or sample.turns > newest.turns):
                newest = sample
        return newest
