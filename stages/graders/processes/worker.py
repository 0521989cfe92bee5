"""A grader process: `python -m stages.graders.processes.worker SOCKET_FD PROGRESS_FD PARENT_PID MEMORY_BYTES`.

It grades chunks in order, says in shared memory what it is working on, and sends finished grades along when some time
has passed. It has no deadline of its own: the pool kills it.

Invariants: it dies with its parent, also in the middle of a grader, and when the socket closes; what graders started
dies with it, daemons included (`process_guard`: the process that the pool started stays behind as the guard of the one
that grades); what graders print goes to the error output; its address space is limited.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import socket
import sys
import time

from stages.graders.errors import UnknownGraderError
from stages.graders.grade import Grade, GradeRequest
from stages.graders.jail.lockdown import bound
from stages.graders.processes.frames import IDLE, LENGTH, LOADING, PROGRESS_BYTES, Reply, decode_work, frame
from stages.graders.registry import find_grader, grade_request
from stages.process_guard import become_guarded

_FLUSH_NS = 5_000_000


def main(arguments: list[str]) -> int:
    """Serve until the socket closes. Returns the exit status."""
    socket_fd, progress_fd, parent, memory_bytes = (int(argument) for argument in arguments)
    become_guarded(parent)
    if memory_bytes:
        bound(resource.RLIMIT_AS, memory_bytes)
    os.dup2(2, 1)
    for descriptor in (socket_fd, progress_fd):
        os.set_inheritable(descriptor, False)  # what a grader starts must not keep the socket open
    with socket.socket(fileno=socket_fd) as link, mmap.mmap(progress_fd, PROGRESS_BYTES) as shared:
        os.register_at_fork(after_in_child=link.close)
        _Server(link, memoryview(shared).cast("q")).run()
    return 0


class _Server:
    def __init__(self, link: socket.socket, progress: memoryview[int]) -> None:
        self._link = link
        self._input = open(link.fileno(), "rb", closefd=False)  # noqa: SIM115  (as long as the process)
        self._progress = progress
        self._known: set[str] = set()

    def run(self) -> None:
        """Waits for a frame; ends when the pool closes its end or a grader exhausted the memory."""
        self._progress[3] = os.getpid()
        self._enter(IDLE)
        self._link.sendall(LENGTH.pack(0))
        retired = False
        while not retired and (data := self._receive()) is not None:
            retired = self._grade(decode_work(data))
            self._enter(IDLE)
        self._progress.release()

    def _grade(self, items: list[GradeRequest]) -> bool:
        """Grade a chunk; True if this process should not be used any longer."""
        began = flushed = time.monotonic_ns()
        done: list[Grade] = []
        retire = False
        for position, item in enumerate(items):
            if item.grader not in self._known:
                self._load(item.grader)
            now = self._enter(position)
            if done and now - flushed > _FLUSH_NS:
                self._send(Reply(done, done=False))
                done, flushed = [], now
            grade = grade_request(item)
            done.append(grade)
            if grade.error is not None and grade.error.startswith("MemoryError"):
                retire = True  # what the grader left behind would fail the items after it
                break
        self._send(Reply(done, True, retire, (time.monotonic_ns() - began) / 1e9))
        return retire

    def _load(self, grader: str) -> None:
        """Import a grader outside of its first item's deadline; a failure shows when the item is graded."""
        self._enter(LOADING)
        with contextlib.suppress(UnknownGraderError):
            prepare = find_grader(grader).prepare
            if prepare is not None:
                prepare()
        self._known.add(grader)

    def _enter(self, position: int) -> int:
        now = time.monotonic_ns()
        self._progress[2] = time.process_time_ns()
        self._progress[1] = now
        self._progress[0] = position
        return now

    def _send(self, reply: Reply) -> None:
        self._link.sendall(frame(reply))

    def _receive(self) -> bytes | None:
        """The next frame; None once the pool has closed its end, or was killed."""
        try:
            header = self._input.read(LENGTH.size)
            size = LENGTH.unpack(header)[0] if len(header) == LENGTH.size else 0
            data = self._input.read(size)
        except ConnectionResetError:
            return None
        return data if size and len(data) == size else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
