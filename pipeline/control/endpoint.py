"""The control endpoint of a run: a unix socket in its private directory, one request and one reply per connection.

Request and reply are one line of JSON each. A request names one command and carries the token of the run. A reply says
`ok`, or why nothing was done. `control.json` in the run directory names the socket and holds a token made for this run.
Both are for the owner alone (mode 0600, the socket's directory 0700). Another process of the same user that does not
know the run directory cannot guess the token.

Invariants: a request is bounded in size and time, and so are the connections at a time, so that no peer holds up the
controller's loop; the token is checked before the command is decoded; an error in a command is its reply and never ends
the run; the file is removed when the run has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from pipeline.control.advice import Advice
from pipeline.facts.stats import Changed, RunSnapshot

CONTROL_FILE: Final = "control.json"  # in the run directory, for its owner alone: a `ControlAddress`
MOST_BYTES: Final = 64 << 10  # of a request


class ControlAddress(Struct, frozen=True):
    """The socket of a run, and its token."""

    socket: str
    token: str


class Status(Struct, frozen=True, tag="status"):
    """What the run does now."""


class Scale(Struct, frozen=True, tag="scale"):
    counts: dict[str, int]


class Pause(Struct, frozen=True, tag="pause"):
    """Admit no new group."""


class Resume(Struct, frozen=True, tag="resume"):
    """Admit new groups again."""


class Drain(Struct, frozen=True, tag="drain"):
    """Finish the groups in flight and end."""


class Save(Struct, frozen=True, tag="save"):
    """Write a checkpoint after the step in training."""


class Set(Struct, frozen=True, tag="set"):
    changes: dict[str, str]


class Rollback(Struct, frozen=True, tag="rollback"):
    """Go on with model and optimizer of the checkpoint of this step."""

    step: int


class Kill(Struct, frozen=True, tag="kill"):
    """End the process of a replica or an engine at once, to see the run go on; for runs with --fault-inject."""

    replica: str


Command = Status | Scale | Pause | Resume | Drain | Save | Set | Rollback | Kill


class Request(Struct, frozen=True):
    """The command is decoded once the token was checked."""

    token: str
    command: msgspec.Raw  # a `Command`


class EngineStatus(Struct, frozen=True):
    """One engine that generates, or that serves evaluations alone."""

    name: str
    state: str  # starting, loading, serving, updating, away, leaving, left
    version: int | None  # of its weights
    running: int  # requests, as it last reported
    waiting: int
    limit: int  # samples that may be in flight there
    idle: float | None  # share of the last seconds


class QueueStatus(Struct, frozen=True):
    """One stream: waiting messages, and messages that replicas hold."""

    stream: str
    queued: int
    leased: int
    consumers: int


class RunStatus(Struct, frozen=True):
    """Everything that `status` shows. A running run sends all of it; files of a finished run give the first six."""

    run: str  # directory
    state: str  # starting, running, paused, stopping; of runs that have ended: pipeline/control/client.py
    snapshot: RunSnapshot | None = None
    exit_reason: str | None = None
    step: int = 0  # the last one
    checkpoint: str | None = None  # the newest
    resume: str | None = None  # the command that continues the run, where there is something to continue
    engines: tuple[EngineStatus, ...] = ()
    queues: tuple[QueueStatus, ...] = ()
    replicas: dict[str, int] = {}  # by stage, as scaled; more may still be ending
    changes: tuple[Changed, ...] = ()
    advice: Advice | None = None  # None until enough was measured
    waits: str = ""  # what waits for what, where nothing was trained for longer than --stall-notice-s


class Reply(Struct, frozen=True):
    """`lines`: what was done, or why nothing was done, for people."""

    ok: bool
    lines: tuple[str, ...] = ()
    status: RunStatus | None = None


log = logging.getLogger("sluice.control")

SOCKET: Final = "ask.sock"  # no longer than the other names there: a path of a socket has at most 107 bytes
READ_S: Final = 5.0
ANSWER_S: Final = 20.0
MOST_CONNECTIONS: Final = 8
REFUSED: Final = Reply(False, ("the token is not that of this run",))

Answer = Callable[[Command], Awaitable[Reply]]


@contextlib.asynccontextmanager
async def endpoint(run_dir: Path, sockets: Path, answer: Answer) -> AsyncIterator[None]:
    """Answer commands for the time of the block."""
    path, file = sockets / SOCKET, run_dir / CONTROL_FILE
    address = ControlAddress(str(path), secrets.token_urlsafe(32))
    control = ControlServer(address.token, answer)
    before = os.umask(0o177)
    try:
        server = await asyncio.start_unix_server(control.serve, path, limit=MOST_BYTES)
    finally:
        os.umask(before)
    try:
        write_private(file, msgspec.json.encode(address))
        yield
    finally:
        file.unlink(missing_ok=True)
        server.close()


def write_private(path: Path, content: bytes) -> None:
    """Write a file for its owner alone, from its first moment."""
    draft = path.with_name(f".{path.name}.draft")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    draft.replace(path)


class ControlServer:
    def __init__(self, token: str, answer: Answer) -> None:
        self._token, self._answer = token, answer
        self._connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection. Waits for its line, then for the command; each within its time."""
        self._connections += 1
        try:
            reply = await self._reply(reader)
            with contextlib.suppress(OSError, TimeoutError):  # the client has gone
                async with asyncio.timeout(READ_S):
                    writer.write(msgspec.json.encode(reply) + b"\n")
                    await writer.drain()
        finally:
            self._connections -= 1
            writer.close()

    async def _reply(self, reader: asyncio.StreamReader) -> Reply:
        if self._connections > MOST_CONNECTIONS:
            return Reply(False, (f"{MOST_CONNECTIONS} requests are being answered; try again",))
        try:
            async with asyncio.timeout(READ_S):
                line = await reader.readuntil(b"\n")
        except asyncio.LimitOverrunError:
            return Reply(False, (f"a request has at most {MOST_BYTES} bytes",))
        except asyncio.IncompleteReadError:
            return Reply(False, ("a request is one line of JSON",))
        except TimeoutError:
            return Reply(False, (f"no request came within {READ_S:g} s",))
        except OSError as error:
            return Reply(False, (str(error),))
        return await self._answered(line)

    async def _answered(self, line: bytes) -> Reply:
        try:
            request = msgspec.json.decode(line, type=Request)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return Reply(False, ("a request is one line of JSON with token and command",))
        if not hmac.compare_digest(request.token.encode(), self._token.encode()):
            log.warning("a request with a wrong token was refused")
            return REFUSED
        try:
            command: Command = msgspec.json.decode(request.command, type=Command)
        except (msgspec.MsgspecError, RecursionError) as error:
            return Reply(False, (f"the command cannot be read: {error}",))
        try:
            async with asyncio.timeout(ANSWER_S):
                return await self._answer(command)
        except TimeoutError:
            return Reply(False, (f"the command took longer than {ANSWER_S:g} s; status shows whether it was done",))
        except Exception as error:  # of the command, which must not end the run
            log.exception("the command %s failed", type(command).__name__.lower())
            return Reply(False, (f"{type(error).__name__}: {error}",))
