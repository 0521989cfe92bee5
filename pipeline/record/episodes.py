"""The directory of a run's episodes: what each life adds, what checkpoints make superfluous, what is left to tell.

    RUN/episodes/lives.json       the step from which each life of the run went on
                 ended.json       groups that no resume can open again
                 <group>/         turns and calls of its episodes: stages/agents/turn_journal.py, stages/agents/once.py

Invariants: what a group left is removed once it has ended in every checkpoint that is there; before that it is said to
have ended, so that none of its calls is made again; what is not known of a call is never removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from models.checkpoint import Manifest
from models.disk import sync
from pipeline.record.whole_file import write_whole
from stages.agents.once import ENDED_FILE, Ended, forget, groups_in, uncertain_calls
from stages.prompts.ledger import LedgerSnapshot

LIVES_FILE: Final = "lives.json"


def read_lives(directory: Path) -> tuple[int, ...]:
    """Steps from which the run was started until now; none for a new one."""
    path = directory / LIVES_FILE
    return msgspec.json.decode(path.read_bytes(), type=tuple[int, ...]) if path.exists() else ()


def write_lives(directory: Path, lives: tuple[int, ...]) -> None:
    """Once this life has begun for certain, and before it makes anything."""
    directory.mkdir(exist_ok=True)
    _write(directory / LIVES_FILE, msgspec.json.encode(lives))


def forget_ended(directory: Path, checkpoints: Sequence[Manifest]) -> None:
    """Remove what is left of the groups that have ended in all of these checkpoints."""
    if not directory.is_dir() or not checkpoints:
        return
    ledgers = [msgspec.json.decode(manifest.ledger, type=LedgerSnapshot) for manifest in checkpoints]
    ended = Ended(
        min(ledger.next_group for ledger in ledgers),
        tuple(sorted({group.group_id for ledger in ledgers for group in ledger.open})),
        min(manifest.step for manifest in checkpoints),
    )
    _write(directory / ENDED_FILE, msgspec.json.encode(ended))
    for group, home in groups_in(directory).items():
        if ended.has(group):
            forget(home)


def uncertain_in(directory: Path) -> int:
    """Calls of which nobody knows whether they took effect."""
    return sum(len(uncertain_calls(home)) for home in groups_in(directory).values())


def _write(path: Path, content: bytes) -> None:
    write_whole(path, content)
    sync(path)
    sync(path.parent)
