"""One rank's part in a call: the same call on its own trainer.

Invariant: a call that is not collective (files and weights of plain copies) is made by rank 0 alone; every other call
is made by all.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec

from configs.schema import Config
from models.errors import WeightsError
from models.fault_injection import FaultPlan
from models.train.build import build_member
from models.train.dp_group import DpGroup
from models.train.trainer import Trainer
from models.train.trainer_group.calls import (
    Accumulate,
    Arrays,
    BeginBatch,
    Call,
    Discard,
    Done,
    End,
    FinishSave,
    Flush,
    Load,
    LogProbs,
    Metrics,
    Reply,
    Save,
    Setup,
    Step,
    WriteSlot,
    Written,
    raised,
)


class Member:
    """The trainer of one rank. `dp_group`: of plain copies; sharded frameworks make their own. `faults`: of
    `--fault-inject`."""

    def __init__(self, config: Config, dp_group: DpGroup, *, leads: bool, faults: FaultPlan | None = None) -> None:
        self._faults, self._calls = faults, itertools.count(1)
        self._config = _for_this_rank(config)
        self._dp_group, self._leads = dp_group, leads
        self._copies = config.train.train_backend == "torch"
        self._trainer: Trainer | None = None

    def takes_part(self, call: Call) -> bool:
        """Whether this rank makes the call."""
        return self._leads or not (self._copies and isinstance(call, Save | WriteSlot))

    def make(self, call: Call) -> Reply:
        """Make the call. What the trainer raises propagates, and so does InjectedError, which ends the rank."""
        if self._faults is not None and not isinstance(call, End):
            self._faults.meet_blocking(f"{self._faults.replica}/{next(self._calls)} {type(call).__name__}")
        if isinstance(call, Setup):
            total = self._config.rollout.num_rollout or 0
            made = build_member(self._config, total, self._dp_group)
            made.setup()
            self._trainer = made
            return Done()
        trainer = self._trainer
        if trainer is None:
            if isinstance(call, End):
                return Done()
            raise RuntimeError(f"{type(call).__name__} before Setup")
        match call:
            case BeginBatch(rollouts, steps, version, lr_scale):
                trainer.begin_batch(rollouts=rollouts, steps=steps, version=version, lr_scale=lr_scale)
            case Accumulate(sequences):
                trainer.accumulate(sequences)
            case Flush():
                trainer.flush()
            case Step():
                return Metrics(trainer.step())
            case Discard():
                trainer.discard()
            case LogProbs(sequences):
                return Arrays(trainer.logprobs(sequences))
            case WriteSlot():
                return self._write_slot(trainer, call)
            case Save(directory):
                trainer.save(Path(directory))
            case FinishSave() | End():
                trainer.finish_save()
            case Load(directory):
                trainer.load(Path(directory))
        return Done()

    def _write_slot(self, trainer: Trainer, call: WriteSlot) -> Reply:
        """Rank 0 writes; the remaining ranks take part in the collectives of the export. What is wrong with the slot is
        a reply: it is rank 0's alone, and no trainer has changed."""
        if not self._leads:
            for _ in trainer.export_weights():
                pass
            return Done()
        try:
            return Written(
                trainer.write_slot(Path(call.directory), Path(call.source), call.version, call.run_generation)
            )
        except WeightsError as error:
            return raised(error)


def _for_this_rank(config: Config) -> Config:
    """`--train-device cuda:2` names the first GPU of the trainer group; a rank has one, which is its current device."""
    if not config.train.train_device.startswith("cuda"):
        return config
    return msgspec.structs.replace(config, train=msgspec.structs.replace(config.train, train_device="cuda"))
