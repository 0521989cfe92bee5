"""The seam below the ports: a link carries messages between a port and its hub. Only its owner task touches it.

Invariant: everything that a protocol core does happens in the owner task, or in a synchronous call on the same loop
between two of its steps; so cores need no locks. After each step the core is flushed: no delay is ever added to
gather a batch, yet what came together is answered together.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

from transport.core.custody import Body
from transport.wire import AnyMessage

Decode = Callable[[bytes], AnyMessage]

STEP_LIMIT = 256  # messages taken before other tasks get their turn


class Endpoint(Protocol):
    """What a link drives: a hub, an inlet, an outlet, or a side of a topic."""

    def on_message(self, route: bytes, message: AnyMessage, body: Body) -> None: ...

    def on_malformed(self, route: bytes, frame: bytes) -> None:
        """A frame that is no message of the protocol arrived."""

    def on_link_up(self) -> None: ...

    def on_link_down(self) -> None: ...

    def on_link_refused(self, reason: str) -> None:
        """The peer does not accept this node's keys."""

    def on_step(self) -> None:
        """Everything that had arrived was handed over: run due timers and send what is due."""


class Link(ABC):
    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.address = ""
        self._awake = asyncio.Event()
        self._stopped = False

    def wake(self) -> None:
        """Make the owner task take a step soon."""
        self._awake.set()

    def stop(self) -> None:
        """End the owner task."""
        self._stopped = True
        self._awake.set()

    async def run(self) -> None:
        """The owner task. Waits for arrivals, timers and local calls; each of them, and `stop`, wakes it."""
        while True:
            await self._awake.wait()
            self._awake.clear()
            if self._stopped:
                return
            arrived = self._take(STEP_LIMIT)
            self.endpoint.on_step()
            if arrived == STEP_LIMIT or self._pending():
                self._awake.set()
                await asyncio.sleep(0)

    @abstractmethod
    def send(self, route: bytes, message: AnyMessage, body: Body = None) -> bool:
        """Send without waiting. False: the route leads nowhere (hubs only; a client's messages queue up)."""

    @abstractmethod
    def discard_unsent(self) -> None:
        """Forget what waits for a connection: a hello makes it pointless."""

    @abstractmethod
    def close(self, linger_ms: int) -> None: ...

    @abstractmethod
    def _take(self, limit: int) -> int:
        """Hand over up to `limit` arrived messages without waiting; return how many."""

    @abstractmethod
    def _pending(self) -> bool:
        """Whether something has arrived that no wake-up will announce."""


class Fabric(Protocol):
    """Makes links. One per node."""

    def bind(self, text: str, endpoint: Endpoint, max_message_bytes: int, decode: Decode) -> Link: ...

    def connect(self, text: str, endpoint: Endpoint, decode: Decode) -> Link: ...

    async def close(self) -> None:
        """After all links are closed."""
