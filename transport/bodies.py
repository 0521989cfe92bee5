"""Bodies as they travel: their frames, and batches.

Messages that leave together travel as one: one header for all, one frame with the small bodies end to end, and a frame
for each other body.

Nothing waits for others to come: a batch is what one flush has ready. The messages to one peer keep their order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import zmq

from transport.codec import Buffer, Frames
from transport.wire import AnyMessage, Body, Put, Puts, Work, Works

SMALL_BYTES = 8 << 10  # part of the protocol; a larger body is cheaper in a frame of its own than joined and cut
FITS_BYTES = 128 << 10  # a larger message goes alone, so that it is worked on while the next arrives
BATCH_BYTES = 256 << 10  # enough for a batch; one that comes to it is sent
BATCH_ITEMS = 64  # headers with the longest keys stay below their limit

Outgoing = tuple[bytes, AnyMessage, Body]
Batch = list[tuple[Any, Any]]  # messages and bodies, all Put or all Work


def body_frames(body: Body) -> Frames:
    """The bytes of a body: one frame, or a tuple of frames."""
    if isinstance(body, bytes):
        return (body,)
    frames = body if isinstance(body, tuple) else (body,)
    return tuple(frame.buffer if isinstance(frame, zmq.Frame) else frame or b"" for frame in frames)


def body_buffer(body: Body) -> Buffer:
    """The bytes of a body of one frame."""
    return body_frames(body)[0]


def packed(out: Iterable[Outgoing]) -> list[Outgoing]:
    """The same messages, with those that follow each other to one peer as one, but large ones."""
    sent: list[Outgoing] = []
    batches: dict[bytes, tuple[Batch, int]] = {}  # and their bytes
    for route, message, body in out:
        batch, size = batches.pop(route, ([], 0))
        fits = False
        if isinstance(message, Put | Work) and message.size <= FITS_BYTES and isinstance(body, bytes | zmq.Frame):
            fits, size = True, size + message.size
            batch.append((message, body))
        if fits and size < BATCH_BYTES and len(batch) < BATCH_ITEMS:
            batches[route] = batch, size
        elif batch:
            sent.append(_joined(route, batch))
        if not fits:
            sent.append((route, message, body))
    return sent + [_joined(route, batch) for route, (batch, _) in batches.items()]


def unpacked(message: AnyMessage, body: Body) -> Iterable[tuple[AnyMessage, Body]]:
    """The messages of a batch, or the one message. Small bodies are copies, so that none keeps the memory of others.
    A body that is missing is None or too short, which its receiver refuses."""
    if not isinstance(message, Puts | Works):
        return ((message, body),)
    first, *rest = body if isinstance(body, tuple) else (body,)
    small, large, start = body_buffer(first), iter(rest), 0
    parts: list[tuple[AnyMessage, Body]] = []
    for part in message.parts:
        if part.size < SMALL_BYTES:
            parts.append((part, bytes(small[start : start + part.size])))
            start += part.size
        else:
            parts.append((part, next(large, None)))
    return parts


def _joined(route: bytes, batch: Batch) -> Outgoing:
    if len(batch) == 1:
        return route, *batch[0]
    small: bytes = b"".join(body for part, body in batch if part.size < SMALL_BYTES)
    large = [body for part, body in batch if part.size >= SMALL_BYTES]
    kind = Puts if isinstance(batch[0][0], Put) else Works
    return route, kind(tuple(part for part, _ in batch)), (small, *large) if large else small
