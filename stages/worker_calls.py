"""Calls into a worker process, seen from inside it; stages/worker_process.py is the other end.

A frame is its length (4 bytes, little-endian) and msgpack. In: [number, call] begins a call, [number, nil] cancels it.
Out: [number, kind, value] is the end of a call, and before all others [-1, "ok", value] or [-1, "failed", reason]: the
worker serves, or cannot. Kinds: "ok", "failed" and what a handler raises as `Refusal`.

Calls run side by side on one event loop, which is this process's own: code that blocks it keeps nobody waiting but its
own callers, and these end the process.

Invariants: each call has one answer, whatever its code does (CancelledError and SystemExit are answers too); an answer
is bounded; the process dies with its parent, and what it started dies with it; what it prints is error output. Nothing
but msgspec and the standard library is imported, for the interpreter may be one that has only those.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from stages.process_guard import become_guarded

READY: Final = -1
ANSWER_BYTES: Final = 16 << 20
NIL: Final = b"\xc0"
OUT_OF_MEMORY: Final = 86  # exit status of a worker whose code wants more memory than it may have

Handler = Callable[[msgspec.Raw], Awaitable[Any]]


class Refusal(Exception):
    """What a handler raises to end its call with a kind of its own."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


def become_worker(socket_fd: int, parent: int, memory_bytes: int = 0) -> socket.socket:
    """Make this process a worker of `parent`; the socket to serve. 0 bytes: as many as there are."""
    become_guarded(parent)
    os.dup2(2, 1)
    os.set_inheritable(socket_fd, False)  # what a worker starts must not keep the socket open
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    return socket.socket(fileno=socket_fd)


def serve(link: socket.socket, prepare: Callable[[], tuple[Handler, object]]) -> None:
    """Serve until the socket closes. Does not return. `prepare` gives the handler, and what to say of it."""
    try:
        handler, value = prepare()
    except BaseException as error:  # an import is somebody's program: whatever it raises is the reason
        link.sendall(_frame(READY, "failed", f"{type(error).__name__}: {error}"))
        os._exit(1)
    asyncio.run(_serve(link, handler, value))


async def _serve(link: socket.socket, handler: Handler, value: object) -> None:
    """Waits for calls; ends the process when the stage closes its end, whatever is still running."""
    reader, writer = await asyncio.open_connection(sock=link)
    writer.write(_frame(READY, "ok", value))
    running: dict[int, asyncio.Task[None]] = {}
    async with asyncio.TaskGroup() as tasks:
        while head := await reader.read(4):
            try:
                length = int.from_bytes(head + await reader.readexactly(4 - len(head)), "little")
                body = await reader.readexactly(length)
            except asyncio.IncompleteReadError:
                break
            number, call = msgspec.msgpack.decode(body, type=tuple[int, msgspec.Raw])
            if bytes(call) != NIL:
                running[number] = tasks.create_task(_answer(writer, handler, number, call))
            elif (task := running.pop(number, None)) is not None:
                task.cancel()
            running = {number: task for number, task in running.items() if not task.done()}
        os._exit(0)


async def _answer(writer: asyncio.StreamWriter, handler: Handler, number: int, call: msgspec.Raw) -> None:
    try:
        frame = _frame(number, "ok", await handler(call))
    except Refusal as error:
        frame = _frame(number, error.kind, str(error))
    except MemoryError:
        os._exit(OUT_OF_MEMORY)  # nothing can be relied on any more
    except BaseException as error:  # somebody's program: the caller learns what it raised
        frame = _frame(number, "failed", f"{type(error).__name__}: {error}")
    writer.write(frame)


def _frame(number: int, kind: str, value: object) -> bytes:
    body = msgspec.msgpack.encode((number, kind, value))
    if len(body) > ANSWER_BYTES:
        words = f"the answer has {len(body)} bytes, but must not have more than {ANSWER_BYTES}"
        body = msgspec.msgpack.encode((number, "failed", words))
    return len(body).to_bytes(4, "little") + body
