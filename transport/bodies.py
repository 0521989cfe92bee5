"""Bodies as they travel: their frames, and batches.

Small messages that leave together travel as one: one header for all, and one frame with their bodies end to end.

Nothing waits for others to come: a batch is what one flush has ready. The messages to one peer keep their order.
"""

from __future__ import annotations

from collections.abc import Iterable

import zmq

from transport.codec import Buffer, Frames
from transport.wire import AnyMessage, Body, Put, Puts, Work, Works

SMALL_BYTES = 8 << 10  # a larger body is cheaper in a frame of its own than joined and cut
BATCH_ITEMS = 64  # headers with the longest keys, and bodies, stay below the limits of a frame

Outgoing = tuple[bytes, AnyMessage, Body]
Run = list[tuple[Put | Work, bytes]]


def body_frames(body: Body) -> Frames:
    """The bytes of a body: one frame, or a tuple of frames."""
    frames = body if isinstance(body, tuple) else (body,)
    return tuple(frame.buffer if isinstance(frame, zmq.Frame) else frame or b"" for frame in frames)


def body_buffer(body: Body) -> Buffer:
    """The bytes of a body of one frame."""
    return body_frames(body)[0]


def packed(out: Iterable[Outgoing]) -> list[Outgoing]:
    """The same messages, with small ones that follow each other to one peer as one."""
    sent: list[Outgoing] = []
    runs: dict[bytes, Run] = {}
    for route, message, body in out:
        small = isinstance(message, Put | Work) and isinstance(body, bytes) and len(body) < SMALL_BYTES
        if small:
            runs.setdefault(route, []).append((message, body))
        if route in runs and (not small or len(runs[route]) == BATCH_ITEMS):
            sent.append(_joined(route, runs.pop(route)))
        if not small:
            sent.append((route, message, body))
    return sent + [_joined(route, run) for route, run in runs.items()]


def unpacked(message: AnyMessage, body: Body) -> Iterable[tuple[AnyMessage, Body]]:
    """The messages of a batch. Each body is a copy, so that none keeps the memory of all; one that is shorter or longer
    than its header says is told by its size."""
    if not isinstance(message, Puts | Works):
        return ((message, body),)
    data, start, parts = body_buffer(body), 0, list[tuple[AnyMessage, Body]]()
    for part in message.parts:
        end = start + part.size
        parts.append((part, bytes(data[start : end if len(parts) + 1 < len(message.parts) else None])))
        start = end
    return parts


def _joined(route: bytes, run: Run) -> Outgoing:
    if len(run) == 1:
        return route, *run[0]
    parts, bodies = zip(*run, strict=True)
    kind = Puts if isinstance(parts[0], Put) else Works
    return route, kind(parts), b"".join(bodies)
