"""The ledger's journal: what was admitted and how each group ended, one checksummed JSON line per event.

It is the evidence: an oracle can recompute the ledger from it, across restarts, and compare it with the run's summary.
The last key of a line, `crc`, is the CRC-32 in hexadecimal of the line as it would be without that key.

Invariants: lines are only appended; reading ends at a line with a wrong checksum (a torn tail after a crash), which is
cut off before the next line is written; a `rollback` line says that steps after its own never happened; what happened
before a checkpoint is on disk before the checkpoint is (`sync`), so no audit finds more trained than admitted.

`EffectiveTime` is the share of a run's wall clock that was spent on steps that count, from the journal alone. A start
of a run lasts from its first to its last line in the journal or its summary; the time between two starts does not
count. A step takes the time since the step before it, or since the trainer's first weights were out. The rest is lost:
starting, steps that a rollback undoes, a batch without an end, the way to the end.
"""

from __future__ import annotations

import os
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from models.disk import open_file
from pipeline.errors import UsageError
from pipeline.facts.stats import Changed

_SEAL_BYTES: Final = len(b',"crc":"00000000"}\n')
_OTHER_FORMAT: Final = re.compile(rb"[0-9a-f]{8} \{")


class JournalDamaged(UsageError):
    """A line in the middle cannot be read, or the file is of another version."""


class Began(Struct, frozen=True, tag="begin"):
    """One start of the run. `before_s`: unix time of the last sign of the start before it, 0 if there was none.
    `bound`: of staleness at its beginning."""

    unix_s: float
    before_s: float = 0.0
    bound: int | None = None


class Admitted(Struct, frozen=True, tag="admit"):
    group: int
    position: int
    requeued: int = 0


class Ended(Struct, frozen=True, tag="settle"):
    group: int
    outcome: str
    step: int = -1
    detail: str = ""


class Stepped(Struct, frozen=True, tag="step"):
    """A rollout batch was trained; equal batches have equal hashes."""

    step: int
    token_hash: str
    oldest: int  # largest staleness among its trained tokens
    took_s: float = 0.0  # since the step before it, or since the trainer's first weights of this start were out


class Committed(Struct, frozen=True, tag="commit"):
    step: int


class RolledBack(Struct, frozen=True, tag="rollback"):
    """The run was resumed from the checkpoint of `step`: its open groups are open again, whatever their outcome was."""

    step: int
    run_generation: int
    next_group: int
    reopened: tuple[int, ...] = ()  # groups that the checkpoint's ledger holds as open
    restored: tuple[int, ...] = ()  # those of them that the trainer found complete in the checkpoint


class WentBack(Struct, frozen=True, tag="back"):
    """The user's rollback in the running run: version `step` has the weights of a checkpoint, and no batch was trained
    for it. Nothing older is trained from here on. Written again where the trainer was lost before it went on."""

    step: int


Event = Began | Admitted | Ended | Stepped | Committed | RolledBack | WentBack | Changed


class Journal(AbstractContextManager["Journal"]):
    """Appends events; `flush` hands them to the operating system, `sync` to the disk.

    Raises JournalDamaged if the file holds a damaged line that no crash explains.
    """

    def __init__(self, path: Path) -> None:
        if path.exists():
            _cut_torn_tail(path)
        self._file = path.open("ab")
        self._encoder = msgspec.json.Encoder()
        self._first: tuple[Event, ...] = ()

    def begin_with(self, *events: Event) -> None:
        """Write these events before the next event: a start that is refused first leaves no line."""
        self._first = events

    def write(self, *events: Event) -> None:
        first, self._first = self._first, ()
        for event in (*first, *events):
            body = self._encoder.encode(event)
            self._file.write(body[:-1] + _seal(body))

    def flush(self) -> None:
        self._file.flush()

    def sync(self) -> None:
        self._file.flush()
        os.fdatasync(self._file.fileno())

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _seal(body: bytes) -> bytes:
    """What stands in a line in place of the body's closing brace."""
    return b',"crc":"%08x"}\n' % zlib.crc32(body)


def _whole(line: bytes) -> bool:
    """Whether a line is as it was written, its end included."""
    return line[-_SEAL_BYTES:] == _seal(line[:-_SEAL_BYTES] + b"}")


def _refuse_other_format(path: Path, first: bytes) -> None:
    """The checksum once stood before the JSON object. Taken for a torn tail, all of it would be cut off."""
    if _OTHER_FORMAT.match(first):
        raise JournalDamaged(
            f"{path} was written by an earlier version of Sluice, with the checksum in front of each line; resume the "
            "run with that version, or move the file away: the run then continues with a journal from its last "
            "checkpoint"
        )


def _cut_torn_tail(path: Path) -> None:
    """Remove the torn last lines of a crash: lines behind them would never be read."""
    kept, torn = 0, False
    with open_file(path) as file:
        _refuse_other_format(path, file.readline())
        file.seek(0)
        for number, line in enumerate(file, start=1):
            if torn and _whole(line):
                raise JournalDamaged(
                    f"{path} is damaged before line {number}, which is whole, so no crash did it; restore the file, or "
                    "move it away: the run then continues with a journal that begins at its last checkpoint"
                )
            torn = torn or not _whole(line)
            kept += 0 if torn else len(line)
        if torn:
            os.truncate(path, kept)


def read_journal(path: Path) -> Iterator[Event]:
    """Events in order, up to the end or the first damaged line. Raises JournalDamaged for another version's file."""
    decoder = msgspec.json.Decoder(Event)
    with open_file(path) as file:
        for number, line in enumerate(file):
            if not number:
                _refuse_other_format(path, line)
            if not _whole(line):
                return
            yield decoder.decode(line)


def last_run_generation(path: Path) -> int:
    """The run generation of the newest life of a run: 0 before its first resume. No later one may repeat it, also if it
    begins at the same checkpoint, since labels of weights carry it."""
    if not path.exists():
        return 0
    return max((event.run_generation for event in read_journal(path) if isinstance(event, RolledBack)), default=0)


class Audit(Struct):
    """A run as its journal records it, rollbacks applied."""

    admitted: int
    outcomes: dict[str, int]
    open: int
    trained: dict[int, int]  # group -> step, of surviving steps
    twice: tuple[int, ...]  # groups trained in more than one surviving step
    batches: dict[int, str] = {}  # surviving step -> token hash
    staleness_max: int = 0


def _survives(end: Ended, step: int, reopened: bool) -> bool:
    """Whether a roll-back to `step` leaves a terminal state as it is.

    A group trained in a surviving step keeps it even if the checkpoint calls the group open: training it again is what
    the audit has to find. Any other end of a reopened group was written after the checkpoint was taken.
    """
    return end.step <= step and (end.outcome == "trained" or not reopened)


def audit(path: Path) -> Audit:
    """Recompute the ledger from the journal."""
    admitted: set[int] = set()
    ended: dict[int, Ended] = {}
    twice: list[int] = []
    batches: dict[int, Stepped] = {}
    for event in read_journal(path):
        match event:
            case Admitted():
                admitted.add(event.group)
            case Ended():
                before = ended.get(event.group)
                if before is not None and before.outcome == event.outcome == "trained":
                    twice.append(event.group)
                ended.setdefault(event.group, event)
            case Stepped():
                batches[event.step] = event
            case RolledBack():
                batches = {step: e for step, e in batches.items() if step <= event.step}
                admitted = {g for g in admitted if g < event.next_group}
                again = set(event.reopened)
                ended = {g: e for g, e in ended.items() if g in admitted and _survives(e, event.step, g in again)}
    return Audit(
        admitted=len(admitted),
        outcomes=dict(Counter(end.outcome for end in ended.values())),
        open=len(admitted) - len(ended),
        trained={g: e.step for g, e in ended.items() if e.outcome == "trained"},
        twice=tuple(twice),
        batches={step: e.token_hash for step, e in sorted(batches.items())},
        staleness_max=max((e.oldest for e in batches.values()), default=0),
    )


@dataclass
class EffectiveTime:
    """`former_s`: the wall clock of former starts. `steps`: seconds of each step that counts, over all starts."""

    began_s: float  # unix time of this start
    former_s: float = 0.0
    steps: dict[int, float] = field(default_factory=dict)

    def share(self, now_s: float) -> float:
        """Of the wall clock up to a unix time; 0 before there is any."""
        wall = self.former_s + max(0.0, now_s - self.began_s)
        return min(1.0, sum(self.steps.values()) / wall) if wall > 0 else 0.0


def resumed_time(events: Iterable[Event], now: Began, step: int) -> EffectiveTime:
    """The effective time of former starts of a run that is resumed from `step`. Each start recorded the last sign of
    the start before it; `now` is the start that begins."""
    former_s, begun = 0.0, 0.0
    steps: dict[int, float] = {}
    for event in (*events, now):
        match event:
            case Began():
                former_s += max(0.0, event.before_s - begun) if begun else 0.0
                begun = event.unix_s
            case Stepped():
                steps[event.step] = event.took_s
            case RolledBack():
                steps = {number: took_s for number, took_s in steps.items() if number <= event.step}
    return EffectiveTime(now.unix_s, former_s, {number: took_s for number, took_s in steps.items() if number <= step})
