"""The directory of a run's rollouts: what each life adds, what checkpoints make superfluous, what is left to tell.

    RUN/episodes/lives.json       the step from which each life of the run went on
                 ended.json       groups that no resume can open again
                 <group>/         responses, turns and calls of its rollouts: stages/records/growing_records.py,
                                  stages/records/once.py

Invariants: what a group left is removed once it has ended in every checkpoint that is there; before that it is said to
have ended, so that none of its calls is made again; what is not known of a call is never removed. Responses go as soon
as their group has ended, but for those that a resume from the newest checkpoint could use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from configs.schema import Config, generates
from models.disk import Manifest, write_whole
from stages.prompts.ledger import LedgerSnapshot
from stages.records.growing_records import RESPONSES
from stages.records.once import ENDED_FILE, Ended, forget, groups_in, home_of, uncertain_calls

LIVES_FILE: Final = "lives.json"


def keeps_rollouts(config: Config) -> bool:
    """Whether the run may write something of its rollouts down."""
    return bool(config.environment) or keeps_responses(config)


def keeps_responses(config: Config) -> bool:
    """Whether parts of responses are written down."""
    checkpoint = config.checkpoint
    return checkpoint.save_interval is not None and checkpoint.response_journal_tokens > 0 and generates(config)


def read_lives(directory: Path) -> tuple[int, ...]:
    """Steps from which the run was started until now; none for a new one."""
    path = directory / LIVES_FILE
    return msgspec.json.decode(path.read_bytes(), type=tuple[int, ...]) if path.exists() else ()


def write_lives(directory: Path, lives: tuple[int, ...]) -> None:
    """Once this life has begun for certain, and before it makes anything."""
    directory.mkdir(exist_ok=True)
    write_whole(directory / LIVES_FILE, msgspec.json.encode(lives), durable=True)


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
    write_whole(directory / ENDED_FILE, msgspec.json.encode(ended), durable=True)
    for group, home in groups_in(directory).items():
        if ended.has(group):
            forget(home)


def forget_responses(directory: Path, groups: Iterable[int]) -> None:
    """Remove the responses of groups that have ended."""
    for group in groups:
        home = home_of(directory, str(group))
        for path in home.glob(f"{RESPONSES}-*.log"):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it is not there, or keeps turns or calls
            home.rmdir()


def uncertain_in(directory: Path) -> int:
    """Calls of which nobody knows whether they took effect."""
    return sum(len(uncertain_calls(home)) for home in groups_in(directory).values())
