"""`python launch.py view RUN`: the run in a browser, served to this machine alone by a process of its own that reads.

Invariants: nothing but the page itself is answered without the token; only the token of `--steer` changes a run,
through its control socket; requests through another name of this machine, or from another page, are refused; files and
the socket are read off the event loop, so that one slow disk holds up no other request.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hmac
import secrets
import signal
import sys
import webbrowser
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from aiohttp import web
from msgspec import Struct

from configs.layers import ConfigError
from pipeline.control.client import ask
from pipeline.control.endpoint import Command, Status
from pipeline.errors import Refused, UsageError
from pipeline.view.documents import RunDocuments
from pipeline.view.rollouts import Query

HOST: Final = "127.0.0.1"
PAGE: Final = Path(__file__).resolve().parent / "page"
TYPES: Final = {
    ".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml", ".png": "image/png"
}  # fmt: skip
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
MOST_BYTES: Final = 64 << 10  # of a request

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
T = TypeVar("T")


def main(argv: Sequence[str]) -> int:
    """Serve until Ctrl-C; returns the exit code. Raises UsageError."""
    parser = argparse.ArgumentParser(
        prog="launch.py view", description="Show a run in a browser, while it runs or later."
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="run directory")
    parser.add_argument("--port", type=int, default=0, help="on 127.0.0.1; 0 = a free one")
    parser.add_argument(
        "--steer", action="store_true", help="print a second address, from which the run can be changed"
    )
    parser.add_argument("--open", action="store_true", help="open it in the browser of this machine")
    given = parser.parse_args(argv)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(given))
    return 0


async def _serve(given: argparse.Namespace) -> None:
    looks, steers = secrets.token_urlsafe(24), secrets.token_urlsafe(24) if given.steer else ""
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    documents = await asyncio.to_thread(RunDocuments, given.run)
    async with serving(documents, given.port, looks, steers) as port:
        address = f"http://{HOST}:{port}/#token="
        lines = [f"{address}{looks}", *([f"{address}{steers}  (may change the run)"] if steers else [])]
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()
        if given.open:
            await asyncio.to_thread(webbrowser.open, f"{address}{steers or looks}")
        await ended.wait()


@contextlib.asynccontextmanager
async def serving(documents: RunDocuments, port: int, looks: str, steers: str = "") -> AsyncIterator[int]:
    """Serve for the time of the block; the port. `looks`, `steers`: tokens, an empty one admits no request.
    Raises UsageError."""
    app = web.Application(client_max_size=MOST_BYTES, middlewares=[_guard(looks, steers)])
    app.add_routes(_routes(documents, steers))
    app.on_response_prepare.append(_with_headers)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, HOST, port).start()
        except (OSError, OverflowError) as error:
            raise UsageError(f"--port {port} cannot be used on {HOST}: {error}; choose another one, or 0") from None
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()


async def _with_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(HEADERS)


def _guard(looks: str, steers: str) -> Any:
    """The middleware that refuses requests, and says in words why one failed."""

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        port = request.transport.get_extra_info("sockname")[1] if request.transport is not None else 0
        if request.host not in (f"{HOST}:{port}", f"localhost:{port}"):
            return _refused(403, f"ask for http://{HOST}:{port}")
        if request.headers.get("Origin", own := f"http://{request.host}") != own:
            return _refused(403, "another page may not ask")
        if request.path.startswith("/api/") and not (_bears(request, looks) or _bears(request, steers)):
            return _refused(401, "the token is missing or wrong; open the address that view printed")
        try:
            return await handler(request)
        except web.HTTPException as error:
            return _refused(error.status, error.text or error.reason)
        except (UsageError, ConfigError, msgspec.MsgspecError) as error:
            return _refused(400, str(error))

    return guarded


def _bears(request: web.Request, token: str) -> bool:
    given = request.headers.get("Authorization", "").removeprefix("Bearer ")
    return bool(token) and hmac.compare_digest(given.encode(errors="replace"), token.encode())


def _refused(status: int, why: str) -> web.Response:
    return _answer({"error": why}, status)


def _answer(document: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(document), status=status, content_type="application/json")


class _Nothing(Struct):
    pass


class _After(Struct):
    after: int = -1


class _Window(Struct):
    seconds: float = 60.0
    until: float | None = None


class _Key(Struct):
    key: str


class _Lines(Struct):
    after: str = ""
    text: str = ""


class _Steer(Struct):
    command: str
    arguments: dict[str, int | float | str] = {}


def _routes(documents: RunDocuments, steers: str) -> list[web.RouteDef]:
    def read(kind: type[T], work: Callable[[T, bool], object]) -> Handler:
        """The handler of a document: its parameters are `kind`, of which empty ones count as left out."""

        async def answer(request: web.Request) -> web.Response:
            given = msgspec.convert({name: text for name, text in request.query.items() if text}, kind, strict=False)
            found = await asyncio.to_thread(work, given, _bears(request, steers))
            return _refused(404, "there is no such rollout, or not any more") if found is None else _answer(found)

        return answer

    async def steer(request: web.Request) -> web.Response:
        if not _bears(request, steers):
            return _refused(403, "this address may only look; start view with --steer, and open its second address")
        if request.content_type != "application/json":
            return _refused(415, "a command is application/json")
        command = _command(msgspec.json.decode(await request.read(), type=_Steer))
        ok, lines = await asyncio.to_thread(_run_command, documents.path, command)
        return _answer({"ok": ok, "lines": lines})

    return [
        web.get("/api/run", read(_Nothing, lambda _, may_steer: documents.run(may_steer=may_steer))),
        web.get("/api/metrics", read(_After, lambda given, _: documents.metrics(given.after))),
        web.get("/api/lanes", read(_Window, lambda given, _: documents.lanes(given.seconds, given.until))),
        web.get("/api/rollouts", read(Query, lambda given, _: documents.rollouts(given))),
        web.get("/api/rollout", read(_Key, lambda given, _: documents.rollout(given.key))),
        web.get("/api/logs", read(_Lines, lambda given, _: documents.logs(given.after, given.text))),
        web.post("/api/steer", steer),
        web.get("/{file:.*}", _file),
    ]


def _command(wanted: _Steer) -> Command:
    """A command of the control socket. `scale` has replicas by stage, `set` values by setting. Raises
    ValidationError."""
    fields: dict[str, object] = dict(wanted.arguments)
    if wanted.command == "scale":
        fields = {"counts": fields}
    elif wanted.command == "set":
        fields = {"changes": {name: str(value) for name, value in fields.items()}}
    command: Command = msgspec.convert({**fields, "type": wanted.command}, Command)
    if isinstance(command, Status):
        raise msgspec.ValidationError("status changes nothing; ask /api/run")
    return command


def _run_command(run: Path, command: Command) -> tuple[bool, Sequence[str]]:
    """Send a command; whether it was done, and what the run says of it."""
    try:
        reply = ask(run, command)
    except UsageError as error:
        return False, error.faults if isinstance(error, Refused) else (str(error),)
    return reply.ok, reply.lines


async def _file(request: web.Request) -> web.StreamResponse:
    """A file of the page."""
    names = {str(path.relative_to(PAGE)): path for path in await asyncio.to_thread(lambda: list(PAGE.rglob("*.*")))}
    path = names.get(request.match_info["file"] or "index.html")
    kind = TYPES.get(path.suffix) if path is not None else None
    if path is None or kind is None:
        return _refused(404, "the page has no such file")
    body = await asyncio.to_thread(path.read_bytes)
    return web.Response(body=body, content_type=kind, charset="utf-8" if kind.startswith("text/") else None)
