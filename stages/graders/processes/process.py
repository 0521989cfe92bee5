"""One grader process as the pool sees it: start, a chunk at a time, deadline, kill.

Invariants: a process serves one chunk at a time; after a fault (or a cancelled chunk) it is dead and never used again;
the deadline is measured per item and enforced from here, so that no grader can evade it.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import signal
import socket
import subprocess
import time
from typing import Literal

from msgspec import Struct

from stages.graders.errors import PoolError
from stages.graders.grade import Grade, GradeRequest
from stages.graders.processes.frames import LENGTH, LOADING, PROGRESS_BYTES, Reply, decode_reply, work_frame
from stages.graders.synthetic import IN_WORKER_VARIABLE
from stages.process_guard import end_guarded, start_guarded

LOAD_LIMIT_S = 120.0  # to start Python, and to import a grader's module
_POLL_S = 0.005
_CPU_CLOCK = 2  # the kernel's clock id of a process is made of its number and this (clock_getcpuclockid(3))
_BUSY_SHARE = 0.2  # of the deadline; below, the machine was too busy to blame the text


class Fault(Struct, frozen=True):
    """Why a process did not finish its chunk."""

    position: int  # in the chunk, of the item that is to blame
    kind: Literal["timeout", "crash"]
    reason: str
    busy: bool = False  # of a timeout: it was grading the item, and had a processor to do it with


class ChunkResult(Struct, frozen=True):
    """Grades of the first items of a chunk; all of them unless there is a fault or the process retired."""

    grades: list[Grade]
    fault: Fault | None
    seconds: float


class GraderProcess:
    """A running worker. `start` makes one."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        shared: mmap.mmap,
    ) -> None:
        self.served = 0  # items that count towards recycling; kept by the pool
        self._process = process
        self._reader, self._writer = reader, writer
        self._size: int | None = None  # of a frame whose length has come
        self._progress = memoryview(shared).cast("q")
        self._retired = False

    @classmethod
    async def start(cls, memory_bytes: int) -> GraderProcess:
        """Start a process and wait until it is ready. Raises PoolError."""
        process, ours, shared = _spawn(memory_bytes)
        reader, writer = await asyncio.open_connection(sock=ours)
        worker = cls(process, reader, writer, shared)
        try:
            ready = await worker._next(LOAD_LIMIT_S)
        except BaseException:
            await worker.kill()
            raise
        if ready is None:
            await worker.kill()
            raise PoolError(
                f"a grader process ended at its start ({worker._ending()}); its error output says why, "
                "and --reward-workers 0 grades in the stage instead"
            )
        return worker

    @property
    def usable(self) -> bool:
        broken = self._reader.at_eof() or self._reader.exception() is not None
        return not self._retired and not broken

    async def _next(self, timeout_s: float) -> bytes | None:
        """The next frame, None at the end of the stream. Raises TimeoutError: what has come by then is kept."""
        try:
            async with asyncio.timeout(timeout_s):
                if self._size is None:
                    (self._size,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
                data = await self._reader.readexactly(self._size)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        self._size = None
        return data

    async def grade(self, items: list[GradeRequest], deadline_s: float) -> ChunkResult:
        """Grade a chunk. A crash or an overrun kills the process and blames the item that was being worked on."""
        sent_ns = time.monotonic_ns()
        self._writer.write(work_frame(items))
        grades: list[Grade] = []
        while True:
            # Never longer than a deadline: a process that is importing now may begin with its item at any time.
            wait_s = min(deadline_s, max(0.0, self._standing(sent_ns, deadline_s)[1]))
            try:
                data = await self._next(wait_s)
            except TimeoutError:
                position, remaining_s = self._standing(sent_ns, deadline_s)
                if remaining_s > 0:
                    continue  # it went on to another item in the meantime
                busy = position >= 0 and self._used_s() > _BUSY_SHARE * deadline_s
                await self.kill()
                at = _blamed(position, len(grades), len(items))
                return ChunkResult(grades, Fault(at, "timeout", _overrun(position, deadline_s), busy), 0.0)
            if data is None:
                reason = await self._post_mortem()
                at = _blamed(self._progress[0], len(grades), len(items))
                return ChunkResult(grades, Fault(at, "crash", reason), 0.0)
            reply: Reply = decode_reply(data)
            grades.extend(reply.grades)
            if reply.done:
                self._retired = reply.retire
                return ChunkResult(grades, None, reply.seconds)

    def _standing(self, sent_ns: int, deadline_s: float) -> tuple[int, float]:
        """(position or phase, seconds left for it), both of one moment."""
        while True:
            since = self._progress[1]
            position = self._progress[0]
            if self._progress[1] == since:
                break
        limit_s = LOAD_LIMIT_S if position == LOADING else deadline_s
        return position, limit_s - (time.monotonic_ns() - max(since, sent_ns)) / 1e9

    def _used_s(self) -> float:
        """Processor seconds of the process since it began with what it is doing."""
        clock = ~self._progress[3] << 3 | _CPU_CLOCK
        with contextlib.suppress(OSError):  # the process is gone: it used none
            return (time.clock_gettime_ns(clock) - self._progress[2]) / 1e9
        return 0.0

    async def _post_mortem(self) -> str:
        """How the process ended, once it has."""
        await self.kill(grace_s=1.0)
        return f"the grader process died ({self._ending()})"

    def _ending(self) -> str:
        code = self._process.returncode
        if code is None:
            return "still running"
        if code >= 0:
            return f"exit code {code}"
        return signal.Signals(-code).name

    async def kill(self, grace_s: float = 0.0) -> None:
        """End the process and all that it started, and reap it. `grace_s`: let it end by itself first."""
        self._retired = True
        self._writer.close()
        for _ in range(int(grace_s / _POLL_S)):
            if self._ended():
                break
            await asyncio.sleep(_POLL_S)
        if self._process.returncode is None:  # not reaped yet, so the number still means this process and its group
            await asyncio.to_thread(end_guarded, self._process)

    def _ended(self) -> bool:
        """Whether the process is over. Does not reap it, so that its group can still be named."""
        with contextlib.suppress(ChildProcessError):  # reaped already
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        return True


def _blamed(position: int, finished: int, total: int) -> int:
    """The item being worked on; the first unfinished one if the process had not begun or was importing for it."""
    return position if finished <= position < total else finished


def _overrun(position: int, deadline_s: float) -> str:
    if position == LOADING:
        return f"importing the grader took longer than {LOAD_LIMIT_S:g} s"
    return f"no grade within {deadline_s:g} s (--reward-deadline-s)"


def _spawn(memory_bytes: int) -> tuple[subprocess.Popen[bytes], socket.socket, mmap.mmap]:
    """Start the interpreter of a worker; our end of its socket and the shared progress."""
    ours, theirs = socket.socketpair()
    progress_fd = os.memfd_create("grader-progress")
    try:
        os.ftruncate(progress_fd, PROGRESS_BYTES)
        shared = mmap.mmap(progress_fd, PROGRESS_BYTES)
        numbers = (theirs.fileno(), progress_fd, os.getpid(), memory_bytes)
        threads = os.environ.get("OMP_NUM_THREADS", "1")
        environment = {"OMP_NUM_THREADS": threads, IN_WORKER_VARIABLE: "1"}
        process = start_guarded("stages.graders.processes.worker", numbers, numbers[:2], environment)
    finally:
        theirs.close()
        os.close(progress_fd)
    return process, ours, shared
