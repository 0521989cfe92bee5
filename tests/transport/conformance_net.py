"""Common ground of the conformance tests: how to reach a kind of link, a few message types, a stream made ready."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import msgspec
import numpy as np

from transport.node import Node
from transport.spec import DeadLetter, Routing, StreamSpec
from transport.stream import Hub, Inlet, LeaseHandle

LIMIT_S = 20.0
T = TypeVar("T")


class Int32s(np.ndarray[Any, np.dtype[Any]]):
    wire_dtype: ClassVar[str] = "<i4"


class Extra(np.ndarray[Any, np.dtype[Any]]):
    wire_frame: ClassVar[bool] = True


class Job(msgspec.Struct, frozen=True, array_like=True):
    number: int
    text: str = ""
    tokens: Int32s | None = None
    extras: dict[str, Extra] = {}


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=True):
    number: int


class Pong(msgspec.Struct, frozen=True, array_like=True, tag=True):
    text: str


@dataclass
class Net:
    """How to reach a kind of link."""

    open_node: Callable[[], AbstractAsyncContextManager[Node]]
    address: Callable[[str], str]  # a fresh place for each name
    rebinds: bool = True  # a hub may come back at the same address
    letters: list[DeadLetter] = field(default_factory=list)

    @asynccontextmanager
    async def node(self) -> AsyncIterator[Node]:
        async with asyncio.timeout(LIMIT_S), self.open_node() as node:
            yield node

    @asynccontextmanager
    async def stream(
        self,
        *,
        capacity_items: int = 1000,
        max_attempts: int = 3,
        max_message_bytes: int = 1 << 20,
        lease_s: float = 5.0,
        routing: Routing = "least_loaded",
    ) -> AsyncIterator[tuple[Node, Hub]]:
        async with self.node() as node:
            spec = StreamSpec(
                "jobs",
                self.address("jobs"),
                capacity_items,
                lease_s=lease_s,
                max_attempts=max_attempts,
                max_message_bytes=max_message_bytes,
                routing=routing,
            )
            yield node, await node.hub(spec, self.letters.append)


async def send_jobs(node: Node, hub: Hub, numbers: range) -> None:
    outlet = await node.outlet(hub.address, "jobs", Job)
    async with asyncio.TaskGroup() as group:
        for number in numbers:
            group.create_task(outlet.send(Job(number), f"{number % 5}/{number}"))


async def take_one(inlet: Inlet[T]) -> LeaseHandle[T]:
    """The next message. Unblocked by its delivery; END is a failure."""
    lease = await inlet.receive()
    assert lease is not None, "the stream has ended"
    return lease


async def take_all(inlet: Inlet[Job]) -> list[int]:
    """Finish everything until END. Unblocked by deliveries and by END."""
    numbers: list[int] = []
    while (lease := await inlet.receive()) is not None:
        numbers.append(lease.message.number)
        lease.done()
        await asyncio.sleep(0)
    return numbers


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that no event announces. Unblocked when the condition holds; bounded by the test's limit."""
    while not condition():  # noqa: ASYNC110 - what counters say has no event
        await asyncio.sleep(0.001)
