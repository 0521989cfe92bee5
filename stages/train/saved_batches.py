"""Whole rollout batches on disk (`--save-debug-rollout-data`), and training on them (`--load-debug-rollout-data`).

A file holds the groups of one batch in the order of their ids, as stages/train/saved_groups.py writes them: msgpack,
arrays as raw bytes. It is there whole or not at all.

Invariants: a run that loads trains batch t on exactly the groups of file t, in their order; its group ids are dense, so
those of a run that dropped groups are numbered anew; no token is trained that the bound of staleness forbids.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from threading import Lock

import msgspec

from configs.schema import Config
from configs.schema.debug import batch_file
from models.checkpoint import explain_disk_errors
from stages.errors import SavedBatchError
from stages.messages import RolloutSlice
from stages.rollouts import oldest_version
from stages.staleness_gate import StalenessGate
from stages.train.saved_groups import read_file, write_file


def save_batch(template: str, rollout_id: int, groups: Sequence[RolloutSlice]) -> None:
    """Write one batch (0 = the first). Raises CheckpointError where there is no room."""
    path = Path(batch_file(template, rollout_id))
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.draft")
    with explain_disk_errors(path):
        write_file(draft, sorted(groups, key=lambda one: one.group.group_id))
        draft.replace(path)


def load_batch(template: str, rollout_id: int) -> list[RolloutSlice]:
    """The groups of a batch as they were saved. Raises SavedBatchError."""
    path = Path(batch_file(template, rollout_id))
    try:
        return read_file(path)
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise SavedBatchError(
            f"--load-debug-rollout-data: {path} cannot be read as a batch of this version of Sluice ({error}); save it "
            "again"
        ) from error


class SavedBatches:
    """Groups of saved batches by the id that this run gives them. May be asked by several threads."""

    def __init__(self, config: Config) -> None:
        self._template = config.debug.load_debug_rollout_data or ""
        self._size, self._members = config.rollout.rollout_batch_size, config.rollout.n_samples_per_prompt
        self._gate = StalenessGate.of(config)
        self._lock = Lock()
        self._newest: tuple[int, list[RolloutSlice]] = (-1, [])

    def group(self, group_id: int) -> RolloutSlice:
        """Raises SavedBatchError for a batch that this configuration cannot train."""
        step, place = divmod(group_id, self._size)
        with self._lock:
            if self._newest[0] != step:
                self._newest = (step, self._checked(step))
            slice_ = self._newest[1][place]
        return msgspec.structs.replace(slice_, group=msgspec.structs.replace(slice_.group, group_id=group_id))

    def _checked(self, step: int) -> list[RolloutSlice]:
        groups = load_batch(self._template, step)
        file = batch_file(self._template, step)
        if len(groups) != self._size:
            raise SavedBatchError(
                f"{file} holds {len(groups)} groups, but --rollout-batch-size is {self._size}; set it to {len(groups)}"
            )
        for slice_ in groups:
            wanted, oldest = slice_.group.n_samples, oldest_version(slice_.samples)
            if wanted != self._members:
                raise SavedBatchError(
                    f"{file} holds groups of {wanted} rollouts, but --n-samples-per-prompt is {self._members}; set it "
                    f"to {wanted}"
                )
            if not self._gate.fresh(step=step, oldest_version=oldest):
                raise SavedBatchError(
                    f"{file} holds a token of version {oldest}, and batch {step} may be trained with a staleness of "
                    f"{self._gate.max_staleness}; set --max-staleness to at least {step - (oldest or 0)}"
                )
        return groups
