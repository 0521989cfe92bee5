"""Checkpoints and engines under test.

A conformance test asks for `target`: an address, a client and what the engine behind it can do. It runs on the embedded
engine, on the simulated one and, marked slow, on a real SGLang server (see `tests.sglang_server`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web

from models.engines.client import EngineClient
from models.engines.launch.environment import Installed, probe
from models.engines.protocol import EXPECTED_SGLANG
from models.engines.serve import EngineServer
from models.tiny import TinyRecipe, make_tiny_checkpoint
from tests.models.engines.harness import EMBEDDED, SIMULATED, Capabilities, Checkpoints, Target
from tests.models.engines.launch.fake_environment import FakeEnvironment
from tests.other_programs import served_app
from tests.sglang_server import CONTEXT, ON_SGLANG, RealServer


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny models lose much to a second thread when other processes want the cores."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Tiny checkpoints by their arguments, made once."""
    root = tmp_path_factory.mktemp("checkpoints")

    def make(**recipe: object) -> Path:
        name = "-".join(f"{key}_{value}" for key, value in sorted(recipe.items())) or "plain"
        return make_tiny_checkpoint(root / name, TinyRecipe(**recipe))  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="session")
def cpu(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """What a made-up environment of SGLang and its router says of itself."""
    root = tmp_path_factory.mktemp("sglang")
    return probe(FakeEnvironment(root / "env").install_all().python, cache=root / "cache")


EMBEDDED_CAN = Capabilities()
SIMULATED_CAN = Capabilities(contents_stop=False, scores_as_it_samples=False, scores_at_temperature=False)
REAL = Capabilities(
    seeds=False,
    refuses_bad_ids=False,
    aborts_by_prefix=False,
    notices_disconnects=False,
    scores_at_temperature=False,
    aborts_while_paused=False,
)


def on_sglang(*kinds: str) -> list[Any]:
    """Parameters of tests on the real servers that these fixtures start; a second server is for `make test-full`."""
    marks = {kind: [*ON_SGLANG, *([pytest.mark.full] if kind != "sglang" else [])] for kind in kinds}
    return [pytest.param(kind, marks=marks[kind], id=f"{kind}-{EXPECTED_SGLANG}") for kind in kinds]


@asynccontextmanager
async def opened(
    kind: str, request: pytest.FixtureRequest, label: str = "first", **options: Any
) -> AsyncIterator[Target]:
    """The embedded or the simulated engine, served with these options, or the real server of a fixture."""
    if kind.startswith("sglang"):
        real: RealServer = request.getfixturevalue(kind)
        async with EngineClient(real.url, timeout_s=120) as client:
            await real.fresh(client, label)
            yield Target(client, REAL, str(real.model), str(real.other), label)
        return
    checkpoints = request.getfixturevalue("checkpoints")
    model, other = str(checkpoints()), str(checkpoints(seed=1))
    config, can = (SIMULATED, SIMULATED_CAN) if kind == "simulated" else (EMBEDDED, EMBEDDED_CAN)
    async with (
        EngineServer(config, model, max_context_len=CONTEXT, seed=3, weight_version=label, **options) as server,
        EngineClient(server.url, timeout_s=60) as client,
    ):
        yield Target(client, can, model, other, label)


@pytest.fixture(params=["embedded", "simulated", *on_sglang("sglang")])
async def target(request: pytest.FixtureRequest) -> AsyncIterator[Target]:
    async with opened(request.param, request) as made:
        yield made


@dataclass
class Canned:
    """A server that answers every request with the same pieces, the last one again and again if `endless`."""

    pieces: Sequence[bytes]
    status: int | Mapping[str, int]
    endless: bool
    bodies: list[bytes] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.headers.append(request.headers)
        self.bodies.append(await request.read())
        code = self.status if isinstance(self.status, int) else self.status.get(request.path, 200)
        response = web.StreamResponse(status=code)
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):  # the client has had enough
            for piece in self.pieces:
                await response.write(piece)
            while self.endless:
                await response.write(self.pieces[-1])
            await asyncio.sleep(0.02)  # the end of the answer comes in a packet of its own
        return response


@pytest.fixture
async def canned() -> AsyncIterator[Callable[..., Awaitable[tuple[EngineClient, Canned]]]]:
    """Starts a `Canned` server; gives a client of it, made with the other options, and the server."""

    async def start(
        *pieces: bytes, status: int | Mapping[str, int] = 200, endless: bool = False, **options: Any
    ) -> tuple[EngineClient, Canned]:
        server, app = Canned(pieces, status, endless), web.Application()
        app.router.add_route("*", "/{path:.*}", server.answer)
        url = await stack.enter_async_context(served_app(app))
        return await stack.enter_async_context(EngineClient(url, **options)), server

    async with AsyncExitStack() as stack:
        yield start
