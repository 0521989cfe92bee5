"""A worker process of a stage: started when it is needed and again after it was lost; calls run in it side by side.

The module that it runs calls `stages.worker_calls`, where the protocol is told.

Invariants: a call that is cancelled, by its deadline or by the end of the stage, waits for nothing; code that does not
stop when it is told to, or blocks its process, loses that process, and the calls that were in it; the next `ready`
starts another one. What a worker prints is passed on up to PRINTED_BYTES.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from typing import Final

import msgspec

from stages.process_guard import end_guarded, start_guarded
from stages.worker_calls import ANSWER_BYTES, OUT_OF_MEMORY, READY

_LOAD_LIMIT_S = 120.0  # to start Python and to import the user's module
_CANCEL_S = 2.0  # from telling a call to stop until its process is killed
_END_LOOK_S = 2.0
PRINTED_BYTES: Final = 1 << 20


class WorkerLost(Exception):
    """The process ended, or does not start; the message says how."""


class CallFailed(Exception):
    """The call ended without a value; `kind` is the worker's word for it."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


_Answer = tuple[int, str, msgspec.Raw]


class _Link(asyncio.Protocol):
    """Our end of the socket: hands each answer to the call that waits for it."""

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
            if end > ANSWER_BYTES + 4096:  # what a worker sends that is no worker any more
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
    """What a worker prints, passed on to our error output until it is too much."""

    def __init__(self) -> None:
        self.left = PRINTED_BYTES

    def data_received(self, data: bytes) -> None:
        if self.left > 0:
            os.write(2, data[: self.left])
            if len(data) >= self.left:
                os.write(2, b"\n[what this worker process prints from here on is dropped]\n")
        self.left -= len(data)


class WorkerProcess:
    """`python -m module SOCKET_FD PARENT_PID ARGUMENTS...`. Use `ready` before `call`, and `close` at the end."""

    def __init__(self, module: str, arguments: Sequence[object], *, python: str | None = None) -> None:
        self.incarnation = 0  # rises when a process is started
        self.said = msgspec.Raw(b"\xc0")  # by the process that serves
        self._module, self._arguments, self._python = module, tuple(arguments), python
        self._numbers = itertools.count()
        self._starting = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._link: _Link | None = None
        self._transport: asyncio.Transport | None = None
        self._printed: asyncio.BaseTransport | None = None

    @property
    def open(self) -> bool:
        """Whether a process serves."""
        return self._link is not None and self._link.open

    @property
    def pid(self) -> int | None:
        """Of the guard of the process; None where there is none."""
        return None if self._process is None else self._process.pid

    async def ready(self) -> None:
        """Waits until a process serves, and starts it where there is none. Raises WorkerLost."""
        async with self._starting:
            if not self.open:
                await self.close()
                await self._start()

    async def call(self, call: object) -> msgspec.Raw:
        """The value of a call. Raises CallFailed, WorkerLost. Cancelled, it tells the worker to stop."""
        link, number = self._link, next(self._numbers)
        if link is None or not link.open:
            raise WorkerLost(await self._end())
        self._send(number, call)
        answer = link.expect(number)
        try:
            found = await answer
        except asyncio.CancelledError:
            if link.open:
                self._send(number, None)
                asyncio.get_running_loop().call_later(_CANCEL_S, self._look, link, number)
            raise
        if found is None:
            raise WorkerLost(await self._end())
        _, kind, value = found
        if kind != "ok":
            raise CallFailed(kind, msgspec.msgpack.decode(value, type=str))
        return value

    async def close(self) -> None:
        """End the process and what it started."""
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

    def _look(self, link: _Link, number: int) -> None:
        """A call that has not stopped by now never will: its process is killed, and `ready` starts another one."""
        if number in link.waiting and link is self._link and self._process is not None:
            self._process.terminate()

    async def _end(self) -> str:
        """How the process ended, as far as that is known soon."""
        process = self._process
        if process is None:
            return "its worker process has ended"
        try:
            code = await asyncio.to_thread(process.wait, _END_LOOK_S)
        except subprocess.TimeoutExpired:
            return "its worker process ended"
        if code == OUT_OF_MEMORY:
            return "its worker process ended: this call or another one wanted more memory than it may have"
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        return f"its worker process ended with {how}; this call or another one crashed or blocked it"

    async def _start(self) -> None:
        loop, link = asyncio.get_running_loop(), _Link()
        ours, theirs = socket.socketpair()
        with theirs:
            descriptor = theirs.fileno()
            arguments = (descriptor, os.getpid(), *self._arguments)
            self._process = start_guarded(
                self._module, arguments, (descriptor,), {}, python=self._python, stderr=subprocess.PIPE
            )
        ready = link.expect(READY)
        try:
            self._transport, _ = await loop.create_connection(lambda: link, sock=ours)
            self._printed, _ = await loop.connect_read_pipe(_Printed, self._process.stderr)
            async with asyncio.timeout(_LOAD_LIMIT_S):
                found = await ready
        except TimeoutError:
            await self.close()
            raise WorkerLost(f"its worker process does not serve within {_LOAD_LIMIT_S:g} s") from None
        except BaseException:
            await self.close()
            raise
        if found is None or found[1] != "ok":
            why = "the error output says why" if found is None else msgspec.msgpack.decode(found[2], type=str)
            await self.close()
            raise WorkerLost(f"its worker process does not start: {why}")
        # Open from here on, as another one than before: who has something in the one that was lost must not take it for
        # that one while it starts.
        self.incarnation, self.said, self._link = self.incarnation + 1, found[2], link
