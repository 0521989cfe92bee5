"""Ports and their links: what carries messages between a protocol core and its hub.

A link is the seam to the network; only its owner task touches it. A port drives a core by its link.

Invariant: everything that a protocol core does happens in the owner task, or in a synchronous call on the same loop
between two of its steps; so cores need no locks. After each step the core is flushed: no delay is ever added to
gather a batch, yet what came together is answered together.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, Protocol, TypeVar

from transport.awake import awake_clock
from transport.bodies import body_buffer as body_buffer
from transport.bodies import packed
from transport.core.session import PeerCore
from transport.errors import LinkError, LinkLost, LinkRefused, StreamFinished, UsageError
from transport.wire import AnyMessage, Body, Hello, ToHub, ToTopic

Decode = Callable[[bytes], AnyMessage]

STEP_LIMIT = 256  # messages taken before other tasks get their turn
FORKED = "this process was forked after its node was opened, so nothing would arrive; spawn instead"


class Link(ABC):
    """The connection of one port. Each node makes its own kind."""

    def __init__(self, endpoint: CorePort) -> None:
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
            if arrived >= STEP_LIMIT or self._pending():
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
        """Hand over arrived messages without waiting, until they are `limit` or a batch more; return how many."""

    @abstractmethod
    def _pending(self) -> bool:
        """Whether something has arrived that no wake-up will announce."""


C = TypeVar("C", bound=PeerCore)


class Timed(Protocol):
    """What has a timer, by the clock of the port."""

    def on_timer(self, now: float) -> None: ...
    def deadline(self) -> float | None: ...


class CorePort(ABC):
    """Drives one core with the clock of the time awake. The timer only wakes the owner task, which does the rest."""

    link: Link
    timed: Timed | None = None  # topic and byte servers have none: their clients ask again

    def __init__(self) -> None:
        self.address = ""  # where peers connect, or where this one does
        self.loop = asyncio.get_running_loop()
        self.clock = awake_clock()
        self.closed = False
        self.malformed = 0
        self.link_ups = 0
        self.link_refusal: str | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._pid = os.getpid()

    @abstractmethod
    def on_message(self, route: bytes, message: AnyMessage, body: Body) -> None:
        """A message of the protocol arrived."""

    @abstractmethod
    async def close(self, *, blame: bool = False, timeout_s: float = 1.5) -> None:
        """Leave in good order, within the time."""

    def now(self) -> float:
        """Seconds, without the time in which this process could not listen."""
        return self.clock.now(self.loop.time())

    def on_step(self) -> None:
        """Everything that had arrived was handed over: run due timers and send what is due."""
        now = self.now()
        if self.timed is not None and (deadline := self.timed.deadline()) is not None and deadline <= now:
            self.timed.on_timer(now)
        self.flush(now)
        self.arm()

    def on_malformed(self, route: bytes, frame: bytes) -> None:
        """A frame that is no message of the protocol arrived. Counted only: a beat repairs what was lost."""
        self.malformed += 1

    def on_link_up(self) -> None:
        """The connection stands (again)."""
        self.link_ups += 1

    def on_link_down(self) -> None:  # noqa: B027
        """The connection broke; the link reconnects by itself."""

    def on_link_refused(self, reason: str) -> None:
        """The peer does not accept this node's keys."""
        self.link_refusal = reason

    def arm(self) -> None:
        """Plan the next wake-up; an earlier one that is planned already will do."""
        deadline = None if self.closed or self.timed is None else self.timed.deadline()
        if deadline is None:
            return
        if self._timer is not None:
            if self._timer.when() <= deadline + self.clock.asleep_s:
                return
            self._timer.cancel()
        self._timer = self.loop.call_at(deadline + self.clock.asleep_s, self._alarm)

    def _alarm(self) -> None:
        self._timer = None
        self.link.wake()

    def check_process(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError(FORKED)

    def shut(self, linger_ms: int) -> None:
        """Release the link for good, without handshake. Nothing happens the second time."""
        if self.closed:
            return
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
        self.link.stop()
        self.link.close(linger_ms)

    @abstractmethod
    def flush(self, now: float) -> None:
        """Send what the core has due, and wake local waiters."""


class PeerPort(CorePort, Generic[C]):
    """A port whose core has a session with a hub or topic server."""

    def __init__(self, address: str, name: str, core: C) -> None:
        super().__init__()
        self.address = address
        self.name = name  # for messages: "inlet of stream 'x'"
        self.core = core
        self.session = self.timed = core.session
        self._opened = asyncio.Event()
        self._left = asyncio.Event()
        self._promises: dict[Hashable, asyncio.Future[None]] = {}  # of the hub, which a task waits for

    def on_link_up(self) -> None:
        super().on_link_up()
        if self.link_ups > 1:  # the first connection is greeted by `opened`, and may have been welcomed by now
            self.session.say_hello(self.now())

    def send_all(self, out: Sequence[tuple[ToHub | ToTopic, Body]]) -> None:
        for route, message, body in packed((b"", *sent) for sent in out):
            if isinstance(message, Hello):
                self.link.discard_unsent()
            self.link.send(route, message, body)

    def note_session(self) -> None:
        """Wake tasks that wait for the session to open, to end, or to fail."""
        if self.session.epoch is not None or self.fault() is not None:
            self._opened.set()
        if self.session.state == "left":
            self._left.set()

    def fault(self) -> LinkError | None:
        """Why this port cannot work, if it cannot."""
        refusal = self.session.refusal
        if refusal is not None:
            kind = StreamFinished if refusal.kind == "finished" else LinkRefused
            return kind(f"{self.name} at {self.address}: {refusal.reason}")
        if self.link_refusal is not None:
            return LinkRefused(
                f"{self.name} at {self.address} was refused: {self.link_refusal}; add the key, or use the right one"
            )
        if self.session.lost:
            return LinkLost(
                f"{self.name} at {self.address} has heard nothing for give_up_s={self.session.give_up_s}; "
                f"check that its hub is running and reachable"
            )
        return None

    def check_usable(self) -> None:
        """Raises UsageError or LinkError where this port cannot work (any more)."""
        self.check_process()
        if self.closed or self.session.leaving:
            raise UsageError(f"{self.name} at {self.address} is closed; use it inside `async with Node`")
        if (fault := self.fault()) is not None:
            raise fault

    async def promised(self, promise: Hashable) -> None:
        """Wait until the hub has kept a promise. Unblocked by `keep` and `break_promises`."""
        kept = self._promises[promise] = self.loop.create_future()
        self.link.wake()
        try:
            await kept
        finally:
            self._promises.pop(promise, None)

    def keep(self, promise: Hashable) -> None:
        kept = self._promises.get(promise)
        if kept is not None and not kept.done():
            kept.set_result(None)

    def break_promises(self, error: Exception) -> None:
        for kept in self._promises.values():
            if not kept.done():
                kept.set_exception(error)

    async def opened(self) -> None:
        """Wait for the welcome. Unblocked by it, by a refusal, or by give_up_s."""
        self.session.start(self.now())
        self.link.wake()
        await self._opened.wait()
        fault = self.fault()
        if fault is not None:
            raise fault

    async def leave(self, timeout_s: float) -> None:
        """Send the goodbye that the core has ready, wait `timeout_s` at most for its answer, and shut."""
        self.flush(self.now())
        self.link.wake()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._left.wait()
        self.shut(1000)
