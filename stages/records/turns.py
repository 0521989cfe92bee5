"""Turns that have ended, on the disk: what a killed controller takes with it, since every hub lives in its process.

`RUN/episodes/<group>/turns-*.log` (stages/records/growing_records.py) has a record for each message that came with a
turn of the model. When a run is resumed and a rollout is begun that an earlier life had begun, it goes on from the
newest of its turns whose weights are part of the run's history.

Invariants: a record is on the disk before the environment sees its turn; records of this life are never read, so what
is begun anew on purpose is; of another message format, sampling or prompt nothing is restored.
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
    """The turns of one replica. `lives`: the step from which each life of the run went on; the last life is this one.

    A record is a rollout with a turn that its environment has not answered yet."""

    def __init__(self, directory: Path, config: Config, lives: Sequence[int]) -> None:
        self._records = GrowingRecords(directory, KIND, config, lives)
        self.restored = 0

    async def keep(self, group: PromptGroup, sample: Sample) -> None:
        """Write a rollout down that has come with a turn. A disk that fails is logged; the run goes on."""
        if self._records.writes and group.purpose != "eval":
            # extras have a length of their own: such a rollout is written as a whole each time
            await asyncio.to_thread(self._records.append, group, (sample.index,), sample, grows=not sample.extras)

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
        newest: Sample | None = None
        for bound, (rollout,), sample in self._records.read(group, this_life=False):
            fits = rollout == index and max(sample.model_versions, default=0) <= bound
            if fits and (newest is None or sample.turns > newest.turns):
                newest = sample
        return newest
