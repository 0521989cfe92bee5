"""A worker process as its owner sees it: started when it is needed, restarted after a loss, called with deadlines.

`stages/workers/serve.py` describes the protocol and answers the calls.

Invariants: a cancelled call (a deadline, or the end of the stage) returns at once; if its code ignores the cancellation
or blocks the process, the process is killed with all calls in it; the next `ready` starts a new process. Prints of a
worker are passed on, up to PRINTED_BYTES for each process.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import msgspec

from stages.workers.guard import end_guarded, start_guarded
from stages.workers.serve import ANSWER_BYTES, OUT_OF_MEMORY, READY

LOAD_LIMIT_S = 120.0  # to start Python and to import the user's module
_CANCEL_S = 2.0  # from the cancellation of a call until its process is killed
_END_LOOK_S = 2.0
_CPU_CLOCK = 2  # the kernel makes the clock id of a process of its number and this (clock_getcpuclockid(3))
PRINTED_BYTES: Final = 1 << 20


class WorkerLost(Exception):
    """The process ended, or does not start. `ending`: `exit status 7`, `signal SIGSEGV`, or "" if unknown."""

    def __init__(self, reason: str, ending: str = "") -> None:
        super().__init__(reason)
        self.ending = ending


class CallFailed(Exception):
    """The call ended without a value; `kind` is "failed", or the kind of the worker's `Refusal`."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


_Answer = tuple[int, str, msgspec.Raw]


class _Link(asyncio.Protocol):
    """The owner's end of the socket: hands each answer to its call."""

    def __init__(self) -> None:
        self.waiting: dict[int, asyncio.Future[_Answer | None]] = {}
        self.open = True
        self._received = bytearray()

    def expect(self, number: int) -> asyncio.Future[_Answer | None]:
        self.waiting[number] = asyncio.get_running_loop().create_future()
        return self.waiting[number]

    def data_received(self, data: bytes) -> None:
        self._received += data
        while len(self._received) >= 4:
            end = 4 + int.from_bytes(self._received[:4], "little")
            if end > ANSWER_BYTES + 4096:  # this is no answer of a worker
                self.connection_lost(None)
                return
            if len(self._received) < end:
                return
            answer = msgspec.msgpack.decode(bytes(self._received[4:end]), type=_Answer)
            del self._received[:end]
            future = self.waiting.pop(answer[0], None)
            if future is not None and not future.done():
                future.set_result(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        for future in self.waiting.values():
            if not future.done():
                future.set_result(None)
        self.waiting.clear()


class _Printed(asyncio.Protocol):
    """Passes the prints of a worker on to this process's error output, up to a limit."""

    def __init__(self) -> None:
        self.remaining = PRINTED_BYTES

    def data_received(self, data: bytes) -> None:
        if self.remaining > 0:
            os.write(2, data[: self.remaining])
            if len(data) >= self.remaining:
                os.write(2, b"\n[what this worker process prints from here on is dropped]\n")
        self.remaining -= len(data)


class WorkerProcess:
    """`python -m module SOCKET_FD PARENT_PID`, with its arguments on stdin.

    Call `ready` before `call`, and `close` at the end.
    """

    def __init__(self, module: str, arguments: Sequence[object], *, python: str | None = None) -> None:
        self.incarnation = 0  # rises with each start of a process
        self.greeting = msgspec.Raw(b"\xc0")  # the value that the worker's `prepare` returned
        self._module, self._arguments, self._python = module, tuple(arguments), python
        self._numbers = itertools.count()
        self._starting = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._link: _Link | None = None
        self._transport: asyncio.Transport | None = None
        self._printed: asyncio.BaseTransport | None = None
        self._serving = 0  # number of the process that runs the calls, below its guard

    @property
    def open(self) -> bool:
        """Whether a process serves."""
        return self._link is not None and self._link.open

    @property
    def pid(self) -> int | None:
        """Number of the guard of the process; None without a process."""
        return None if self._process is None else self._process.pid

    def cpu_s(self) -> float:
        """Processor seconds that the process has used; 0 if it has ended."""
        with suppress(OSError):
            return time.clock_gettime(~self._serving << 3 | _CPU_CLOCK)
        return 0.0

    async def ready(self) -> None:
        """Waits until a process serves; starts a process if none does. Raises WorkerLost."""
        async with self._starting:
            if not self.open:
                await self.close()
                await self._start()

    async def call(self, call: object) -> msgspec.Raw:
        """The value of a call. Raises CallFailed, WorkerLost. If cancelled, cancels the call in the worker too."""
        link, number = self._link, next(self._numbers)
        if link is None or not link.open:
            raise await self._loss()
        self._send(number, call)
        future = link.expect(number)
        try:
            answer = await future
        except asyncio.CancelledError:
            if link.open:
                self._send(number, None)
                asyncio.get_running_loop().call_later(_CANCEL_S, self._kill_if_running, link, number)
            raise
        if answer is None:
            raise await self._loss()
        _, kind, value = answer
        if kind != "ok":
            raise CallFailed(kind, msgspec.msgpack.decode(value, type=str))
        return value

    async def close(self) -> None:
        """End the process and everything it started."""
        for transport in (self._transport, self._printed):
            if transport is not None:
                transport.close()
        process, self._process, self._link, self._transport, self._printed = self._process, None, None, None, None
        if process is not None:
            await asyncio.to_thread(end_guarded, process)

    def _send(self, number: int, call: object) -> None:
        body = msgspec.msgpack.encode((number, call))
        if self._transport is None:
            raise WorkerLost("its worker process has ended")
        self._transport.write(len(body).to_bytes(4, "little") + body)

    def _kill_if_running(self, link: _Link, number: int) -> None:
        """Kill the process of a cancelled call that has not stopped by now. `ready` starts a new process."""
        if number in link.waiting and link is self._link and self._process is not None:
            self._process.terminate()

    async def _loss(self) -> WorkerLost:
        """The error of a lost process. Waits a short time for its exit status."""
        process = self._process
        if process is None:
            return WorkerLost("its worker process has ended")
        try:
            code = await asyncio.to_thread(process.wait, _END_LOOK_S)
        except subprocess.TimeoutExpired:
            return WorkerLost("its worker process ended")
        if code == OUT_OF_MEMORY:
            ending = f"exit status {code}, out of memory"
            reason = "its worker process ended: this call or another one wanted more memory than it may have"
            return WorkerLost(reason, ending)
        ending = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        reason = f"its worker process ended with {ending}; this call or another one crashed or blocked it"
        return WorkerLost(reason, ending)

    async def _start(self) -> None:
        loop, link = asyncio.get_running_loop(), _Link()
        owner_end, worker_end = socket.socketpair()
        with worker_end:
            descriptor = worker_end.fileno()
            self._process = start_guarded(self._module, self._arguments, descriptor, python=self._python)
        ready = link.expect(READY)
        try:
            self._transport, _ = await loop.create_connection(lambda: link, sock=owner_end)
            self._printed, _ = await loop.connect_read_pipe(_Printed, self._process.stderr)
            async with asyncio.timeout(LOAD_LIMIT_S):
                answer = await ready
        except TimeoutError:
            await self.close()
            raise WorkerLost(f"its worker process does not serve within {LOAD_LIMIT_S:g} s") from None
        except BaseException:
            await self.close()
            raise
        if answer is None or answer[1] != "ok":
            ending = (await self._loss()).ending
            reason = "the error output says why" if answer is None else msgspec.msgpack.decode(answer[2], type=str)
            await self.close()
            raise WorkerLost(f"its worker process does not start: {reason}", ending)
        # The incarnation changes together with the link: an owner of state in the lost process must not mistake this
        # process for the lost one while it starts.
        self._serving, self.greeting = msgspec.msgpack.decode(answer[2], type=tuple[int, msgspec.Raw])
        self.incarnation, self._link = self.incarnation + 1, link
