"""Which GPUs of this machine the trainer and each engine see.

The rule: a trainer on a GPU has the GPU that `--train-device` names (the first, if it names none), ranks that and those
behind it; engines get the
others, in order, `--rollout-num-gpus-per-engine` each, frozen engines last. Where that leaves too few but all together
are enough, engines share the trainer's as well, and its memory has to be divided (`--sglang-mem-fraction-static`).
GPUs are those of CUDA_VISIBLE_DEVICES if it is set, else of the machine. Without GPUs nobody gets any.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from configs.schema import Config
from models.train.trainer_group.rank_spec import needs_trainer_group
from pipeline.errors import UsageError

_DEVICE_FILE = re.compile(r"nvidia(\d+)")


def visible_gpus(environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> tuple[str, ...]:
    """Numbers or UUIDs of the GPUs that a process started from here may use."""
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        found = [_DEVICE_FILE.fullmatch(entry.name) for entry in devices.iterdir()]
        return tuple(str(number) for number in sorted(int(match[1]) for match in found if match))
    entries = tuple(entry.strip() for entry in named.split(",") if entry.strip())
    return entries[: entries.index("-1")] if "-1" in entries else entries  # CUDA stops reading at -1


def gpus_to_divide(config: Config) -> tuple[str, ...]:
    """GPUs of this machine that the run divides itself; none on a cluster, where each process gets its own."""
    return () if config.run.runner == "ray" else visible_gpus()


def trainers_gpu(config: Config) -> int | None:
    """Place of the trainer's GPU among the visible ones; None if it trains on a CPU."""
    device = config.train.train_device
    if device == "cpu" or config.train.train_backend == "simulated":
        return None
    return int(device.partition(":")[2] or 0)


def slices(visible: Sequence[str], engines: int, per_engine: int, trainer: int | None) -> tuple[tuple[str, ...], ...]:
    """GPUs of each engine. No I/O. Raises UsageError if there are too few."""
    if not visible:
        return ((),) * engines
    needed = engines * per_engine
    free = [gpu for place, gpu in enumerate(visible) if place != trainer]
    usable = free if needed <= len(free) else list(visible)
    if needed > len(usable):
        raise UsageError(
            f"{engines} engines of {per_engine} GPU{'s' if per_engine > 1 else ''} need {needed}, but {len(visible)} "
            "are visible; lower --rollout-num-gpus or --scale engine=N (frozen engines count too), or set "
            "CUDA_VISIBLE_DEVICES"
        )
    return tuple(tuple(usable[i * per_engine : (i + 1) * per_engine]) for i in range(engines))


def check_trainer_group(config: Config) -> None:
    """Raises UsageError for a trainer group that this machine's runners do not start."""
    nodes = config.parallel.actor_num_nodes
    if needs_trainer_group(config) and nodes > 1 and config.run.runner != "ray":
        raise UsageError(
            f"--actor-num-nodes {nodes} places the trainer on several machines, but --runner {config.run.runner} "
            "starts all processes on this one; set --actor-num-nodes 1, or --runner ray"
        )


def trainer_group_gpus(config: Config, visible: Sequence[str]) -> tuple[str, ...]:
    """GPUs of the ranks, one each, from the one that `--train-device` names on; none on a CPU. Raises UsageError."""
    first = trainers_gpu(config)
    if first is None or not visible:
        return ()
    count = config.parallel.actor_num_gpus_per_node
    chosen = tuple(visible[first : first + count])
    if len(chosen) < count:
        raise UsageError(
            f"--actor-num-gpus-per-node {count} needs as many GPUs from --train-device {config.train.train_device} on, "
            f"but {len(visible)} are visible; lower it, set CUDA_VISIBLE_DEVICES, or train with --train-device cpu"
        )
    return chosen


def engines_gpus(config: Config, visible: Sequence[str], engines: int) -> tuple[tuple[str, ...], ...]:
    """GPUs of each engine: those that the trainer has not, or all if that leaves too few. Raises UsageError."""
    per_engine = config.sglang.rollout_num_gpus_per_engine
    if config.asynchrony.colocate:
        return slices(visible, engines, per_engine, None)  # the trainer's too: they take turns
    if not needs_trainer_group(config):
        return slices(visible, engines, per_engine, trainers_gpu(config))
    taken = trainer_group_gpus(config, visible)
    free = [gpu for gpu in visible if gpu not in taken]
    return slices(free if engines * per_engine <= len(free) else visible, engines, per_engine, None)
