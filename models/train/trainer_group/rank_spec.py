"""The trainer group: how many ranks, what a rank is started with, how rank 0 announces it, its errors. No torch.

A *trainer group* is the processes that train one policy together, the *ranks*; rank 0 talks to the train stage. Stage
and ranks are one unit: it is ended and started again as a whole (pipeline/supervise), as the next *incarnation*.

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
EXIT_PEER_GONE: Final = 3  # of a process that ended because the stage, or rank 0, had ended


class TrainerGroupError(RuntimeError):
    """Base of errors of the trainer group itself; errors of its trainers are apart."""


class TrainerGroupClosed(TrainerGroupError):
    """The backend was closed while it waited for its trainer group."""


class RanksDisagree(TrainerGroupError):
    """Some ranks raised an error and others did not: their states differ from now on."""


class PeerGone(TrainerGroupError):
    """The process at the far end of the socket ended first, stage or rank 0: the unit is lost, and this is not why."""


def processes_of(parallel: ParallelConfig) -> int:
    """How many ranks train."""
    return parallel.actor_num_nodes * parallel.actor_num_gpus_per_node


def needs_trainer_group(config: Config) -> bool:
    """Whether ranks train; else the train stage does so itself."""
    backend = config.train.train_backend
    return processes_of(config.parallel) > 1 if backend == "torch" else backend != "simulated"


class RankSpec(Struct, frozen=True):
    """All that a rank needs beside the configuration. Its environment has what torchrun would set (`RANK`, ...)."""

    rank: int
    processes: int
    local_rank: int  # place among the GPUs that it sees
    incarnation: int
    store: tuple[str, int]  # host of rank 0, and the port there at which the ranks of this incarnation find each other
    address: str  # of the socket of rank 0: a file name in its host's directory of sockets
    faults: FaultPlan | None = None  # of `--fault-inject`
    run_dir: str = ""


class Rendezvous(Struct, frozen=True):
    """Value of `MEETING`: where rank 0 of the incarnation that is up meets the train stage."""

    incarnation: int
    address: str
