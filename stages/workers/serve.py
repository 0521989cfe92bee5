"""Answers calls inside a worker process; `stages/workers/process.py` makes the calls.

A frame is its length (4 bytes, little-endian) and msgpack. In: [number, call] begins a call, [number, nil] cancels it.
Out: [-1, "ok", [pid, value]] when the worker serves, or [-1, "failed", reason] if it cannot; then [number, kind, value]
at the end of each call. Kinds: "ok", "failed", and the kind of a `Refusal` that a handler raises.

`serve` runs calls concurrently on an event loop. `serve_in_turn` runs them one after another without a loop, so a
handler may start a loop. Code that blocks its process delays only its own callers, who end the process.

Invariants: each call has one answer, whatever its code does (CancelledError and SystemExit are answers too); an answer
is bounded; the process dies with its parent, and everything it started dies with it; prints go to the error output.
Only msgspec and the standard library are imported, because a user's interpreter may have nothing else.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Final, NoReturn

import msgspec

from stages.workers.guard import become_guarded, bound

READY: Final = -1
ANSWER_BYTES: Final = 16 << 20
NIL: Final = b"\xc0"
OUT_OF_MEMORY: Final = 86  # exit status of a worker whose code wants more memory than it may have
_AGAIN_S = 0.05  # some libraries catch every exception: it is raised again until one gets through

Handler = Callable[[msgspec.Raw], Awaitable[Any]]
_Prepare = Callable[[], tuple[Callable[[msgspec.Raw], Any], object]]


class Refusal(Exception):
    """Raised by a handler to end its call with this kind."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


def become_worker(socket_fd: int, parent: int, memory_bytes: int = 0) -> socket.socket:
    """Make this process a worker of `parent`; returns the socket to serve. 0 bytes: no limit of memory."""
    become_guarded(parent)
    os.dup2(2, 1)
    os.set_inheritable(socket_fd, False)  # a program that a worker starts must not keep the socket open
    if memory_bytes:
        bound(resource.RLIMIT_DATA, memory_bytes)
    return socket.socket(fileno=socket_fd)


def serve(link: socket.socket, prepare: Callable[[], tuple[Handler, object]]) -> NoReturn:
    """Serve calls side by side until the socket closes. `prepare` returns the handler, and a value for the parent."""
    asyncio.run(_serve(link, _prepared(link, prepare)))
    os._exit(0)


def serve_in_turn(link: socket.socket, prepare: _Prepare) -> NoReturn:
    """Serve calls one after another until the socket closes; a call cannot be cancelled."""
    os.register_at_fork(after_in_child=link.close)
    handler = _prepared(link, prepare)
    with suppress(ConnectionError), link.makefile("rb") as frames:
        while head := frames.read(4):
            number, call = _decode(frames.read(int.from_bytes(head, "little")))
            if bytes(call) == NIL:
                continue
            try:
                frame = _frame(number, "ok", handler(call))
            except BaseException as error:  # the code is the user's: its exception is the answer
                frame = _failure(number, error)
            link.sendall(frame)
    os._exit(0)


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raise CpuLimitError in the body after so many seconds of processor time of this process.

    A busy machine takes nothing from this time. No limit outside of the main thread, where Python handles no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def over(_number: int, _frame: FrameType | None) -> None:
        raise CpuLimitError(f"{seconds:g} s of processor time are over")

    before = signal.signal(signal.SIGVTALRM, over)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds, _AGAIN_S)
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


class CpuLimitError(BaseException):
    """The time is over. Not an Exception, so that a library's `except Exception` lets it pass."""


def _prepared(link: socket.socket, prepare: _Prepare) -> Callable[[msgspec.Raw], Any]:
    """The handler, once the parent knows that this process serves; ends the process if it cannot."""
    try:
        handler, value = prepare()
    except BaseException as error:  # an import runs the user's code: its exception is the reason
        link.sendall(_frame(READY, "failed", f"{type(error).__name__}: {error}"))
        os._exit(1)
    link.sendall(_frame(READY, "ok", (os.getpid(), value)))
    return handler


async def _serve(link: socket.socket, handler: Handler) -> None:
    """Waits for calls; ends the process when the parent closes its end, whatever is still running."""
    reader, writer = await asyncio.open_connection(sock=link)
    running: dict[int, asyncio.Task[None]] = {}
    async with asyncio.TaskGroup() as tasks:
        while head := await reader.read(4):
            try:
                length = int.from_bytes(head + await reader.readexactly(4 - len(head)), "little")
                number, call = _decode(await reader.readexactly(length))
            except asyncio.IncompleteReadError:
                break
            if bytes(call) != NIL:
                running[number] = tasks.create_task(_answer(writer, handler, number, call))
            elif (task := running.pop(number, None)) is not None:
                task.cancel()
            running = {number: task for number, task in running.items() if not task.done()}
        os._exit(0)


async def _answer(writer: asyncio.StreamWriter, handler: Handler, number: int, call: msgspec.Raw) -> None:
    try:
        frame = _frame(number, "ok", await handler(call))
    except BaseException as error:  # the code is the user's: its exception is the answer
        frame = _failure(number, error)
    writer.write(frame)


def _decode(frame: bytes) -> tuple[int, msgspec.Raw]:
    return msgspec.msgpack.decode(frame, type=tuple[int, msgspec.Raw])


def _failure(number: int, error: BaseException) -> bytes:
    if isinstance(error, MemoryError):
        os._exit(OUT_OF_MEMORY)  # nothing can be relied on any more
    if isinstance(error, Refusal):
        return _frame(number, error.kind, str(error))
    return _frame(number, "failed", f"{type(error).__name__}: {error}".encode("utf-8", "replace").decode())


def _frame(number: int, kind: str, value: object) -> bytes:
    body = msgspec.msgpack.encode((number, kind, value))
    if len(body) > ANSWER_BYTES:
        words = f"the answer has {len(body)} bytes, but must not have more than {ANSWER_BYTES}"
        body = msgspec.msgpack.encode((number, "failed", words))
    return len(body).to_bytes(4, "little") + body
