"""The ports of a stream: an outlet sends, an inlet receives under lease, and the hub hosts the stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Generic, TypeVar, cast

from transport.bodies import body_frames, packed, unpacked
from transport.codec import Codec, checksum, total
from transport.core.hub import HubCore, Send
from transport.core.peers import ConsumerCore, Delivery, ProducerCore, Verdict
from transport.errors import DecodeError, MessageInvalid, MessageTooLarge, UsageError
from transport.port import CorePort, PeerPort
from transport.spec import DeadLetter, Held, HubStats
from transport.wire import FRAMES_LIMIT, KEY_LIMIT, AnyMessage, Body, FromHub, Put, ToHub, encode

T = TypeVar("T")


class Outlet(PeerPort[ProducerCore], Generic[T]):
    """Made by `Node.outlet`. Safe to be used by several tasks of one loop; messages leave in the order of the calls."""

    def __init__(self, address: str, stream: str, core: ProducerCore, codec: Codec[T]) -> None:
        super().__init__(address, f"outlet of stream {stream!r}", core)
        self._stream, self._codec = stream, codec

    async def send(self, message: T, key: str) -> None:
        """Hand over: returns once the hub has custody. Waits for credit and for the hub; a refusal unblocks it.

        Cancelling withdraws the message if it has not gone out yet; otherwise it is delivered all the same.
        Raises MessageTooLarge, MessageInvalid, StreamFinished, LinkRefused, LinkLost.
        """
        self.check_usable()
        if not key or len(key) > KEY_LIMIT:
            raise MessageInvalid(f"key {key[:40]!r} has {len(key)} characters; use 1 to {KEY_LIMIT}")
        frames = self._codec.encode(message)
        if len(frames) > FRAMES_LIMIT:
            raise MessageInvalid(
                f"message {key!r} has {len(frames) - 1} extras, at most {FRAMES_LIMIT - 1} travel with it; send less"
            )
        size, limit = total(frames), self.session.max_message_bytes
        if size > limit:
            raise MessageTooLarge(
                f"message {key!r} has {size} bytes, max_message_bytes of stream {self._stream!r} is {limit}; "
                f"raise it or send less"
            )
        parcel = self.core.offer(key, size, checksum(*frames), frames if len(frames) > 1 else frames[0])
        try:
            await self.promised(parcel)
        finally:
            if not parcel.accepted:
                self.core.withdraw(parcel)

    async def close(self, *, blame: bool = False, timeout_s: float = 1.5) -> None:
        """Wait until the hub has everything that went out (at most `timeout_s`), say goodbye, leave."""
        if self.closed:
            return
        self.core.fin(self.now())
        await self.leave(timeout_s)  # the hub may be gone; unaccepted messages were never promised
        self.break_promises(UsageError(f"{self.name} at {self.address} was closed while sending"))

    # Driven by the owner task.

    def on_message(self, route: bytes, message: AnyMessage, body: Body) -> None:
        self.core.on_message(self.now(), cast(FromHub, message))

    def flush(self, now: float) -> None:
        self.send_all(self.core.flush(now))
        self.note_session()
        for parcel in self.core.accepted:
            self.keep(parcel)
        self.core.accepted.clear()
        if (fault := self.fault()) is not None:
            self.break_promises(fault)


class LeaseHandle(Generic[T]):
    """One message in this replica's care; satisfies the stages' Lease. `settle` gets its one verdict: None for done, or
    why it is refused. `give_back` returns a message of a hub that no stage has begun: another consumer gets it."""

    __slots__ = ("_settle", "_settled", "attempt", "give_back", "key", "message")

    def __init__(
        self,
        message: T,
        key: str,
        attempt: int,
        settle: Callable[[str | None], None],
        give_back: Callable[[], None] | None = None,
    ) -> None:
        self.message, self.key, self.attempt, self.give_back = message, key, attempt, give_back
        self._settle, self._settled = settle, False

    def done(self) -> None:
        """Release the message for good. Travels with the next batch; repeated until the hub confirms."""
        self._verdict(None)

    def poison(self, reason: str) -> None:
        """Refuse for good: the hub dead-letters it."""
        self._verdict(reason)

    def _verdict(self, refused: str | None) -> None:
        if self._settled:
            raise UsageError(f"message {self.key!r} was settled before; give each lease exactly one verdict")
        self._settled = True
        self._settle(refused)


class Inlet(PeerPort[ConsumerCore], Generic[T]):
    """Made by `Node.inlet`. Safe to be used by several tasks of one loop."""

    def __init__(self, address: str, stream: str, core: ConsumerCore, codec: Codec[T]) -> None:
        super().__init__(address, f"inlet of stream {stream!r}", core)
        self._codec = codec
        self._receivers: deque[asyncio.Future[None]] = deque()

    async def receive(self) -> LeaseHandle[T] | None:
        """Next message, or None once the stream is finished and empty, or this inlet drained.

        Waits for a delivery; END, drain, a refusal, a lost link and closing unblock it too. Cancelling leaves the
        message in the queue. What does not decode is dead-lettered and skipped.
        """
        self.check_process()
        while True:
            while (delivery := self.core.take()) is not None:
                if (lease := self._open_lease(delivery)) is not None:
                    return lease
            if self.core.ended or self.core.draining:
                return None
            if self.closed:
                raise UsageError(f"{self.name} at {self.address} is closed; receive inside `async with Node`")
            if (fault := self.fault()) is not None:
                raise fault
            await self._delivered()

    async def drain(self) -> None:
        """Hand back what was not started and take nothing more; `receive` returns None. For scaling down."""
        if not self.core.draining:
            self.core.drain()
            self.link.wake()
            self._wake(None)

    async def close(self, *, blame: bool = False, timeout_s: float = 1.5) -> None:
        """Hand everything back and leave, waiting `timeout_s` at most. `blame`: what was started here has failed."""
        if self.closed:
            return
        self.core.fin(self.now(), blame=blame)
        await self.leave(timeout_s)  # if the hub is gone, the lease settles it
        self._wake(None)

    # Driven by the owner task.

    def on_message(self, route: bytes, message: AnyMessage, body: Body) -> None:
        now = self.now()
        for part, its_body in unpacked(message, body):
            self.core.on_message(now, cast(FromHub, part), its_body)

    def flush(self, now: float) -> None:
        self.send_all(self.core.flush(now))
        self.note_session()
        if self._receivers:
            over = self.core.ended or self.core.draining or self.closed or self.fault() is not None
            self._wake(None if over else len(self.core.ready))

    async def _delivered(self) -> None:
        """Wait to be woken, then look again. Cancelling gives the wake-up to another receiver."""
        receiver: asyncio.Future[None] = self.loop.create_future()
        self._receivers.append(receiver)
        try:
            await receiver
        except asyncio.CancelledError:
            if receiver.done() and not receiver.cancelled():
                self._wake(1)
            raise
        finally:
            if not receiver.done() or receiver.cancelled():
                with contextlib.suppress(ValueError):  # already popped by `_wake`
                    self._receivers.remove(receiver)

    def _wake(self, count: int | None) -> None:
        """Wake so many receivers; None: all."""
        woken = 0
        while self._receivers and (count is None or woken < count):
            receiver = self._receivers.popleft()
            if not receiver.done():
                receiver.set_result(None)
                woken += 1

    def _open_lease(self, delivery: Delivery) -> LeaseHandle[T] | None:
        if self.core.urgent:
            self.flush(self.now())  # before the application can block or kill this process
        self.link.wake()
        work = delivery.work
        try:
            message = self._codec.decode(body_frames(delivery.body), work.size, work.checksum)
        except DecodeError as error:
            self._settle(delivery, f"quarantined at {self.session.hello.replica}: {error}")
            return None
        delivery.body = None
        back = partial(self._settle, delivery, None, "returned")
        return LeaseHandle(message, work.key, delivery.attempt, partial(self._settle, delivery), back)

    def _settle(self, delivery: Delivery, refused: str | None, unrefused: Verdict = "done") -> None:
        if not delivery.settled:  # else handed back at closing: the hub gives it to another consumer
            self.core.settle(delivery, unrefused if refused is None else "poison", refused or "")
            self.link.wake()


PROBE_DELAYS_S = (0.01, 0.1)  # a broken connection is reported a moment before its route is closed


class Hub(CorePort):
    """Made by `Node.hub`; lives until its node closes."""

    def __init__(self, core: HubCore, on_dead_letter: Callable[[DeadLetter], None]) -> None:
        super().__init__()
        self.core = self.timed = core
        self._on_dead_letter = on_dead_letter
        self._empty = asyncio.Event()
        self._peerless = asyncio.Event()

    def stats(self) -> HubStats:
        return self.core.stats()

    def held(self) -> list[Held]:
        """All messages in custody, and who has had each of them for how long."""
        return self.core.custody.held(self.now())

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
            self._empty.clear()
            await self._empty.wait()

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
        self._empty.set()

    # Driven by the owner task.

    def on_message(self, route: bytes, message: AnyMessage, body: Body) -> None:
        now = self.now()
        for part, its_body in unpacked(message, body):
            if isinstance(part, Put) and (its_body is None or total(body_frames(its_body)) != part.size):
                reason = f"body is not of the {part.size} bytes that its header says"
                self._quarantine(route, part.key, encode(part), its_body, reason)
            else:
                self.core.on_message(now, route, cast(ToHub, part), its_body)

    def on_malformed(self, route: bytes, frame: bytes) -> None:
        self._quarantine(route, "", frame[:4096], None, f"a frame of {len(frame)} bytes is no message of this protocol")

    def on_link_down(self) -> None:
        for delay_s in PROBE_DELAYS_S:
            self.loop.call_later(delay_s, self._probe)

    def flush(self, now: float) -> None:
        self._send_all(now, self.core.flush(now))
        letters, self.core.custody.letters = self.core.custody.letters, []
        for letter, body in letters:
            self._on_dead_letter(replace(letter, body=b"".join(body_frames(body))))
        if not self.core.custody.items:
            self._empty.set()
        if self.core.closing and self.core.peerless:
            self._peerless.set()

    def _send_all(self, now: float, out: list[Send]) -> None:
        for route, message, body in packed(out):
            if not self.link.send(route, message, body):
                self.core.on_unreachable(now, route)

    def _probe(self) -> None:
        if not self.closed:
            self._send_all(self.now(), self.core.probe())
            self.link.wake()

    def _quarantine(self, route: bytes, key: str, header: bytes, body: Body, reason: str) -> None:
        self.core.malformed += 1
        if self.core.knows(route):  # unknown peers are only counted, so that they cannot flood the callback
            letter = DeadLetter(self.core.spec.name, key, header, b"".join(body_frames(body)), f"quarantined: {reason}")
            self._on_dead_letter(letter)
