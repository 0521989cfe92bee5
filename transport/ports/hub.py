"""The hub of a stream in the process that hosts it: the core, a link, dead letters, and waiting tasks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import cast

from transport.codec import total
from transport.core.custody import Body
from transport.core.hub import HubCore, Send
from transport.ports.endpoint import CorePort, body_frames
from transport.spec import DeadLetter, Held, HubStats
from transport.wire import AnyMessage, Put, ToHub, encode

PROBE_DELAYS_S = (0.01, 0.1)  # a broken connection is reported a moment before its route is closed


class Hub(CorePort):
    """Made by `Node.hub`; lives until its node closes."""

    def __init__(self, core: HubCore, on_dead_letter: Callable[[DeadLetter], None]) -> None:
        super().__init__()
        self.core = core
        self._on_dead_letter = on_dead_letter
        self._empty_waiters: list[asyncio.Future[None]] = []
        self._peerless = asyncio.Event()

    @property
    def address(self) -> str:
        """Where peers connect."""
        return self.link.address

    def stats(self) -> HubStats:
        return self.core.stats()

    def held(self) -> list[Held]:
        """All messages in custody, and who has had each of them for how long."""
        return self.core.custody.held(self.loop.time())

    def finish(self) -> None:
        """Nothing more will be sent: consumers get END as soon as everything is settled."""
        self.core.finish()
        self.link.wake()

    def peer_lost(self, replica: str, *, blame: bool = True) -> None:
        """The replica's process is known to be dead: release its leases and credit now. What it sent and was not
        accepted by now never is. `blame`: what it had started may have killed it."""
        self.core.peer_lost(replica, blame=blame)
        self.link.wake()

    async def wait_empty(self) -> None:
        """Wait until nothing is in custody. Unblocked by the last verdict, or by closing."""
        while self.core.custody.items and not self.closed:
            waiter: asyncio.Future[None] = self.loop.create_future()
            self._empty_waiters.append(waiter)
            await waiter

    async def close(self, *, blame: bool = False, timeout_s: float = 1.5) -> None:
        """Say goodbye to all peers and wait for their answers, at most `timeout_s`."""
        if self.closed:
            return
        self.core.close()
        self.link.wake()
        with contextlib.suppress(TimeoutError):  # a peer that is gone answers nothing
            async with asyncio.timeout(timeout_s):
                await self._peerless.wait()
        self.shut(1000)
        self._wake_empty()

    # Driven by the owner task.

    def on_message(self, route: bytes, message: AnyMessage, body: Body) -> None:
        size = message.size if isinstance(message, Put) else 0
        if isinstance(message, Put) and (body is None or total(body_frames(body)) != size):
            self.core.malformed += 1
            if self.core.knows(route):  # unknown peers are only counted, so that they cannot flood the callback
                reason = f"body is not of the {size} bytes that its header says"
                self._quarantine(message.key, encode(message), body, reason)
            return
        self.core.on_message(self.loop.time(), route, cast(ToHub, message), body)

    def on_malformed(self, route: bytes, frame: bytes) -> None:
        self.core.malformed += 1
        if self.core.knows(route):
            self._quarantine("", frame[:4096], None, f"a frame of {len(frame)} bytes is no message of this protocol")

    def on_link_down(self) -> None:
        super().on_link_down()
        for delay_s in PROBE_DELAYS_S:
            self.loop.call_later(delay_s, self._probe)

    def flush(self, now: float) -> None:
        self._send_all(now, self.core.flush(now))
        letters, self.core.custody.letters = self.core.custody.letters, []
        for letter, body in letters:
            self._on_dead_letter(replace(letter, body=b"".join(body_frames(body))))
        if not self.core.custody.items:
            self._wake_empty()
        if self.core.closing and self.core.peerless:
            self._peerless.set()

    def core_timer(self, now: float) -> None:
        self.core.on_timer(now)

    def core_deadline(self) -> float | None:
        return self.core.deadline()

    def _send_all(self, now: float, out: list[Send]) -> None:
        for route, message, body in out:
            if not self.link.send(route, message, body):
                self.core.on_unreachable(now, route)

    def _probe(self) -> None:
        if not self.closed:
            self._send_all(self.loop.time(), self.core.probe())
            self.link.wake()

    def _quarantine(self, key: str, header: bytes, body: Body, reason: str) -> None:
        letter = DeadLetter(self.core.spec.name, key, header, b"".join(body_frames(body)), f"quarantined: {reason}")
        self._on_dead_letter(letter)

    def _wake_empty(self) -> None:
        waiters, self._empty_waiters = self._empty_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
