"""What the tests of the engines share: configurations, requests, and ways to drive an engine."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np

from configs.schema.rollout import EngineConfig, SimulatedEngineConfig
from models.engines.client import EngineClient
from models.engines.core import Completion
from models.engines.embedded.engine import EmbeddedEngine
from models.engines.embedded.stepper import Stepper
from models.engines.intake import Intake
from models.engines.protocol import GenerateRequest, SamplingParams
from models.engines.simulated.responses import simulated_tokens
from models.engines.streamed import PartialOutputs
from models.engines.text import TextCodec

Checkpoints = Callable[..., Path]  # tiny ones by their arguments


@dataclass(frozen=True)
class Capabilities:
    """Known differences between the engines that speak the protocol; True is what the embedded engine does.

    SGLang 0.5.23: seeds are ignored without deterministic mode; a bad token id and weights of a wrong shape end the
    server; in_place keeps stale KV in its prefix cache across versions; an in_place update that asks to flush while
    requests run answers 400 although it took effect; an abort needs the exact id, and the samples of one request get
    ids of their own; a lost connection is noticed after seconds; the samples of one request share a prefill that is
    none of theirs; prompts are scored at temperature 1 whatever is asked; what comes during a pause waits where no
    abort finds it.
    Simulated: contents stop nothing, scores are not those of what it samples and know no temperature, any directory is
    accepted as weights.
    """

    seeds: bool = True
    contents_stop: bool = True
    scores_as_it_samples: bool = True
    scores_at_temperature: bool = True
    aborts_while_paused: bool = True
    refuses_bad_ids: bool = True
    aborts_by_prefix: bool = True
    notices_disconnects: bool = True


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


SIMULATED = EngineConfig(
    engine="simulated",
    engine_slots=32,
    simulated=SimulatedEngineConfig(
        a_ms=1.0, c_ms=0.02, prefill_ms_per_token=0.01, length_mean=60.0, update_s=0.01, vocab_size=256
    ),
)
EMBEDDED = EngineConfig(engine="embedded", engine_slots=32, engine_device="cpu")


def ask(
    prompt: list[int] | list[list[int]],
    rid: str | None = None,
    *,
    score_from: int = -1,
    extra_key: str | None = None,
    **params: object,
) -> GenerateRequest:
    """A request with log-probs that no EOS ends, unless told otherwise."""
    return GenerateRequest(
        input_ids=prompt,  # type: ignore[arg-type]
        rid=rid,
        sampling_params=msgspec.convert({"ignore_eos": True, "max_new_tokens": 8, **params}, SamplingParams),
        return_logprob=True,
        logprob_start_len=score_from,
        extra_key=extra_key,
    )


def one_completion(
    ids: list[int], *, seed: int = 1, max_new: int = 1, score_from: int = -1, **rule: float
) -> Completion:
    """One response to make, as an engine has it."""
    prompt = np.array(ids, dtype=np.int32)
    sampling = msgspec.convert(rule, SamplingParams)
    return Completion(
        rid="r", group=0, sample=0, prompt=prompt, prompt_key=prompt.tobytes(), rule=sampling, seed=seed,
        max_new=max_new, stop_ids=(), stop_strings=(), stream=False,
        extra_key="", score_from=score_from,
    )  # fmt: skip


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float = 120.0) -> None:
    """Wait until a condition holds; polls, for tests look from outside."""
    async with asyncio.timeout(timeout_s):
        while not await condition():  # noqa: ASYNC110 - looks from outside
            await asyncio.sleep(0.002)


async def streamed(partial: PartialOutputs, tokens: int) -> None:
    """Wait until so many tokens have come."""

    async def there() -> bool:
        return partial.tokens >= tokens

    await until(there)


async def generating(client: EngineClient, tokens: int = 1, requests: int = 1) -> None:
    """Wait until so many requests run in the engine, and hold at least so many tokens."""

    async def busy() -> bool:
        load = (await client.loads())[0]
        return load.num_running_reqs >= requests and load.num_used_tokens >= tokens

    await until(busy)


class Bench:
    """Drives an embedded engine step by step, without thread, server or clock."""

    def __init__(self, path: Path, max_context_len: int | None = 256, **config: object) -> None:
        settings = msgspec.structs.replace(EMBEDDED, **config)
        self.codec = TextCodec.load(path)
        self.engine = EmbeddedEngine(settings, str(path), max_context_len=max_context_len, label="w1", codec=self.codec)
        seeds = itertools.count(100)
        self._intake = Intake(self.engine.facts, self.codec, lambda: next(seeds))
        self._open: list[Completion] = []

    @property
    def stepper(self) -> Stepper:
        return self.engine.stepper

    def make(self, prompt: list[int], **asked: Any) -> list[Completion]:
        """Completions of one request."""
        return self._intake.expand(ask(prompt, **asked))[0]

    def submit(self, *requests: list[Completion]) -> None:
        for completions in requests:
            self._open += completions
            self.stepper.submit(completions)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.stepper.step()

    def finish(self) -> list[Completion]:
        """Run to the end; all that was submitted, in order."""
        while self.stepper.has_work:
            self.stepper.step()
        done, self._open = self._open, []
        assert all(completion.finish is not None for completion in done)
        self.stepper.take_progressed()
        return done

    def run(self, *requests: list[Completion]) -> list[Completion]:
        self.submit(*requests)
        return self.finish()

    def swap(self, path: Path, label: str | None) -> None:
        weights = self.engine._weights  # the engine swaps in its thread, which does not run here
        self.stepper.swap(lambda: weights.load(path), label)


def variant(source: Path, target: Path, **config: object) -> Path:
    """A copy of a checkpoint with another configuration."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    values = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**values, **config}))
    return target


async def idle(target: Target) -> bool:
    """True if the engine has nothing to do."""
    load = (await target.client.loads())[0]
    return load.num_running_reqs == 0 and load.num_waiting_reqs == 0


async def post(target: Target, path: str, body: object) -> tuple[int, bytes]:
    """Status and body of a plain POST, past the client."""
    headers = {"Content-Type": "application/json"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(target.url + path, data=msgspec.json.encode(body), headers=headers) as response,
    ):
        return response.status, await response.read()


def simulated_token(prompt: Sequence[int], seed: int, position: int, version: str, vocab_size: int) -> int:
    """The token at `position`, counted from the start of the prompt, that the simulated engine draws."""
    key = np.asarray(prompt, dtype="<i4").tobytes()
    return int(simulated_tokens(key, seed, np.array([position], dtype=np.int64), version, vocab_size)[0])
