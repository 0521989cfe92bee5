"""Injected faults (`--fault-inject`): which message or request gets a fault, and which.

Invariants: the draw depends on nothing but the seed, the run generation, the place, the key of the message and how
often it was delivered, so that the same run gets the same faults in any replica, and a message that is delivered
again, or a resumed run, is drawn again; a fault is written to `faults.jsonl` before it happens.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Final

import msgspec
import xxhash
from msgspec import Struct

from configs.schema import Config
from configs.schema.run import FaultKind, FaultSpec, read_fault
from models.disk import read_file

FAULTS_FILE: Final = "faults.jsonl"
log = logging.getLogger("sluice.faults")


class InjectedError(Exception):
    """Raised by the fault `error`."""


class InjectedFault(Struct, frozen=True):
    """One line of `faults.jsonl`."""

    stage: str
    kind: FaultKind
    replica: str
    key: str
    attempt: int
    unix_s: float


class FaultPlan(Struct, frozen=True):
    """The faults of one place. `file`: the log of faults."""

    faults: tuple[FaultSpec, ...]
    seed: int
    run_generation: int
    replica: str
    file: str

    def draw(self, key: str, attempt: int) -> FaultSpec | None:
        """The fault of a message at a delivery, the first in the order of the flags."""
        for place, fault in enumerate(self.faults):
            name = f"{self.seed}/{self.run_generation}/{place}/{fault.stage}/{fault.kind}/{key}/{attempt}"
            if xxhash.xxh3_64_intdigest(name.encode()) < fault.probability * 2**64:
                return fault
        return None

    async def meet(self, key: str, attempt: int = 1) -> FaultSpec | None:
        """Draw and execute a fault. `drop` is left to the caller. Raises InjectedError."""
        fault = self.drawn(key, attempt)
        if fault is not None and fault.kind == "slow":
            await asyncio.sleep(fault.seconds)
        elif fault is not None:
            _happen(fault, key, attempt)
        return fault

    def meet_blocking(self, key: str) -> None:
        """As `meet`, in a process that has no event loop. Raises InjectedError."""
        if (fault := self.drawn(key)) is not None:
            _happen(fault, key, 1)

    def drawn(self, key: str, attempt: int = 1) -> FaultSpec | None:
        """Draw and log a fault: the caller executes it."""
        fault = self.draw(key, attempt)
        if fault is not None:
            note = InjectedFault(fault.stage, fault.kind, self.replica, key, attempt, time.time())
            noted(Path(self.file), note)
            log.warning("%s: %s", self.replica, _said(fault, key, attempt))
        return fault


def noted(path: Path, fault: InjectedFault) -> None:
    """Append a fault that is about to happen to the log of faults."""
    # One write that appends is whole, whichever process does it. On another host than the run's the directory may be
    # missing: the fault happens anyway.
    with contextlib.suppress(OSError), path.open("ab", buffering=0) as file:
        file.write(msgspec.json.encode(fault) + b"\n")


def _said(fault: FaultSpec, key: str, attempt: int) -> str:
    return f"{fault.kind} at {key}, attempt {attempt} (--fault-inject)"


def _happen(fault: FaultSpec, key: str, attempt: int) -> None:
    """In this process and thread; an event loop stands still meanwhile."""
    match fault.kind:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "error":
            raise InjectedError(_said(fault, key, attempt))
        case "hang" | "slow":
            time.sleep(fault.seconds)
        case "drop":
            pass


def fault_plan(config: Config, stage: str, replica: str, *, run_generation: int, run_dir: Path) -> FaultPlan | None:
    """The faults that `--fault-inject` gives a stage, `engine` or `rank`; None without any."""
    faults = tuple(fault for fault in map(read_fault, config.debug.fault_inject) if fault.stage == stage)
    return FaultPlan(faults, config.run.seed, run_generation, replica, str(run_dir / FAULTS_FILE)) if faults else None


def injected(run_dir: Path) -> dict[str, int]:
    """How many faults of each kind there were in all starts of a run, as `reward kill`. A torn last line, whose writer
    was killed, is left out."""
    path, found = run_dir / FAULTS_FILE, Counter[str]()
    for line in read_file(path).splitlines() if path.exists() else ():
        with contextlib.suppress(msgspec.DecodeError):
            fault = msgspec.json.decode(line, type=InjectedFault)
            found[f"{fault.stage} {fault.kind}"] += 1
    return dict(sorted(found.items()))
