"""The destination of a rollout after a turn: the loop stage that wants it, or out, to the reward stage.

Invariants: the sequences of a rollout stay together until the last has ended; an exception in `wants` fails that
rollout with the reason, and nothing else; rollouts on their way out carry no data that only loops read.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from configs.schema import Config
from models.import_path import import_path
from stages.base import LoopStage, failed
from stages.messages import PromptGroup, RolloutSlice, Sample
from stages.rollouts import rollout_fault

log = logging.getLogger("sluice.loops")


class Loops:
    """The loop stages behind generate, in the order in which they may take a rollout. `entries`: name=import path."""

    def __init__(self, config: Config, entries: Sequence[str]) -> None:
        self._config = config
        parts = [entry.partition("=") for entry in entries]
        self._stages: list[tuple[str, type[LoopStage]]] = [(name, import_path(path)) for name, _, path in parts]
        self._options = {stage.name: stage.options for stage in config.stage}

    @property
    def beginning(self) -> str | None:
        """Outlet of the loop stage in which rollouts begin, None where the engine has the first turn."""
        return next((f"loop.{name}" for name, stage in self._stages if stage.begins(self._config)), None)

    def takes_turn(self, sample: Sample) -> bool:
        """Whether an engine continues a sequence."""
        return sample.status != "failed" and not sample.done and sample.turns < self._config.rollout.max_turns

    def next(self, group: PromptGroup, parts: Sequence[Sample]) -> tuple[str, RolloutSlice]:
        """The destination of a rollout with all its sequences: name of the outlet, and the slice."""
        slice_ = RolloutSlice(group, tuple(parts))
        if any(part.status == "failed" for part in parts) or all(part.done for part in parts):
            return "out", _leaving(slice_)
        further = any(map(self.takes_turn, parts))
        for name, stage in self._stages:
            if not (further or stage.begins(self._config)):
                continue
            try:
                wanted = stage.wants(self._config, self._options.get(name, {}), slice_)
            except Exception as error:
                log.warning("wants of %s failed on group %d: %r", name, group.group_id, error, exc_info=True)
                reason = f"{stage.__name__}.wants: {type(error).__name__}: {error}"
                return "out", _leaving(failed(slice_, reason))
            if wanted:
                return f"loop.{name}", slice_
        return "out", _leaving(slice_)


def _leaving(slice_: RolloutSlice) -> RolloutSlice:
    """The rollout for the stages after the loops; failed if its sequences are inconsistent."""
    parts = slice_.samples
    if parts[0].sequences > 1 and all(part.status != "failed" for part in parts):
        wrong = rollout_fault(parts)
        parts = parts if wrong is None else failed(slice_, wrong).samples
    return RolloutSlice(msgspec.structs.replace(slice_.group, tools="[]"), tuple(map(_ended, parts)))


def _ended(sample: Sample) -> Sample:
    if not sample.done and not sample.loop_state:
        return sample
    status = "completed" if sample.status == "pending" else sample.status  # a loop stage wrote the whole sequence
    return msgspec.structs.replace(sample, status=status, loop_state=b"")
