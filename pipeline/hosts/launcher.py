"""The interface between supervision and hosts: how processes are started and ended, wherever they run.

`LocalLauncher` starts them on this machine, `RayLauncher` on the nodes of a Ray cluster. Nothing outside this folder
sees a process number, a process group or /proc.

Invariants, for every launcher:
- a process ends with its starter, together with all that it started itself; a process with a note may outlive the
  controller, if there is a next start of the run for it, and ends with the last start;
- a name has one process at a time; its output can be read here, after its end too;
- after `stop_all` nothing runs.

`SharedFiles`: what a process that trains must find on its node as it is on the controller's. A path that exists proves
nothing: another machine may have a directory of that name. So the run directory holds a file with an unguessable name,
made again at each start of the run. Of a model, sizes and blocks of its files are compared, at unguessable offsets. A
copy of the model is accepted, since it is only read.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import xxhash
from msgspec import Struct

from configs.schema import Config
from pipeline.facts.run_directory import RunDir
from pipeline.hosts.machine import ProcessState, last_line
from stages.chat.tokenizer import CHECKPOINT_FILES

WEIGHT_FILES: Final = "*.safetensors*"
BLOCKS: Final = 16  # of each file
BLOCK_BYTES: Final = 4096


class SharedFiles(Struct, frozen=True):
    """`seal`: name of the unguessable file; `models`: a digest of each model by its path."""

    run_dir: str
    seal: str
    models: dict[str, str]

    def lacking(self) -> str | None:
        """What is not seen here, in words; None if all is. Reads a few blocks of each file."""
        if not Path(self.run_dir, self.seal).exists():
            return f"does not see the controller's run directory {self.run_dir}"
        if not os.access(self.run_dir, os.W_OK):
            return f"may not write in the run directory {self.run_dir}"
        for model, digest in self.models.items():
            if not Path(model).is_dir():
                return f"does not see the controller's model {model}"
            if sampled(Path(model), self.seal) != digest:
                return f"has another model than the controller's at {model}, or not all of its files"
        return None


def shared_files(rundir: RunDir, config: Config) -> SharedFiles:
    """What the trainer of this run reads and writes, as it is here. A name on the hub each node finds by itself."""
    train, critic = config.train, config.critic
    named = filter(None, (train.hf_checkpoint, train.ref_load, critic.critic_load, config.engine.engine_checkpoint))
    models = {name: sampled(Path(name), rundir.seal.name) for name in named if Path(name).is_dir()}
    return SharedFiles(str(rundir.path), rundir.seal.name, models)


def sampled(model: Path, seed: str) -> str:
    """A digest of names, sizes and some blocks of a model's files; `seed` selects the blocks."""
    digest = xxhash.xxh3_128()
    files = {file for pattern in (*CHECKPOINT_FILES, WEIGHT_FILES) for file in model.glob(pattern) if file.is_file()}
    for file in sorted(files):
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        places = random.Random(f"{seed}/{file.name}")
        with file.open("rb") as opened:
            for start in (places.randrange(size) for _ in range(BLOCKS if size else 0)):
                opened.seek(start)
                digest.update(opened.read(BLOCK_BYTES))
    return digest.hexdigest()


T = TypeVar("T")
STOP_GRACE_S: Final = 5.0


SOCKETS: Final = "SLUICE_SOCKETS"  # in the environment: where processes of one host put sockets, for this user alone


class HostGone(Exception):
    """The host that a process was to be placed on is not there any more."""


class ProcessSpec(Struct, frozen=True):
    """One process to start.

    Args:
        env: variables beside those that processes of the run have anyway.
        gpus: that it may see, as in CUDA_VISIBLE_DEVICES; empty = the host decides.
        ours: whether it is a program of this project; other programs get the unchanged environment of the host.
        grace_s: time that it gets at the end to finish by itself; 0 = it needs none.
        files: files and directories that it reads: a launcher for other hosts copies those that do not lie at the same
            path there, and names the place of its copy in `argv` instead.
        sweep: whether its remaining children are always ended with it. Otherwise they are left alone, such as
            Python's resource tracker, which tidies up after its process.
        note: what the next start of the run needs to know to take it over, where it outlives this one: see
            `Launcher.left`. Empty: it ends with this start.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = {}
    gpus: tuple[str, ...] = ()
    ours: bool = True
    grace_s: float = STOP_GRACE_S
    sweep: bool = False
    files: tuple[str, ...] = ()
    note: str = ""


class Handle(Protocol):
    """One started process. `log`: where the user finds its output; this incarnation's begins at `log_start`."""

    log: Path
    log_start: int

    @property
    def alive(self) -> bool: ...

    @property
    def host_lost(self) -> bool:
        """Whether, with the process, its host was lost, or what owned it there."""
        return False

    async def wait(self) -> int:
        """Wait for its end; its exit status, negative for a signal."""

    async def kill(self) -> int:
        """Kill the process and its remaining children; returns its exit status."""

    async def stop(self) -> None:
        """Signal the process to end; after its grace, kill it and its remaining children."""

    def remember_shared(self) -> None:
        """Called during the start: its files in shared memory so far are removed for it, should it or the run be
        killed."""

    def state(self) -> ProcessState | None:
        """None where that cannot be seen."""
        return None

    def last_line(self) -> str:
        """The last line that it printed in this incarnation."""
        return last_line(self.log, self.log_start)

    def last_error(self) -> str:
        """The last line in which it named an exception, else its last line."""
        return last_line(self.log, self.log_start, error=True)


class Launcher(ABC):
    """Where processes run. A name may be spawned again once its process has ended.

    What is not abstract says what holds for one host, and for processes that end with the controller.
    """

    controller: str | None = None
    """The controller's host as processes on other hosts reach it; None: there are none, all meet in a private directory
    of this one."""

    say: Callable[[str], None]  # reports to the user that a process waits for a host
    handles: Mapping[str, Handle]  # of the processes that were spawned, by name
    waiting: Mapping[str, str]
    """Processes for which no host has room now, and what they need. Their `place` waits."""

    async def place(self, name: str, beside: str = "", sees: SharedFiles | None = None) -> None:  # noqa: B027
        """Choose the host of a process; before its `address` and `held_port` are used. `beside`: a process on
        the same host; `sees`: what must be there. Raises UsageError if no host fits, HostGone if that host is not there
        any more."""

    def expect(self, name: str) -> None:  # noqa: B027
        """A process more than the run began with is to be placed. Raises UsageError if there is no room for it now."""

    async def release(self, name: str) -> None:  # noqa: B027
        """The process of that name has ended and is not started again."""

    @abstractmethod
    async def spawn(self, spec: ProcessSpec) -> Handle: ...

    def left(self, name: str) -> str:
        """The note of a process of that name which an earlier start of the run has left; empty if there is none."""
        return ""

    def take_over(self, spec: ProcessSpec) -> Handle:
        """The process that was left under the name of `spec`, in the place of one that `spawn` starts."""
        raise NotImplementedError("nothing is left by an earlier start")

    async def end_left(self, names: Collection[str]) -> None:  # noqa: B027
        """End what an earlier start of the run has left, but for these names."""

    def leave(self) -> None:  # noqa: B027
        """Leave processes with a note to the next start of the run: `stop_all` passes them over."""

    @abstractmethod
    def address(self, name: str) -> str:
        """The host on which a process of that name listens, as all others reach it."""

    @abstractmethod
    def held_port(self, name: str, port: int = 0) -> AbstractContextManager[int]:
        """A port there for that process, kept from others for the time of the block. Raises PortInUse."""

    async def stop_all(self) -> None:
        """Signal every process to end, wait at most its grace, then kill it and its remaining children."""
        async with asyncio.TaskGroup() as tasks:
            for handle in self.handles.values():
                if handle.alive:
                    tasks.create_task(handle.stop())


async def run_until(work: Coroutine[Any, Any, T], stop: Coroutine[Any, Any, object]) -> T | None:
    """The result of the work; None if `stop` ended first, which cancels the work. Errors of both propagate."""
    async with asyncio.TaskGroup() as tasks:
        done, ended = tasks.create_task(work), tasks.create_task(stop)
        await asyncio.wait((done, ended), return_when=asyncio.FIRST_COMPLETED)
        done.cancel()
        ended.cancel()
    return None if done.cancelled() else done.result()


@contextlib.asynccontextmanager
async def at_most(seconds: float) -> AsyncIterator[None]:
    """Ends the block after so many seconds, without an error."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            yield


def describe_exit(code: int) -> str:
    """What an exit status means, in words."""
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
