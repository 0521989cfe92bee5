"""A tool of the user as the stage sees it: its process, started at the first call and again after it was lost.

Invariants: a call that is cancelled, by its deadline or by the end of the stage, waits for nothing; a tool that does
not stop when it is told to, or blocks its process, loses that process, and the calls that it had with it; the next call
starts another one.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import subprocess

from stages.process_guard import end_guarded, start_guarded
from stages.tools.errors import ToolCallError
from stages.tools.tool import Arguments, Schema

_LOAD_LIMIT_S = 120.0  # to start Python and to import the tool's module
_CANCEL_S = 2.0  # from telling a call to stop until its process is killed
_READY = -1
_ENDED = "the tool's process ended; this call or another one crashed or blocked it"


class _Link(asyncio.Protocol):
    """Our end of the socket: hands each answer to the call that waits for it."""

    def __init__(self) -> None:
        self.waiting: dict[int, asyncio.Future[tuple[bool, str]]] = {}
        self.open = True
        self._received = bytearray()

    def expect(self, number: int) -> asyncio.Future[tuple[bool, str]]:
        self.waiting[number] = asyncio.get_running_loop().create_future()
        return self.waiting[number]

    def data_received(self, data: bytes) -> None:
        self._received += data
        if b"\n" not in data:
            return
        *lines, self._received = self._received.split(b"\n")
        for line in lines:
            number, good, text = json.loads(line)
            future = self.waiting.pop(number, None)
            if future is not None and not future.done():
                future.set_result((good, text))

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        for future in self.waiting.values():
            if not future.done():
                future.set_result((False, _ENDED))
        self.waiting.clear()


class ToolProcess:
    """A tool by its import path. Use `ready` before `call`, and `close` at the end."""

    def __init__(self, path: str, name: str, schema: Schema) -> None:
        self.name, self.schema = name, schema
        self._path = path
        self._numbers = itertools.count()
        self._starting = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._link: _Link | None = None
        self._transport: asyncio.Transport | None = None

    async def ready(self) -> None:
        """Waits until the process serves, and starts it where there is none. Raises ToolCallError."""
        async with self._starting:
            if self._link is None or not self._link.open:
                await self.close()
                await self._start()

    async def call(self, arguments: Arguments) -> str:
        """The answer to a call. Raises ToolCallError. Cancelled, it tells the tool to stop."""
        if self._link is None or self._transport is None:
            raise ToolCallError(_ENDED)
        link, transport, number = self._link, self._transport, next(self._numbers)
        answer = link.expect(number)
        transport.write(json.dumps((number, arguments)).encode() + b"\n")
        try:
            good, text = await answer
        except asyncio.CancelledError:
            transport.write(json.dumps((number,)).encode() + b"\n")
            asyncio.get_running_loop().call_later(_CANCEL_S, self._look, link, number)
            raise
        if not good:
            raise ToolCallError(text)
        return text

    async def close(self) -> None:
        """End the process and what the tool started."""
        if self._transport is not None:
            self._transport.close()
        if self._process is not None:
            await asyncio.to_thread(end_guarded, self._process)
        self._process = self._link = self._transport = None

    def _look(self, link: _Link, number: int) -> None:
        """A call that has not stopped by now never will: its process is killed, and `ready` starts another one."""
        if number in link.waiting and link is self._link and self._process is not None:
            self._process.terminate()

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            descriptor = theirs.fileno()
            arguments = (descriptor, os.getpid(), self._path)
            self._process = start_guarded("stages.tools.worker", arguments, (descriptor,), {})
        link = _Link()
        ready = link.expect(_READY)
        try:
            self._transport, self._link = await asyncio.get_running_loop().create_connection(lambda: link, sock=ours)
            async with asyncio.timeout(_LOAD_LIMIT_S):
                good, _ = await ready
        except TimeoutError:
            good = False
        except BaseException:
            await self.close()
            raise
        if not good:
            await self.close()
            raise ToolCallError("the tool's process does not start; its error output says why")
