"""Checkpoints and engines under test.

A conformance test asks for `target`: an address, a client and what the engine behind it can do. A real SGLang server
joins in with ENGINE_CONFORMANCE_URL=http://host:port (and ENGINE_CONFORMANCE_OTHER=a second checkpoint directory of the
same shape, as its process sees it).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from configs.schema.engine import EngineConfig, SimulatedEngineConfig
from models.engines.client import EngineClient
from models.engines.protocol import GenerateRequest, SamplingParams
from models.engines.serve import EngineServer
from models.tiny import make_tiny_checkpoint

CONTEXT = 1024


@dataclass(frozen=True)
class Capabilities:
    """Known differences between the engines that speak the protocol; True is what the embedded engine does.

    SGLang (0.5.23): seeds are ignored without deterministic mode; a bad token id kills the scheduler; in_place keeps
    stale KV in its prefix cache across versions; an in_place update that asks to flush while requests run answers 400
    although it took effect; a stream's chunks and the granularity of aborts are the same. Simulated: contents stop
    nothing, prompts are not scored, any directory is accepted as weights.
    """

    seeds: bool = True
    contents_stop: bool = True
    scores_prompts: bool = True
    refuses_bad_ids: bool = True
    reads_weights: bool = True
    flushes_while_paused: bool = True


@dataclass(frozen=True)
class Target:
    """One engine to test. `other` is a second checkpoint of the same shape."""

    client: EngineClient
    can: Capabilities
    model: str
    other: str
    label: str

    @property
    def url(self) -> str:
        return self.client.base_url


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Tiny checkpoints by their arguments, made once."""
    root = tmp_path_factory.mktemp("checkpoints")

    def make(**recipe: object) -> Path:
        name = "-".join(f"{key}_{value}" for key, value in sorted(recipe.items())) or "plain"
        return make_tiny_checkpoint(root / name, **recipe)  # type: ignore[arg-type]

    return make


SIMULATED = EngineConfig(
    engine="simulated",
    engine_slots=32,
    simulated=SimulatedEngineConfig(
        a_ms=1.0, c_ms=0.02, prefill_ms_per_token=0.01, length_mean=60.0, update_s=0.01, vocab_size=256
    ),
)
EMBEDDED = EngineConfig(engine="embedded", engine_slots=32, engine_device="cpu")


def _parameters() -> list[str]:
    return ["embedded", "simulated", *(["sglang"] if "ENGINE_CONFORMANCE_URL" in os.environ else [])]


@pytest.fixture(params=_parameters())
async def target(request: pytest.FixtureRequest, checkpoints: Callable[..., Path]) -> AsyncIterator[Target]:
    if request.param == "sglang":
        async with EngineClient(os.environ["ENGINE_CONFORMANCE_URL"], timeout_s=120) as client:
            info = await client.model_info()
            other = os.environ["ENGINE_CONFORMANCE_OTHER"]
            can = Capabilities(seeds=False, refuses_bad_ids=False, flushes_while_paused=False)
            yield Target(client, can, info.model_path, other, info.weight_version or "default")
        return
    model, other = str(checkpoints()), str(checkpoints(seed=1))
    simulated = request.param == "simulated"
    can = Capabilities(contents_stop=not simulated, scores_prompts=not simulated, reads_weights=not simulated)
    config = SIMULATED if simulated else EMBEDDED
    async with (
        EngineServer(config, model, max_context_len=CONTEXT, seed=3) as server,
        EngineClient(server.url, timeout_s=30) as client,
    ):
        yield Target(client, can, model, other, "default")


def ask(prompt: list[int] | list[list[int]], rid: str | None = None, **params: object) -> GenerateRequest:
    """A request with log-probs that no EOS ends, unless told otherwise."""
    params = {"ignore_eos": True, "max_new_tokens": 8, **params}
    return GenerateRequest(
        input_ids=prompt,  # type: ignore[arg-type]
        rid=rid,
        sampling_params=msgspec.convert(params, SamplingParams),
        return_logprob=True,
    )


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float = 20.0) -> None:
    """Wait until a condition holds; polls, for tests look from outside."""
    async with asyncio.timeout(timeout_s):
        while not await condition():
            await asyncio.sleep(0.002)


async def generating(client: EngineClient, tokens: int = 1) -> None:
    """Wait until the engine's running requests hold at least so many tokens."""

    async def busy() -> bool:
        load = (await client.loads())[0]
        return load.num_running_reqs > 0 and load.num_used_tokens >= tokens

    await until(busy)
