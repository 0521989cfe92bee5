"""Starts an engine server: `EngineServer` inside a process, `python -m models.engines.serve` as a process of its own.

Invariants: the address is loopback by default; the ready file appears whole, and only when requests are
served; the process ends with its parent, ignores SIGINT (an interrupt is its supervisor's to handle), and on SIGTERM
ends cleanly; a crash of the engine ends it with status 1 and the reason on stderr.

The kernel ties "parent" to the thread that started the process (`prctl(2)`, PR_SET_PDEATHSIG): start servers from a
thread that lives as long as the servers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import errno
import gc
import ipaddress
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
from aiohttp import web

from configs.schema.rollout import EngineConfig
from models.disk import write_whole
from models.engines.access_token import read_token
from models.engines.core import Completion, EngineCore
from models.engines.protocol import DEFAULT_LABEL
from models.engines.server import EngineApp, Serving
from models.engines.text import TextCodec
from models.errors import EngineError, EngineStartError
from models.fault_injection import FaultPlan

logger = logging.getLogger(__name__)
_PR_SET_PDEATHSIG: Final = 1
_SWITCH_S: Final = 0.0002
_SHUTDOWN_S: Final = 1.0  # for answers that are being written at the end


@dataclass(eq=False)
class EngineServer(Serving):
    """An engine with its HTTP server, in the running event loop. Use as an async context manager; then read `url`.

    `port` 0 takes any free port, and replaces `config.engine_port`, which is the first port of all engines of a run.
    Only a server on the loopback address may do without a `token`. Raises `EngineStartError` on entry.
    """

    config: EngineConfig
    model_path: str
    _: KW_ONLY
    max_context_len: int | None
    port: int = 0
    host: str = "127.0.0.1"
    weight_version: str = DEFAULT_LABEL
    core: EngineCore | None = field(default=None, init=False)
    url: str = field(default="", init=False)
    _runner: web.AppRunner | None = field(default=None, init=False)
    _ended: asyncio.Future[None] | None = field(default=None, init=False)

    async def __aenter__(self) -> EngineServer:
        if self.token is None and not _is_loopback(self.host):
            raise EngineStartError(
                f"--host {self.host} lets other machines use this server and change its weights, and it has no token; "
                "name a file with one with --token-file, or leave --host out"
            )
        loop = asyncio.get_running_loop()
        # Loading a checkpoint takes time that other coroutines of this process should not lose.
        core, codec = await asyncio.to_thread(
            build_core, self.config, self.model_path, self.max_context_len, self.weight_version
        )
        app = EngineApp(core, codec, self)
        ended = self._ended = loop.create_future()

        def deliver(completions: Sequence[Completion]) -> None:
            loop.call_soon_threadsafe(app.deliver, completions)

        def crashed(error: BaseException) -> None:
            loop.call_soon_threadsafe(fail, error)

        def fail(error: BaseException) -> None:
            app.failure = error
            if not ended.done():
                ended.set_exception(EngineError(f"the engine died: {type(error).__name__}: {error}"))
                ended.exception()  # read here, so that asyncio does not report it again

        core.start(deliver, crashed)
        self.core = core
        try:
            await self._listen(app)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def _listen(self, app: EngineApp) -> None:
        self._runner = web.AppRunner(
            app.application(), handler_cancellation=True, access_log=None, shutdown_timeout=_SHUTDOWN_S
        )
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self.host, self.port).start()
        except OSError as error:
            fault = f"cannot listen on {self.host}:{self.port}: {error.strerror}; choose another --host or --port"
            if error.errno == errno.EADDRINUSE:
                fault = f"port {self.port} of {self.host} is in use; choose another --port, or 0 for any free one"
            raise EngineStartError(fault) from error
        self.url = f"http://{self.host}:{self._runner.addresses[0][1]}"

    async def wait(self) -> None:
        """Wait for the engine's end; unblocked by `end` or by its crash, which raises `EngineError`."""
        assert self._ended is not None, "wait() needs a server that has been entered"
        await asyncio.shield(self._ended)

    def end(self) -> None:
        """Make `wait` return."""
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    async def __aexit__(self, *_: object) -> None:
        """The engine ends first: it answers open requests as aborted before the connections close."""
        if self.core is not None:
            await self.core.stop()
        if self._runner is not None:
            await self._runner.cleanup()
        self.end()


def build_core(
    config: EngineConfig, model_path: str, max_context_len: int | None, label: str
) -> tuple[EngineCore, TextCodec]:
    """The engine that the configuration names; torch is imported only for the embedded one."""
    codec = TextCodec.load(Path(model_path))
    if config.engine == "simulated":
        from models.engines.simulated.engine import SimulatedEngine

        return SimulatedEngine(config, model_path, max_context_len=max_context_len, label=label), codec
    from models.engines.embedded.engine import EmbeddedEngine

    return EmbeddedEngine(config, model_path, max_context_len=max_context_len, label=label, codec=codec), codec


def _die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the call
            raise SystemExit("the parent process has ended; the engine server ends too")


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):  # a name
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


async def _serve(server: EngineServer, ready_file: Path | None) -> None:
    """Serve until SIGTERM or a crash."""
    loop = asyncio.get_running_loop()
    async with server:
        loop.add_signal_handler(signal.SIGTERM, server.end)
        # What was loaded stays: no later garbage collection has to walk through it (90 ms with torch in memory).
        gc.collect()
        gc.freeze()
        if ready_file is not None:
            write_whole(ready_file, json.dumps({"url": server.url, "pid": os.getpid()}).encode())
        logger.info("serving at %s", server.url)
        await server.wait()


def _fast_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed: it is not on Windows."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def _arguments(argv: Sequence[str] | None) -> dict[str, Any]:
    """Those of `EngineServer` by their names, `config`, `faults` and `token` as they are given; and of this process."""
    parser = argparse.ArgumentParser(prog="models.engines.serve", description="Serve a model over SGLang's protocol.")
    parser.add_argument("--engine", choices=("embedded", "simulated"), help="replaces engine of --config")
    parser.add_argument("--model-path", required=True, help="Hugging Face checkpoint directory")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 = any free port")
    token = "file (mode 0600) with the token that requests must bring"
    parser.add_argument("--token-file", dest="token", type=Path, metavar="FILE", help=token)
    parser.add_argument("--ready-file", type=Path, help="gets {url, pid} as JSON when requests are served")
    parser.add_argument("--config", default="{}", help="EngineConfig as JSON")
    parser.add_argument("--max-context-len", type=int, help="longest prompt plus response, tokens")
    parser.add_argument("--weight-version", default=DEFAULT_LABEL, help="label of the first weights")
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info", type=str.lower)
    parser.add_argument("--seed", type=int, default=0, help="noise of requests without a sampling seed")
    parser.add_argument("--fault-plan", dest="faults", metavar="JSON", help="faults on purpose, FaultPlan as JSON")
    parser.add_argument("--stream-interval", type=int, default=0, help="tokens of a chunk; 0: only at a response's end")
    parser.add_argument("--incremental-streaming-output", action="store_true", help="a chunk holds new tokens only")
    return vars(parser.parse_args(argv))


def main(argv: Sequence[str] | None = None) -> int:
    """Run a server process until its end; the exit status: 2 if the user must change something, 1 if it failed."""
    _die_with_parent(os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The engine's thread and the HTTP loop share the interpreter: short turns keep requests from waiting for 5 ms each.
    sys.setswitchinterval(_SWITCH_S)
    # Small models on a CPU gain nothing from more threads, and lose much when other processes want the cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    options = _arguments(argv)
    level = options.pop("log_level").upper()
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        engine, ready_file = options.pop("engine"), options.pop("ready_file")
        options["config"] = msgspec.json.decode(options["config"], type=EngineConfig)
        options["token"] = options["token"] and read_token(options["token"]).token
        options["faults"] = options["faults"] and msgspec.json.decode(options["faults"], type=FaultPlan)
        if engine:
            options["config"] = msgspec.structs.replace(options["config"], engine=engine)
        with asyncio.Runner(loop_factory=_fast_loop()) as runner:
            runner.run(_serve(EngineServer(**options), ready_file))
    except (EngineError, msgspec.MsgspecError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2 if isinstance(error, EngineStartError | msgspec.MsgspecError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
