"""A simulated engine and a gateway, each in a process of its own, and the link on which the gateway opens sessions."""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import uvloop

from configs.schema import Config
from stages.base import StageContext
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
SLOTS = 64


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
    sampler = Sampler(StageContext(config, Path("run"), "agents-0", Mock()), stage="agents")
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
