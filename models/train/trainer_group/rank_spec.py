"""Who is in the trainer group and where it is met: sizes, what a rank is started with, how it says that it is up. No
torch.

A *trainer group* is the processes that train one policy together, the *ranks*; rank 0 talks to the train stage. A
trainer group that lost a rank is ended and started again as the next *incarnation*.

Invariant: an incarnation is announced only after all its ranks have found each other and rank 0 listens. Rank 0 runs
on the host of the train stage, and meets it at a socket there.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from configs.schema import Config
from configs.schema.train import ParallelConfig
from models.fault_injection import FaultPlan

MEETING: Final = "trainer_group"  # key on the topic
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
    """All that a rank needs to know beside the configuration. What torchrun would tell (`RANK`, ...) is in its
    environment as well."""

    rank: int
    processes: int
    local_rank: int  # place among the GPUs that it sees
    incarnation: int
    store: tuple[str, int]  # host of rank 0, and the port there at which the ranks of this incarnation find each other
    address: str  # of the socket of rank 0; a name of a file where its host has sockets
    faults: FaultPlan | None = None  # of `--fault-inject`


class Rendezvous(Struct, frozen=True):
    """Value of `MEETING`: the incarnation that is up, and where its rank 0 meets the train stage."""

    incarnation: int
    address: str
