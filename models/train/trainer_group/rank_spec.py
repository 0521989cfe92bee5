"""Who is in the gang and where it is met: sizes, what a rank is started with, the file that says it is up. No torch.

A *gang* is the processes that train one policy together, the *ranks*; rank 0 talks to the train stage. A gang that
lost a rank is ended and started again as the next *incarnation*.

Invariant: the meeting file names an incarnation only after all its ranks have found each other and rank 0 listens; it
is replaced in one step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from configs.schema import Config
from configs.schema.parallel import ParallelConfig

EXIT_STAGE_GONE: Final = 3  # of rank 0: the stage ended without ending its gang


def processes_of(parallel: ParallelConfig) -> int:
    """How many ranks train."""
    return parallel.actor_num_nodes * parallel.actor_num_gpus_per_node


def needs_gang(config: Config) -> bool:
    """Whether ranks train; else the train stage does so itself."""
    match config.train.train_backend:
        case "simulated":
            return False
        case "torch":
            return processes_of(config.parallel) > 1
        case _:
            return True


class RankSpec(Struct, frozen=True):
    """All that a rank needs to know, as JSON. What torchrun would tell (`RANK`, ...) is in its environment as well."""

    config: str  # file with the resolved configuration as JSON
    rank: int
    processes: int
    local_rank: int  # place among the GPUs that it sees
    incarnation: int
    store: str  # file through which the ranks of this incarnation find each other
    address: str  # of the socket of rank 0
    meeting: str  # the meeting file, written by rank 0


class Meeting(Struct, frozen=True):
    """What the meeting file holds."""

    incarnation: int
    address: str


def read_meeting(path: Path) -> Meeting | None:
    """None before the first incarnation is up."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Meeting)
    except FileNotFoundError:
        return None


def write_meeting(path: Path, meeting: Meeting) -> None:
    draft = path.with_name(f".{path.name}.draft")
    draft.write_bytes(msgspec.json.encode(meeting))
    draft.replace(path)
