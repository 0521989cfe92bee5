"""Checkpoints and engines under test.

A conformance test asks for `target`: an address, a client and what the engine behind it can do. It runs on the embedded
engine, on the simulated one and, marked slow, on a real SGLang server (see `tests.sglang_server`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import torch

from models.engines.client import EngineClient
from models.engines.protocol import EXPECTED_SGLANG
from models.engines.serve import EngineServer
from models.tiny import make_tiny_checkpoint
from tests.models.engines.harness import EMBEDDED, SIMULATED, Capabilities, Target
from tests.sglang_server import CONTEXT, ON_SGLANG, RealServer


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny models lose much to a second thread when other processes want the cores."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Tiny checkpoints by their arguments, made once."""
    root = tmp_path_factory.mktemp("checkpoints")

    def make(**recipe: object) -> Path:
        name = "-".join(f"{key}_{value}" for key, value in sorted(recipe.items())) or "plain"
        return make_tiny_checkpoint(root / name, **recipe)  # type: ignore[arg-type]

    return make


REAL = Capabilities(
    seeds=False,
    refuses_bad_ids=False,
    refuses_bad_weights=False,
    aborts_by_prefix=False,
    notices_disconnects=False,
    scores_at_temperature=False,
    aborts_while_paused=False,
)
ENGINES = ["embedded", "simulated", pytest.param("sglang", marks=ON_SGLANG, id=f"sglang-{EXPECTED_SGLANG}")]


@pytest.fixture(params=ENGINES)
async def target(request: pytest.FixtureRequest, checkpoints: Callable[..., Path]) -> AsyncIterator[Target]:
    if request.param == "sglang":
        server: RealServer = request.getfixturevalue("sglang")
        async with EngineClient(server.url, timeout_s=60) as client:
            await server.fresh(client)
            yield Target(client, REAL, str(server.model), str(server.other), "first")
        return
    model, other = str(checkpoints()), str(checkpoints(seed=1))
    simulated = request.param == "simulated"
    can = Capabilities(
        contents_stop=not simulated,
        scores_as_it_samples=not simulated,
        scores_at_temperature=not simulated,
        refuses_bad_weights=not simulated,
    )
    config = SIMULATED if simulated else EMBEDDED
    async with (
        EngineServer(config, model, max_context_len=CONTEXT, seed=3) as server,
        EngineClient(server.url, timeout_s=30) as client,
    ):
        yield Target(client, can, model, other, "default")
