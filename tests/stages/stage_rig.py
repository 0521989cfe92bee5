"""What the tests of the stages share: messages by the handful, streams on a network in memory, a stage that runs.

Streams and ports are the real ones, only the sockets are missing; every message is encoded and decoded on its way.
Nothing here waits for time to pass: `until` looks for a condition, `idle` lets everything happen that can happen
without a clock or a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import msgspec
import numpy as np
import pytest

from configs.schema import Config
from models.engines.access_token import Token
from stages.base import Stage, StageContext
from stages.group.stage import GroupStage
from stages.messages import (
    Float32Array,
    Int32Array,
    PromptGroup,
    Report,
    RolloutSlice,
    Sample,
    Settled,
    Status,
    UInt8Array,
    VersionRun,
    WeightsAnnouncement,
    wire,
)
from stages.ports import Ports
from stages.topic_values import Complaint, EngineAddress, EngineEntry, addresses, entries
from tests.transport.memory_link import MemoryNetwork, MemoryNode
from transport.node import Node
from transport.spec import DeadLetter, StreamSpec
from transport.stream import Hub, Inlet, Outlet
from transport.topic import TopicServer

T = TypeVar("T")
LIMIT_S = 180.0  # turns a hang into a failure, and no slow machine
IDLE_TURNS = 300
TOPIC = "topic"
REPORT: Any = Report


def make_config(**sections: Mapping[str, object]) -> Config:
    """A configuration with the given sections, e.g. rollout={"rollout_batch_size": 2}."""
    return msgspec.convert(sections, Config)


def numbers(array: Sequence[int] | np.ndarray[Any, Any]) -> list[int]:
    return [int(value) for value in array]


def response_ids(sample: Sample) -> list[int]:
    """Tokens after the prompt."""
    return numbers(sample.token_ids[sample.prompt_length :])


def make_group(
    group_id: int = 0, n_samples: int = 1, *, prompt: Sequence[int] = (1, 2, 3), **fields: Any
) -> PromptGroup:
    values: dict[str, Any] = {"prompt_index": group_id, "label": "7", "seed": 100 + group_id, **fields}
    return PromptGroup(
        group_id=group_id, epoch=0, prompt="?", prompt_ids=wire(prompt, Int32Array), n_samples=n_samples, **values
    )


def make_sample(
    index: int = 0,
    *,
    prompt: Sequence[int] = (1, 2, 3),
    n: int = 4,
    runs: Sequence[tuple[int, int]] | None = None,
    version: int = 0,
    mask: Sequence[int] | None = None,
    log_probs: Sequence[float] | None = None,
    status: Status = "completed",
    response: str = "7",
    **fields: Any,
) -> Sample:
    """A finished rollout of `n` tokens after the prompt; `runs` are (version, tokens), all of them after the prompt."""
    spans = tuple(VersionRun(*run) for run in (runs if runs is not None else [(version, n)]))
    n = sum(run.n_tokens for run in spans)
    before = len(prompt)
    return Sample(
        index=index,
        status=status,
        response=response,
        token_ids=wire([*prompt, *(10 * index + k for k in range(n))], Int32Array),
        prompt_length=before,
        loss_mask=wire([0] * before + list(mask if mask is not None else [1] * n), UInt8Array),
        log_probs=wire([0.0] * before + list(log_probs if log_probs is not None else [-0.5] * n), Float32Array),
        version_runs=(VersionRun(-1, before), *spans),
        turns=fields.pop("turns", 1),
        **fields,
    )


def make_slice(group_id: int = 0, *samples: Sample, n_samples: int | None = None, **fields: Any) -> RolloutSlice:
    members = samples or (make_sample(0, reward=1.0), make_sample(1, reward=0.0))
    return RolloutSlice(make_group(group_id, n_samples or len(members), **fields), tuple(members))


def make_graded(group_id: int, *rewards: float, **fields: Any) -> RolloutSlice:
    """One rollout for each reward; `fields` are of the samples."""
    return make_slice(group_id, *(make_sample(i, reward=r, **fields) for i, r in enumerate(rewards or (1.0, 0.0))))


@dataclass
class SpanLog:
    """Keeps the names of the spans that a stage writes."""

    names: list[str] = field(default_factory=list)

    def add(
        self, name: str, start_s: float, dur_s: float, *, group: int = -1, sample: int = -1, detail: str = ""
    ) -> None:
        self.names.append(f"{name} {detail}".strip())


def make_context(config: Config | None = None, run_dir: Path = Path("run"), **fields: Any) -> StageContext:
    values: dict[str, Any] = {"replica": "stage-0", "spans": SpanLog(), **fields}
    return StageContext(config=config or Config(), run_dir=run_dir, **values)


class Rig:
    """Streams by name on one node, a topic, and ports for the stage under test."""

    def __init__(self, node: Node, topic: TopicServer, prefix: str = "") -> None:
        self.node, self.topic, self.prefix = node, topic, prefix
        self.hubs: dict[str, Hub] = {}
        self.schemas: dict[str, Any] = {}
        self.letters: list[DeadLetter] = []

    async def stream(self, name: str, schema: Any, **spec: Any) -> Hub:
        self.hubs[name] = await self.node.hub(StreamSpec(name, self.prefix + name, **spec), self.letters.append)
        self.schemas[name] = schema
        return self.hubs[name]

    async def outlet(self, name: str, replica: str = "feeder") -> Outlet[Any]:
        return await self.node.outlet(self.hubs[name].address, name, self.schemas[name], replica=replica)

    async def inlet(self, name: str, replica: str = "taker", window_items: int = 1000) -> Inlet[Any]:
        return await self.node.inlet(
            self.hubs[name].address, name, self.schemas[name], replica=replica, window_items=window_items
        )

    async def ports(
        self, inlets: Mapping[str, str], outlets: Mapping[str, str], replica: str = "stage-0", window_items: int = 1000
    ) -> Ports:
        """Ports of a stage: port name -> stream name."""
        return Ports(
            replica,
            {port: await self.inlet(name, replica, window_items) for port, name in inlets.items()},
            {port: await self.outlet(name, replica) for port, name in outlets.items()},
            await self.node.topic(self.topic.address, replica=replica),
        )

    async def join(
        self, inlets: Mapping[str, tuple[str, Any]], outlets: Mapping[str, tuple[str, Any]], **options: Any
    ) -> Ports:
        """`ports`, and the streams that are not there yet: port name -> (stream name, schema)."""
        for name, schema in (*inlets.values(), *outlets.values()):
            if name not in self.hubs:
                await self.stream(name, schema)
        return await self.ports(
            {port: name for port, (name, _) in inlets.items()},
            {port: name for port, (name, _) in outlets.items()},
            **options,
        )

    def applied(self, version: int, *, engine: int = 0, fetching: int = -1, **fields: Any) -> None:
        """Say what an engine carries, as the engines stage does; the engine gets an address if it has none."""
        name = f"engine-{engine}"
        if name not in addresses(self.topic):
            self.engine_at(f"http://{name}", engine=engine)
        address = addresses(self.topic)[name]
        values: dict[str, Any] = {
            "state": "serving" if fetching < 0 else "updating",
            "incarnation": address.incarnation,
            "limit": 512,
            **fields,
        }
        entry = EngineEntry(name, address.url, run_generation=0, version=version, fetching=fetching, **values)
        self.topic.publish(f"directory/{name}", msgspec.msgpack.encode(entry))

    def entry(self, engine: int = 0) -> EngineEntry | None:
        """What counts of an engine just now."""
        return entries(self.topic).get(f"engine-{engine}")

    def engine_at(
        self, url: str, *, engine: int = 0, incarnation: int = 0, token: Token | None = None, fetcher: str = ""
    ) -> None:
        address = EngineAddress(f"engine-{engine}", url, incarnation, fetcher=fetcher, token=token)
        self.topic.publish(f"engine/engine-{engine}", msgspec.msgpack.encode(address))

    def frozen_at(self, name: str, url: str, incarnation: int = 0) -> None:
        """A frozen model that serves under its own name, as supervisor and engines stage tell of it."""
        address = EngineAddress(name, url, incarnation, name)
        entry = EngineEntry(name, url, incarnation, name, state="serving")
        self.topic.publish(f"engine/{name}", msgspec.msgpack.encode(address))
        self.topic.publish(f"directory/{name}", msgspec.msgpack.encode(entry))

    def lose_engine(self, engine: int = 0) -> None:
        """What the supervisor does when an engine is lost."""
        for kind in ("engine", "directory", "device"):
            self.topic.drop(f"{kind}/engine-{engine}")

    def announced(self, key: str = "weights") -> WeightsAnnouncement | None:
        value = self.topic.get(key)
        return None if value is None else msgspec.msgpack.decode(value, type=WeightsAnnouncement)

    async def complaint(self, engine: int = 0, *, about: str = "complaint/") -> Complaint:
        """Waits for what the supervisor is told of an engine."""
        key = f"{about}engine-{engine}"
        await self.topic_until(lambda: self.topic.get(key) is not None)
        return msgspec.msgpack.decode(self.topic.get(key) or b"", type=Complaint)

    async def topic_until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition on the topic holds; unblocked by its changes."""
        revision = 0
        while not condition():
            revision = await self.topic.wait(revision)


@asynccontextmanager
async def open_rig(*, sockets: bool = False) -> AsyncIterator[Rig]:
    """A network in memory, or ZeroMQ's inproc sockets: the same protocol, but `idle` then promises nothing."""
    node = Node("run", "test") if sockets else MemoryNode("run", "test", MemoryNetwork())
    prefix = "inproc://" if sockets else ""
    async with asyncio.timeout(LIMIT_S), node:
        yield Rig(node, await node.topic_server(prefix + TOPIC), prefix)


@contextmanager
def time_limit() -> Iterator[None]:
    """Turn a hang of a test into a failure. For fixtures: the limit of `open_rig` ends the task of the fixture only."""

    def cancel_all() -> None:
        for task in asyncio.all_tasks():
            task.cancel()

    handle = asyncio.get_running_loop().call_later(LIMIT_S, cancel_all)
    yield
    handle.cancel()


@asynccontextmanager
async def running(stage: Stage, ports: Ports) -> AsyncIterator[asyncio.Task[None]]:
    """The stage at work. At the end of the block it is cancelled, as a killed replica is, unless it has ended."""
    try:
        await stage.setup()
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(stage.run(ports))
            yield task
            task.cancel()
    finally:
        await stage.close()


@contextmanager
def ended_by(kind: type[Exception], words: str) -> Iterator[None]:
    """A replica in this block ends with an error of this kind, and with these words."""
    with pytest.raises(ExceptionGroup) as caught:
        yield
    assert caught.group_contains(kind, match=words)


async def take(inlet: Inlet[Any]) -> Any:
    """The next message, released at once."""
    lease = await inlet.receive()
    assert lease is not None, "the stream has ended"
    lease.done()
    return lease.message


async def take_all(inlet: Inlet[Any]) -> list[Any]:
    """All messages until the stream ends."""
    found = []
    while (lease := await inlet.receive()) is not None:
        found.append(lease.message)
        lease.done()
    return found


async def idle() -> None:
    """Let all tasks of this loop go on until they wait for something from outside."""
    for _ in range(IDLE_TURNS):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    """Look until a condition holds; the rig's limit ends the wait."""
    while not condition():  # noqa: ASYNC110 - looks from outside
        await asyncio.sleep(0.002)


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


async def ended(pid: int) -> None:
    """Wait for the end of a process."""
    async with asyncio.timeout(LIMIT_S):
        await until(lambda: not alive(pid))


def rewrite(path: Path, content: bytes) -> None:
    """A new file, for one that is cut and written again waits for the disk."""
    path.unlink()
    path.write_bytes(content)


def before_calls(monkeypatch: pytest.MonkeyPatch, owner: type[Any], name: str, hook: Callable[..., Any]) -> None:
    """Call `hook` before each call of an async method, with its arguments. What it raises takes the call's place."""
    original = getattr(owner, name)

    async def call(*args: Any, **options: Any) -> Any:
        if (waiting := hook(*args, **options)) is not None:
            await waiting
        return await original(*args, **options)

    monkeypatch.setattr(owner, name, call)


@dataclass
class Held:
    """A lease that belongs to no hub."""

    message: RolloutSlice
    key: str = ""
    attempt: int = 1
    ends: list[str] = field(default_factory=list)

    def done(self) -> None:
        self.ends.append("done")

    def poison(self, reason: str) -> None:
        self.ends.append("poison")


# The group stage among real streams: what goes in, what comes out, what is settled.


@dataclass
class Fed:
    """A stage at work, and the stream of rollouts into it."""

    stream: ClassVar[str]
    rig: Rig
    stage: Any
    task: asyncio.Task[None]
    feed: Outlet[Any]
    sent: int = field(default=0, kw_only=True)

    async def send(self, *slices: RolloutSlice) -> None:
        """Each under a key of its own, so that only the stage can tell duplicates."""
        for slice_ in slices:
            self.sent += 1
            await self.feed.send(slice_, f"{slice_.key}#{self.sent}")

    async def end(self) -> None:
        self.rig.hubs[self.stream].finish()
        await self.task


@dataclass
class Desk(Fed):
    stream = "group"
    out: Inlet[Any]
    settled: Inlet[Any]


async def join(rig: Rig, replica: str = "group-0") -> Any:
    return await rig.join(
        {"in": ("group", RolloutSlice)},
        {"out": ("train", RolloutSlice), "settle": ("settle", REPORT), "eval": ("evaluate", RolloutSlice)},
        replica=replica,
    )


@asynccontextmanager
async def open_desk(config: Config | None = None) -> AsyncIterator[Desk]:
    async with open_rig() as rig:
        ports = await join(rig)
        stage = GroupStage(make_context(config))
        async with running(stage, ports) as task:
            yield Desk(rig, stage, task, await rig.outlet("group"), await rig.inlet("train"), await rig.inlet("settle"))


def failed(index: int, why: str = "ValueError: boom") -> Sample:
    return make_sample(index, status="failed", error=why, n=2)


async def settled(one: Desk) -> Settled:
    report = await take(one.settled)
    assert isinstance(report, Settled)
    return report
