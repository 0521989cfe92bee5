"""Requests per second through the gateway, beside the same requests to the engine itself.

    python -m bench.gateway [--quick] [--rounds N] [--output FILE]

Conversations of several turns, many at a time, with one simulated engine in a process of its own. Contenders: token ids
straight to the engine's /generate; the same ids to the gateway's /generate; chat completions, where the gateway writes
the conversation as tokens. The gateway is in a process of its own too, with the production's sampler; it keeps the
tokens of each session as in a run.

Two settings: an engine that takes its time as a model does, and one that answers at once, which shows what a request
costs the processor.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import uvloop

from bench.report import Series, arguments, finish, machine
from configs.schema import Config
from models.tiny import make_tiny_checkpoint
from stages.chat.formats import load_chat_format
from stages.gateway.answers import Answers, OpenSession
from stages.gateway.server import Gateway
from stages.gateway.sessions import Session
from stages.messages import Int32Array, PromptGroup, wire
from stages.rollouts import new_sample
from stages.sampling.rollout_requests import Requests
from stages.sampling.sampler import Sampler
from stages.topic_values import ADDRESS, DIRECTORY, EngineAddress, EngineEntry

SPAWN = multiprocessing.get_context("spawn")
SLOTS, TURNS, PROMPT, MADE, SEEN = 64, 4, 200, 64, 32  # conversations at a time, turns; tokens
SETTINGS = {"engine with 20 ms per token": (20.0, 0.1), "engine that takes no time": (0.001, 0.0)}
CONTENDERS = ("direct", "gateway, token ids", "gateway, chat")


class FixedTopic:
    """A topic with the entries of one engine, which never change."""

    def __init__(self, url: str) -> None:
        entry = EngineEntry("engine-0", url, 0, state="serving", run_generation=0, version=0, limit=SLOTS)
        entries = {f"{ADDRESS}engine-0": EngineAddress("engine-0", url, 0), f"{DIRECTORY}engine-0": entry}
        self._values = {key: msgspec.msgpack.encode(value) for key, value in entries.items()}

    def get(self, key: str) -> bytes | None:
        return self._values.get(key)

    def items(self, prefix: str) -> Mapping[str, bytes]:
        return {key: value for key, value in self._values.items() if key.startswith(prefix)}

    async def publish(self, key: str, value: bytes) -> None:
        raise AssertionError(f"nothing here publishes, and {key} was published")

    async def wait(self, revision: int, *prefixes: str) -> int:
        return 1 if revision == 0 else await asyncio.Future[int]()


# The gateway's process: it opens the requested number of sessions, forgets the previous sessions, and reports how
# much processor time it has taken so far.


def serve_gateway(checkpoint: str, engine: str, link: Connection, context: int) -> None:
    uvloop.run(_serve_gateway(checkpoint, engine, link, context))


async def _serve_gateway(checkpoint: str, engine: str, link: Connection, context: int) -> None:
    sections = {
        "train": {"hf_checkpoint": checkpoint},
        "rollout": {"rollout_max_response_len": 8192, "max_turns": 9999},
    }
    config = msgspec.convert(sections, Config)
    chat = load_chat_format(checkpoint)
    sampler = Sampler(config, replica="agents-0", stage="agents")
    answers = Answers(sampler, Requests(config, context), chat)
    async with asyncio.TaskGroup() as tasks, Gateway(answers) as gateway:
        following = tasks.create_task(sampler.follow(FixedTopic(engine)))
        await sampler.ready()
        link.send(gateway.url)
        sessions = contextlib.ExitStack()
        while count := await asyncio.to_thread(link.recv):
            sessions.close()
            keys = [sessions.enter_context(gateway.session(_place(n, chat))) for n in range(count)]
            link.send((keys, time.process_time()))
        sessions.close()
        following.cancel()
        await sampler.close()


def _place(number: int, chat: Any) -> OpenSession:
    group = PromptGroup(number, number, 0, "?", wire((), Int32Array), None, 1, number)
    return OpenSession(group, new_sample((), 0), Session(chat, 0))


# The client: this process.


async def converse(http: aiohttp.ClientSession, contender: str, url: str, key: str, rng: np.random.Generator) -> None:
    """One conversation."""
    headers = {"Authorization": f"Bearer {key}"}
    ids = rng.integers(97, 123, PROMPT).tolist()
    messages: list[dict[str, str]] = [{"role": "user", "content": bytes(ids).decode()}]
    for _ in range(TURNS):
        if contender == "gateway, chat":
            body: dict[str, Any] = {"model": "policy", "messages": messages, "max_tokens": MADE}
            path = "/v1/chat/completions"
        else:
            sampling = {"max_new_tokens": MADE, "temperature": 1.0}
            body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}
            path = "/generate"
        async with http.post(url + path, json=body, headers=headers) as answer:
            answer.raise_for_status()
            reply = await answer.json()
        more = rng.integers(97, 123, SEEN).tolist()
        if contender == "gateway, chat":
            messages = [*messages, reply["choices"][0]["message"], {"role": "user", "content": bytes(more).decode()}]
        else:
            ids = [*ids, *reply["output_ids"], *more]


async def measure(contender: str, url: str, keys: list[str]) -> float:
    """Requests per second of so many conversations, as many at a time as the engine has slots."""
    waiting = iter(enumerate(keys))

    async def converse_on() -> None:
        for number, key in waiting:
            await converse(http, contender, url, key, np.random.default_rng(number))

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        start = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(SLOTS):
                tasks.create_task(converse_on())
        return len(keys) * TURNS / (time.perf_counter() - start)


@contextlib.contextmanager
def engine(checkpoint: Path, home: Path, a_ms: float, c_ms: float) -> Iterator[str]:
    """The address of an engine that carries version 0."""
    ready = home / "ready.json"
    ready.unlink(missing_ok=True)
    timing = {"a_ms": a_ms, "c_ms": c_ms, "prefill_ms_per_token": 0.0, "vocab_size": 256}
    lengths = {"length_mean": 1e6, "length_cap": 1 << 20}  # requests end at their own limits
    config = {"engine": "simulated", "engine_slots": SLOTS, "simulated": {**timing, **lengths}}
    arguments = ["--model-path", str(checkpoint), "--ready-file", str(ready), "--weight-version", "0.0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "models.engines.serve", *arguments, "--config", json.dumps(config)],
        stderr=subprocess.DEVNULL,
    )
    try:
        while not ready.exists():
            if process.poll() is not None:
                sys.exit(f"the engine ended with status {process.returncode}")
            time.sleep(0.05)
        yield json.loads(ready.read_text())["url"]
    finally:
        process.terminate()
        process.wait()


@contextlib.asynccontextmanager
async def gateway(checkpoint: Path, engine_url: str, context: int = 1 << 20) -> AsyncIterator[tuple[str, Connection]]:
    """The address of a gateway whose model has a context of so many tokens, and the link to its process."""
    parent, child = SPAWN.Pipe()
    process = SPAWN.Process(target=serve_gateway, args=(str(checkpoint), engine_url, child, context), daemon=True)
    process.start()
    try:
        yield await asyncio.to_thread(parent.recv), parent
        parent.send(0)
        await asyncio.to_thread(process.join, 10)
    finally:
        process.kill()


async def opened(link: Connection, count: int) -> tuple[list[str], float]:
    """Keys of new sessions, and the seconds of processor time that the gateway has taken."""
    link.send(count)
    keys, seconds = await asyncio.to_thread(link.recv)
    return keys, seconds


async def run(home: Path, rounds: int, conversations: int) -> list[Series]:
    checkpoint = make_tiny_checkpoint(home / "tiny", num_layers=1)
    series = []
    for setting, (a_ms, c_ms) in SETTINGS.items():
        values: dict[str, list[float]] = {name: [] for name in CONTENDERS}
        spent: dict[str, list[float]] = {name: [] for name in CONTENDERS[1:]}
        with engine(checkpoint, home, a_ms, c_ms) as url:
            async with gateway(checkpoint, url) as (address, link):
                for number in range(rounds + 1):  # the first one warms up
                    for name in CONTENDERS:
                        keys, before = await opened(link, conversations if number else SLOTS)
                        rate = await measure(name, url if name == "direct" else address, keys)
                        _, after = await opened(link, 1)
                        if number:
                            values[name].append(rate)
                            if name in spent:
                                spent[name].append(1000 * (after - before) / (len(keys) * TURNS))
        for name in CONTENDERS:
            note = f"{statistics.median(spent[name]):.2f} ms of the gateway's processor" if name in spent else ""
            series.append(Series(setting, name, "requests/s", values[name], note))
    return series


def main() -> None:
    options = arguments(__doc__, "gateway", "1 round with fewer conversations").parse_args()
    rounds = options.rounds or (1 if options.quick else 3)
    conversations = SLOTS if options.quick else 2 * SLOTS
    about = machine(["aiohttp", "msgspec"])
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as home:
        series = uvloop.run(run(Path(home), rounds, conversations))
    remarks = [
        f"{SLOTS} conversations at a time of {TURNS} turns: {PROMPT} tokens, {MADE} made and {SEEN} seen in each turn",
        f"{rounds} rounds of {conversations} conversations, interleaved",
        about.load,
    ]
    finish(options.output, about, remarks, series, baseline="direct")


if __name__ == "__main__":
    main()
