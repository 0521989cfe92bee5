"""Who is in the trainer group and where it is met: sizes, what a rank is started with, the file that says it is up. No
torch.

A *trainer group* is the processes that train one policy together, the *ranks*; rank 0 talks to the train stage. A
trainer group that lost a rank is ended and started again as the next *incarnation*.

Invariant: the rendezvous file names an incarnation only after all its ranks have found each other and rank 0 listens;
it is replaced in one step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from configs.schema import Config
from configs.schema.parallel import ParallelConfig

EXIT_STAGE_GONE: Final = 3  # of rank 0: the stage ended without ending its trainer group


def processes_of(parallel: ParallelConfig) -> int:
    """How many ranks train."""
    return parallel.actor_num_nodes * parallel.actor_num_gpus_per_node


def needs_trainer_group(config: Config) -> bool:
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
    rendezvous: str  # the rendezvous file, written by rank 0


class Rendezvous(Struct, frozen=True):
    """What the rendezvous file holds."""

    incarnation: int
    address: str


def read_rendezvous(path: Path) -> Rendezvous | None:
    """None before the first incarnation is up."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Rendezvous)
    except FileNotFoundError:
        return None


def write_rendezvous(path: Path, rendezvous: Rendezvous) -> None:
    draft = path.with_name(f".{path.name}.draft")
    draft.write_bytes(msgspec.json.encode(rendezvous))
    draft.replace(path)
