"""Child processes of a run: spawned, named, logged, ended with everything that they started.

Invariants: each child leads a process group of its own, so that what it starts can be ended with it; its output goes to
`logs/<name>.log`, its number to `replicas/<name>.pid`; after `stop_all` no child is alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pipeline
from pipeline.hosts import die_with_parent as die_with_parent
from pipeline.hosts.process_group import kill_group, living, remove, shared_files
from pipeline.record.run_directory import RunDir

STOP_GRACE_S = 5.0
GROUP_GONE_S = 5.0
_TAIL_BYTES = 64 << 10
# "torch.OutOfMemoryError: CUDA out of memory" with or without a time before it, and SGLang's word for a lost child.
_ERROR = re.compile(r"^(?:\[[^\]]*\]\s*)?(?:(?:\w+\.)*\w*(?:Error|Exception): \S|.*\bcrashed with exit code\b).*")


def child_environment(processes: int) -> dict[str, str]:
    """Environment of worker processes: importable from the project and from where the user stands, few threads each."""
    root = str(Path(pipeline.__file__).parent.parent)
    paths = [root, os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])]
    threads = str(max(1, (os.cpu_count() or 1) // max(1, processes)))
    return {
        "OMP_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
    }


def with_parent_death_signal(argv: Sequence[str]) -> list[str]:
    """The command of a program that is not ours, made to die with this process."""
    return [sys.executable, "-I", str(die_with_parent.__file__), str(os.getpid()), *argv]


def last_words(log: Path, start: int = 0) -> str:
    """The last line of a log, from byte `start` on, that says something."""
    lines = _lines(log, start)[-50:]
    return lines[-1].split(": ", 1)[-1][:500] if lines else "no output"


def last_error(log: Path, start: int = 0) -> str:
    """The last line of a log that names an exception; without one its last words.

    Servers of several processes say at the very end only that a child has failed.
    """
    for line in reversed(_lines(log, start)):
        if _ERROR.match(line):
            return line[:500]
    return last_words(log, start)


def _lines(log: Path, start: int) -> list[str]:
    with contextlib.suppress(OSError), log.open("rb") as file:  # no log, no words
        end = file.seek(0, os.SEEK_END)
        file.seek(max(start, end - _TAIL_BYTES))
        text = file.read().decode(errors="replace")
        return [line.strip() for line in text.splitlines() if line.strip()]
    return []


def ending(code: int) -> str:
    """What an exit status means, in words."""
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


@dataclass(frozen=True)
class _Child:
    process: asyncio.subprocess.Process
    grace_s: float
    sweep: bool
    log_start: int
    shared: set[Path] = field(default_factory=set)  # what it would leave in shared memory

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # it ended in between
            self.process.send_signal(number)


class Processes:
    """The children of one runner, by name. A name may be spawned again once its process has ended."""

    def __init__(self, rundir: RunDir) -> None:
        self.rundir = rundir
        self._children: dict[str, _Child] = {}

    def log(self, name: str) -> Path:
        return self.rundir.logs / f"{name}.log"

    def log_start(self, name: str) -> int:
        """Where in its log the present process of that name began to write, in bytes."""
        child = self._children.get(name)
        return child.log_start if child is not None else 0

    def alive(self, name: str) -> bool:
        child = self._children.get(name)
        return child is not None and child.process.returncode is None

    async def spawn(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        grace_s: float = STOP_GRACE_S,
        sweep: bool = False,
    ) -> asyncio.subprocess.Process:
        """Start a child.

        Args:
            grace_s: time that it gets at the end to finish by itself; 0 = it needs none.
            sweep: whether what it leaves behind is ended with it in any case. Else that is left to itself, such as
                Python's resource tracker, which tidies up after its process.
        """
        with self.log(name).open("ab") as log:
            start = log.tell()
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                env=dict(env),
                start_new_session=True,  # Ctrl-C is for the controller
            )
        self._children[name] = _Child(process, grace_s, sweep, start)
        (self.rundir.specs / f"{name}.pid").write_text(str(process.pid))
        return process

    def note_shared(self, name: str) -> None:
        """Remember what a child that has come up would leave in shared memory, should it end unexpectedly."""
        child = self._children[name]
        child.shared.update(shared_files(child.process.pid))

    async def kill(self, name: str) -> int:
        """End a child and its group at once, or what is left of them; return its exit status."""
        child = self._children[name]
        self.note_shared(name)
        await self._kill_group(child)
        return await child.process.wait()

    async def stop_all(self) -> None:
        """Ask every child to end, wait at most its grace, then kill it and what it left behind."""
        alive = [child for child in self._children.values() if child.process.returncode is None]
        for name, child in self._children.items():
            if child.sweep and child in alive:
                self.note_shared(name)
        for child in alive:
            child.signal(signal.SIGTERM if child.grace_s else signal.SIGKILL)
        async with asyncio.TaskGroup() as tasks:
            for child in alive:
                tasks.create_task(self._stop(child))

    async def _stop(self, child: _Child) -> None:
        """Waits for the child's end; unblocked by it, or by the grace's end, which kills it."""
        ended = False
        with contextlib.suppress(TimeoutError):  # then it is killed
            async with asyncio.timeout(child.grace_s or STOP_GRACE_S):
                await child.process.wait()
                ended = True
        if child.sweep or not ended:
            await self._kill_group(child)

    async def _kill_group(self, child: _Child) -> None:
        """Waits until all of the group have ended, at most `GROUP_GONE_S` seconds: what they held is free then."""
        group = child.process.pid
        kill_group(group)
        await child.process.wait()
        with contextlib.suppress(TimeoutError):  # the kernel is not done with one of them; nothing more can be done
            async with asyncio.timeout(GROUP_GONE_S):
                while living(group):  # noqa: ASYNC110  (a group announces nothing)
                    await asyncio.sleep(0.01)
        remove(child.shared)
