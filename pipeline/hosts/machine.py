"""Processes, processors, GPUs and ports of this machine (Linux).

- Processes of a group, as /proc shows them: which are stopped, what they use, what they leave in shared memory. Only
  files that a process of the group had mapped are removed, of the kinds that SGLang and multiprocessing make.
- What is shown of this process; CPU time of a process and its descendants, and how many cores are idle.
- The controller's own process: interruption, and the limit of open files.
- Ports for servers that cannot choose their own. A port that is only looked up may be taken meanwhile, so it is
  bound here, without listening, until the server listens: the kernel gives a bound port to no process that wants any
  free port, but a server that binds this number, with SO_REUSEADDR, gets it.
- The last line, or the last error, of a process's log.
- Which GPUs the trainer and each engine see. A trainer on a GPU has the GPU that `--train-device` names (by default the
  first); ranks have that GPU and the next ones. Engines get the remaining GPUs in order,
  `--rollout-num-gpus-per-engine` each, frozen engines last. Where these are too few but all GPUs together are enough,
  engines share the trainer's as well, and its memory has to be divided (`--sglang-mem-fraction-static`). GPUs are those
  of CUDA_VISIBLE_DEVICES if it is set, else of the machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import resource
import signal
import socket
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from msgspec import Struct

import pipeline
from configs.graph import engines_started
from configs.plan.gpus import gpus_of
from configs.schema import Config
from models.disk import open_file
from models.train.trainer_group.rank_spec import needs_trainer_group, processes_of
from pipeline.errors import UsageError, file_limit
from pipeline.facts.stats import visible

ROOT: Final = Path(pipeline.__file__).parent.parent  # the checkout, or the folder of installed packages
SHARED: Final = Path("/dev/shm")
LEFT_BEHIND: Final = ("sglang_", "sem.mp-")
TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
PR_SET_NAME: Final = 15


class ProcessState(Struct, frozen=True):
    """Processes of one group that are stopped, in words, and the processor time used by all, seconds."""

    stopped: tuple[str, ...]
    cpu_s: float


def group_state(group: int) -> ProcessState:
    stopped: list[str] = []
    ticks = 0
    for process, name, fields in _members(group):
        ticks += int(fields[11]) + int(fields[12])
        if fields[0] in "Tt":
            stopped.append(f"process {process} ({name})")
    return ProcessState(tuple(stopped), ticks / TICKS_PER_S)


def _members(group: int) -> Iterator[tuple[str, str, list[str]]]:
    """Number, name and the fields of proc(5) from the state on: state, ppid, pgrp, ...; utime is [11], stime [12]."""
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            text = Path(entry.path, "stat").read_text()
        except OSError:
            continue  # it ended in between
        fields = text[text.rindex(")") + 2 :].split()
        if int(fields[2]) == group:
            yield entry.name, text[text.index("(") + 1 : text.rindex(")")], fields


def shared_memory_files(group: int) -> frozenset[Path]:
    """Files in shared memory that would stay behind if the group were killed now."""
    found: set[Path] = set()
    for process, _, _ in _members(group):
        with contextlib.suppress(OSError):  # it ended in between
            for line in Path("/proc", process, "maps").read_text().splitlines():
                path = Path(line.split(maxsplit=5)[-1])
                if path.parent == SHARED and path.name.startswith(LEFT_BEHIND):
                    found.add(path)
    return frozenset(found)


def living(group: int) -> bool:
    """Whether a process of the group still runs; zombies do not."""
    return any(fields[0] not in "ZX" for _, _, fields in _members(group))


def show_as(name: str, argv: Sequence[str]) -> None:
    """What `ps` and `top` show of this process, a copy of another. The words of its command line lie where those of the
    other lay, and are cut to their length."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name[:15].encode())
    with contextlib.suppress(OSError, ValueError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        first, last = int(fields[45]), int(fields[46])  # arg_start and arg_end
        words = "\0".join([sys.executable, "-P", "-m", *argv]).encode()[: last - first - 1]
        ctypes.memmove(first, words.ljust(last - first, b"\0"), last - first)


def collect_less() -> None:
    """Take all that is loaded out of the collection of garbage, and collect more rarely. Called when a process is set
    up: half a million objects of its libraries would be looked at again and again. Not for a trainer, whose garbage
    may hold tensors."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_OBJECTS, 20, 20)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, of its descendants that live, and of those whose end was waited for."""
    place = Path("/proc", str(pid))
    try:
        fields = (place / "stat").read_text().rpartition(")")[2].split()
        children = (place / "task" / str(pid) / "children").read_text().split()
    except OSError:  # it has just ended
        return 0.0
    return sum(int(field) for field in fields[11:15]) / TICKS_PER_S + sum(cpu_seconds(int(child)) for child in children)


class IdleCores:
    """Seconds that the cores of this process were idle since its construction, all cores together."""

    def __init__(self) -> None:
        self._cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        self.seconds, self._last = 0.0, self._idle()

    def look(self) -> float:
        """The sum up to now."""
        now = self._idle()
        self.seconds, self._last = self.seconds + max(0.0, now - self._last), now
        return self.seconds

    def _idle(self) -> float:
        lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
        return sum((int(line[4]) + int(line[5])) / TICKS_PER_S for line in lines if line and line[0] in self._cores)


GARBAGE_OBJECTS: Final = 20_000  # new objects, those that are gone not counted, before some are looked at
ENOUGH_FILES: Final = 1 << 16
# What the controller itself was seen to open, and what each process that it starts adds, with some room.
_OWN_FILES, _FILES_EACH = 72, 4


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM and a closed terminal act as Ctrl-C, also before the controller installs its handlers: resources are
    released. Where they are ignored, as under nohup, they stay ignored."""
    signals = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    for number in signals:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in signals:
            signal.signal(number, signal.SIG_DFL)


def raise_file_limit(processes: int) -> None:
    """As many open files as this user may have: each replica takes a few sockets, and shells often begin with 1024.

    The processes that it starts inherit the limit. Raises UsageError if it is too low for so many of them: libzmq ends
    a process that can open no more, without a word of the reason.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(hard, ENOUGH_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    needed = _OWN_FILES + _FILES_EACH * processes
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UsageError(file_limit(needed))


HOST = "127.0.0.1"


class PortInUse(OSError):
    """A port requested by number is taken."""


@contextlib.contextmanager
def held_port(port: int = 0, host: str = HOST) -> Iterator[int]:
    """A port kept from others for the time of the block: `port`, or any free one if that is 0. Raises PortInUse."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held.bind((host, port))
        except OSError as error:
            raise PortInUse(error.errno, f"port {port} of {host} cannot be used: {error.strerror}") from error
        yield int(held.getsockname()[1])


_TAIL_BYTES = 64 << 10
# "torch.OutOfMemoryError: CUDA out of memory" with or without a time before it, and what SGLang prints of a lost child.
_ERROR = re.compile(r"^(?:\[[^\]]*\]\s*)?(?:(?:\w+\.)*\w*(?:Error|Exception): \S|.*\bcrashed with exit code\b).*")


def last_line(log: Path, start: int = 0, *, error: bool = False) -> str:
    """The last line of a log; with `error` the last one that names an exception, if there is any: servers of several
    processes say at the very end only that a child has failed."""
    text = ""
    with contextlib.suppress(OSError), open_file(log) as file:  # no log, no lines
        file.seek(max(start, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        text = file.read().decode(errors="replace")
    stripped = (line.strip() for line in text.splitlines())  # the line of a start is no reason for the end
    lines = [visible(line) for line in stripped if line and " starts: pid " not in line]
    named = [line for line in lines if _ERROR.match(line)] if error else []
    return (named or [line.split(": ", 1)[-1] for line in lines] or ["no output"])[-1][:500]


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


def gpus_used(config: Config) -> int:
    """GPUs of the whole run; 0 if it has none, or engines of others whose GPUs are not known."""
    external, here = config.sglang.rollout_external_engine_addrs, config.run.runner == "ray" or visible_gpus()
    return 0 if external or not here else gpus_of(config).total


def trainers_gpu(config: Config) -> int | None:
    """Place of the trainer's GPU among the visible ones; None if it trains on a CPU."""
    device = config.train.train_device
    if device == "cpu" or config.train.train_backend == "simulated":
        return None
    return int(device.partition(":")[2] or 0)


def slices(
    visible: Sequence[str], engines: int, per_engine: int, taken: Collection[str]
) -> tuple[tuple[str, ...], ...]:
    """GPUs of each engine: those that are not taken, or all if that leaves too few. Raises UsageError for too few."""
    if not visible:
        return ((),) * engines
    needed = engines * per_engine
    free = [gpu for gpu in visible if gpu not in taken]
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
    """GPUs of each engine: those without a trainer, or all if that leaves too few. Raises UsageError."""
    trainer, taken = trainers_gpu(config), tuple[str, ...]()
    if needs_trainer_group(config) and not config.asynchrony.colocate:  # else they take turns
        taken = trainer_group_gpus(config, visible)
    elif trainer is not None and not config.asynchrony.colocate:
        taken = tuple(visible[trainer : trainer + 1])
    return slices(visible, engines, config.sglang.rollout_num_gpus_per_engine, taken)


def shared_gpu_faults(config: Config) -> Iterator[str]:
    """SGLang takes most of a GPU when it starts, whatever a trainer beside it needs; see `engines_gpus`."""
    visible, trainer, args = gpus_to_divide(config), trainers_gpu(config), config.sglang.sglang_args
    if not visible or trainer is None or config.asynchrony.colocate:
        return
    held = visible[trainer : trainer + processes_of(config.parallel)]
    engines = {gpu for one in engines_gpus(config, visible, engines_started(config)) for gpu in one}
    shared = [gpu for gpu in held if gpu in engines]
    if shared and not {"mem_fraction_static", "mem-fraction-static"} & args.keys():
        yield (
            f"--engine sglang is on GPU {', '.join(shared)}, which the trainer has as well, for {len(visible)} are "
            "visible, and takes nearly all of its memory; divide it with --sglang-mem-fraction-static 0.4, take turns "
            "with --mode sync --colocate, or give the run more GPUs (CUDA_VISIBLE_DEVICES)"
        )


def may_fork() -> bool:
    """Whether this process has one thread, and its system tells of the end of processes that others started for it."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):  # an old kernel, or a sandbox without the call
        return False
    return threading.active_count() == 1


def child_environment(threads: int) -> dict[str, str]:
    """Environment of worker processes: our modules come first, few threads each."""
    return {
        "OMP_NUM_THREADS": str(threads),
        **PASSIVE,
        "TOKENIZERS_PARALLELISM": "false",
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }


# Waiting threads spin for microseconds, then sleep. The default of both libraries, milliseconds, takes the processor
# from the threads they wait for on a busy machine: a training step took 15 times as long. Sleeping at once costs a
# wake-up per operation: a step of a small model with two threads takes 0.080 s against 0.056 s with this count.
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "0"}
