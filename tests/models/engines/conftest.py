"""Checkpoints and engines under test.

A conformance test asks for `target`: an address, a client and what the engine behind it can do. A real SGLang server
joins in with ENGINE_CONFORMANCE_URL=http://host:port, ENGINE_CONFORMANCE_MODEL=the checkpoint directory it serves
and ENGINE_CONFORMANCE_OTHER=a second one of the same shape, both as its process sees them.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import torch

from models.engines.client import EngineClient
from models.engines.serve import EngineServer
from models.tiny import make_tiny_checkpoint
from tests.models.engines.harness import CONTEXT, EMBEDDED, SIMULATED, Capabilities, Target


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


def _parameters() -> list[str]:
    return ["embedded", "simulated", *(["sglang"] if "ENGINE_CONFORMANCE_URL" in os.environ else [])]


@pytest.fixture(params=_parameters())
async def target(request: pytest.FixtureRequest, checkpoints: Callable[..., Path]) -> AsyncIterator[Target]:
    if request.param == "sglang":
        async with EngineClient(os.environ["ENGINE_CONFORMANCE_URL"], timeout_s=60) as client:
            model, other = os.environ["ENGINE_CONFORMANCE_MODEL"], os.environ["ENGINE_CONFORMANCE_OTHER"]
            await client.resume()  # one server for all tests: each begins with the first weights and nothing running
            await client.abort()
            await client.update_weights_from_disk(model, "first")
            can = Capabilities(
                seeds=False,
                refuses_bad_ids=False,
                refuses_bad_weights=False,
                aborts_by_prefix=False,
                notices_disconnects=False,
                scores_at_temperature=False,
                aborts_while_paused=False,
            )
            yield Target(client, can, model, other, "first")
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
