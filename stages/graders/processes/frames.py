"""What the pool and a worker process say to each other, and the frames it travels in: a chunk to grade in order, and
its grades.

A frame is a 4-byte little-endian length and that many bytes of msgpack. The worker's first frame is empty: it is ready.
Beside the frames, the worker keeps four 64-bit integers in shared memory: [0] the position in the chunk that it is
working on (or LOADING, IDLE), [1] when it began with that (monotonic clock, ns, one clock for all processes of a
machine), [2] how much processor time it had used by then (ns), [3] its process number. It writes [0] last, so that a
reader never sees a new position with an old time.
"""

from __future__ import annotations

import struct

import msgspec
from msgspec import Struct

from stages.graders.grade import Grade, GradeRequest, clean

LENGTH = struct.Struct("<I")
PROGRESS_BYTES = 32
LOADING = -1  # importing a grader that was not used before
IDLE = -2


class Reply(Struct, array_like=True):
    """The next grades of the chunk. A worker that retires ends the chunk early, and grades nothing more."""

    grades: list[Grade]
    done: bool
    retire: bool = False
    seconds: float = 0.0  # the whole chunk took, set when done


_encoder = msgspec.msgpack.Encoder()
decode_work = msgspec.msgpack.Decoder(list[GradeRequest]).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode


def frame(message: list[GradeRequest] | Reply) -> bytes:
    """A message as a frame."""
    buffer = bytearray(LENGTH.size)
    _encoder.encode_into(message, buffer, LENGTH.size)
    LENGTH.pack_into(buffer, 0, len(buffer) - LENGTH.size)
    return bytes(buffer)


def work_frame(items: list[GradeRequest]) -> bytes:
    """A chunk as a frame; text that is no valid Unicode is repaired, and only then looked at one by one."""
    try:
        return frame(items)
    except UnicodeEncodeError:
        return frame([_repaired(item) for item in items])


def _repaired(item: GradeRequest) -> GradeRequest:
    return msgspec.structs.replace(
        item,
        grader=clean(item.grader),
        response=clean(item.response),
        label=None if item.label is None else clean(item.label),
        metadata=clean(item.metadata),
        responses=tuple(clean(response) for response in item.responses),
        prompt=clean(item.prompt),
    )
