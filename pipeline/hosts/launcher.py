"""How processes are started and ended, wherever they run: the seam between supervision and hosts.

`LocalLauncher` starts them on this machine. Another launcher may place them on other hosts; nothing outside this folder
sees a process number, a process group or /proc.

Invariants, for every launcher:
- a process ends with whoever started it, together with all that it started itself;
- a name has one process at a time; what it printed can be read here, after its end too;
- after `stop_all` nothing runs.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, Protocol

from msgspec import Struct

STOP_GRACE_S: Final = 5.0


class Resources(Struct, frozen=True):
    """What a process needs of its host. `gpus`: as CUDA_VISIBLE_DEVICES names them; empty = as the host says."""

    gpus: tuple[str, ...] = ()


ANYTHING: Final = Resources()


class ProcessSpec(Struct, frozen=True):
    """One process to start.

    Args:
        env: variables beside those that processes of the run have anyway.
        ours: whether it is a program of this project; another one gets the environment of the host as it is.
        grace_s: time that it gets at the end to finish by itself; 0 = it needs none.
        files: files and directories that it reads: a launcher for other hosts brings those that do not lie at the same
            path there, and names the place of its copy in `argv` instead.
        sweep: whether what it leaves behind is ended with it in any case. Else that is left to itself, such as
            Python's resource tracker, which tidies up after its process.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = {}
    ours: bool = True
    grace_s: float = STOP_GRACE_S
    sweep: bool = False
    files: tuple[str, ...] = ()


class ProcessState(Struct, frozen=True):
    """Processes of one group that are stopped, in words, and the processor time used by all, seconds."""

    stopped: tuple[str, ...]
    cpu_s: float


class Handle(Protocol):
    """One started process."""

    @property
    def alive(self) -> bool: ...

    @property
    def log(self) -> Path:
        """Where the user finds what it printed."""

    async def wait(self) -> int:
        """Wait for its end; its exit status, negative for a signal."""

    async def kill(self) -> int:
        """End it and all that it started at once, or what is left of them; its exit status."""

    async def stop(self) -> None:
        """Ask it to end; kill it, and what it left behind, after its grace."""

    def remember_shared(self) -> None:
        """Told while it comes up: what it holds in shared memory by now is removed for it, should it or the run be
        killed."""

    def state(self) -> ProcessState | None:
        """None where that cannot be seen."""

    def last_line(self) -> str:
        """The last line that it printed in this incarnation."""

    def last_error(self) -> str:
        """The last line in which it named an exception, else its last line."""


class Launcher(Protocol):
    """Where processes run. A name may be spawned again once its process has ended."""

    @property
    def controller(self) -> str | None:
        """The controller's host as processes on other hosts reach it; None: there are none, all meet in a private
        directory of this one."""

    async def place(self, name: str) -> None:
        """Choose the host of a process; before its `address` and `held_port` are asked for. Raises UsageError if there
        is none for it."""

    def expect(self, name: str) -> None:
        """A process more than the run began with is to be placed. Raises UsageError if there is no room for it now."""

    async def release(self, name: str) -> None:
        """The process of that name has ended and is not started again."""

    async def spawn(self, spec: ProcessSpec, resources: Resources = ANYTHING) -> Handle: ...

    def address(self, name: str) -> str:
        """The host on which a process of that name listens, as all others reach it."""

    def held_port(self, name: str, port: int = 0) -> AbstractContextManager[int]:
        """A port there for that process, kept from others for the time of the block. Raises PortInUse."""

    async def stop_all(self) -> None:
        """Ask every process to end, wait at most its grace, then kill it and what it left behind."""


async def stop_together(handles: Iterable[Handle]) -> None:
    """Stop those that are alive. Waits for all of them."""
    async with asyncio.TaskGroup() as tasks:
        for handle in handles:
            if handle.alive:
                tasks.create_task(handle.stop())


def ending(code: int) -> str:
    """What an exit status means, in words."""
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
