"""The producing end of a stream."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Generic, TypeVar, cast

from transport.codec import Codec, checksum, total
from transport.core.custody import Body
from transport.core.producer import Parcel, ProducerCore
from transport.errors import MessageInvalid, MessageTooLarge, UsageError
from transport.ports.endpoint import PeerPort
from transport.wire import FRAMES_LIMIT, KEY_LIMIT, AnyMessage, FromHub

T = TypeVar("T")


class Outlet(PeerPort[ProducerCore], Generic[T]):
    """Made by `Node.outlet`. Safe to be used by several tasks of one loop; messages leave in the order of the calls."""

    def __init__(self, address: str, stream: str, core: ProducerCore, codec: Codec[T]) -> None:
        super().__init__(address, f"outlet of stream {stream!r}", core)
        self._stream = stream
        self._codec = codec
        self._senders: dict[Parcel, asyncio.Future[None]] = {}
        self._idle = asyncio.Event()

    async def send(self, message: T, key: str) -> None:
        """Hand over: returns once the hub has custody. Waits for credit and for the hub; a refusal unblocks it.

        Cancelling withdraws the message if it has not gone out yet; otherwise it is delivered all the same.
        Raises MessageTooLarge, MessageInvalid, StreamFinished, LinkRefused, LinkLost.
        """
        self.check_process()
        if self.closed or self.session.leaving:
            raise UsageError(f"{self.name} at {self.address} is closed; send inside `async with Node`")
        if (fault := self.fault()) is not None:
            raise fault
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
        parcel = self.core.offer(key, size, checksum(*frames), frames)
        accepted: asyncio.Future[None] = self.loop.create_future()
        self._senders[parcel] = accepted
        self.link.wake()
        try:
            await accepted
        finally:
            self._senders.pop(parcel, None)
            if not parcel.accepted:
                self.core.withdraw(parcel)

    async def close(self, *, blame: bool = False, timeout_s: float = 1.5) -> None:
        """Wait until the hub has everything that went out (at most `timeout_s`), say goodbye, leave."""
        if self.closed:
            return
        with contextlib.suppress(TimeoutError):  # the hub may be gone; unaccepted messages were never promised
            async with asyncio.timeout(timeout_s):
                if self.fault() is None:
                    self._note_idle()
                    await self._idle.wait()
                self.core.fin(self.loop.time())
                self.flush(self.loop.time())
                await self.left()
        self.shut(1000)
        self._fail_senders(UsageError(f"{self.name} at {self.address} was closed while sending"))

    # Driven by the owner task.

    def on_message(self, route: bytes, message: AnyMessage, body: Body) -> None:
        self.core.on_message(self.loop.time(), cast(FromHub, message))

    def flush(self, now: float) -> None:
        self.send_all(self.core.flush(now))
        self.note_session()
        for parcel in self.core.accepted:
            sender = self._senders.pop(parcel, None)
            if sender is not None and not sender.done():
                sender.set_result(None)
        self.core.accepted.clear()
        if self._senders:
            fault = self.fault()
            if fault is not None:
                self._fail_senders(fault)
        self._note_idle()

    def _note_idle(self) -> None:
        if self.core.idle:
            self._idle.set()
        else:
            self._idle.clear()

    def _fail_senders(self, error: Exception) -> None:
        for sender in self._senders.values():
            if not sender.done():
                sender.set_exception(error)
        self._senders.clear()
