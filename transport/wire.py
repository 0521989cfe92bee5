"""The control messages of a hop, of a topic and of a byte transfer: small msgpack headers, decoded by type only.

Invariants: field order is the protocol (append only, with defaults); a header never exceeds HEADER_LIMIT bytes except
for reports whose length is bounded by a consumer's window; counters of credit are absolute, so a grant may be lost or
repeated; a message that moves a body says its size and checksum, so that hubs never look inside.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

PROTOCOL = 4
HEADER_LIMIT = 1 << 20
KEY_LIMIT = 1024
REASON_LIMIT = 4000
CHUNK_LIMIT = 16 << 20
FRAMES_LIMIT = 1 << 16  # behind a header; each extra of a body, such as an image, is one

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Name = Annotated[str, Meta(max_length=KEY_LIMIT)]
Reason = Annotated[str, Meta(max_length=REASON_LIMIT)]
Role = Literal["producer", "consumer"]
Body = object  # opaque to the protocol: bytes in the tests, a zmq frame or a tuple of frames in the ports


class Refusal(Struct, frozen=True, array_like=True, gc=False):
    """A verdict other than done: `poison` dead-letters, `returned` blames no one."""

    id: Count
    attempt: Count
    kind: Literal["poison", "returned"]
    reason: Reason = ""


# From a peer to its hub; a topic gets the hello too.


class Hello(Struct, frozen=True, array_like=True, tag=1, gc=False):
    protocol: int
    run_id: Name
    stream: Name
    role: Role
    replica: Name
    incarnation: Name
    schema: Name
    schema_hash: Name
    low_seq: Count = 1  # a hub without memory of this producer gets no sequence number below


class Put(Struct, frozen=True, array_like=True, tag=2, gc=False):
    """A producer hands over a message; the body is the next frame."""

    seq: Count
    key: Name
    size: Count
    checksum: Count


class Puts(Struct, frozen=True, array_like=True, tag=8, gc=False):
    """Several messages at once; the small bodies lie end to end in the next frame, the others in one each."""

    parts: tuple[Put, ...]


class Ping(Struct, frozen=True, array_like=True, tag=3, gc=False):
    """A producer is alive and asks for its limits."""


class Report(Struct, frozen=True, array_like=True, tag=4, gc=False):
    """What a consumer did since the last report, and its absolute credit. With `held` it is a beat: a full account."""

    epoch: Count
    session: Count
    seen: Count  # newest delivery serial known here
    limit_items: int
    limit_bytes: int
    started: tuple[Count, ...] = ()
    done: tuple[Count, ...] = ()
    refused: tuple[Refusal, ...] = ()
    held: tuple[Count, ...] | None = None


class Drain(Struct, frozen=True, array_like=True, tag=5, gc=False):
    """Send me nothing more; what I have started I will finish."""


class Fin(Struct, frozen=True, array_like=True, tag=6, gc=False):
    """I am about to close. With `blame`, what was started here counts as failed."""

    blame: bool = False


class FinAck(Struct, frozen=True, array_like=True, tag=7, gc=False):
    """Nothing more will come from here: the peer may close."""


# From a hub to its peer.


class Welcome(Struct, frozen=True, array_like=True, tag=16, gc=False):
    epoch: Count  # differs for each incarnation of the hub: item ids are of one epoch
    session: Count  # differs whenever the hub had forgotten this peer: serials and limits are of one session
    lease_s: float
    max_message_bytes: Count
    limit_items: int
    limit_bytes: int
    sent_items: Count
    sent_bytes: Count
    low_seq: Count = 1  # from which a producer that the hub did not know numbers its messages


class Refuse(Struct, frozen=True, array_like=True, tag=17, gc=False):
    kind: Literal["refused", "finished"]
    reason: Reason


class Accepted(Struct, frozen=True, array_like=True, tag=18, gc=False):
    """The hub has custody of these messages; the producer's absolute limits."""

    epoch: Count
    seqs: tuple[Count, ...]
    limit_items: int
    limit_bytes: int


class Work(Struct, frozen=True, array_like=True, tag=19, gc=False):
    """A delivery under lease; the body is the next frame."""

    epoch: Count
    session: Count
    id: Count
    serial: Count  # counts deliveries to this consumer
    total_bytes: Count  # of all deliveries up to and with this one
    attempt: Count
    key: Name
    size: Count
    checksum: Count


class Works(Struct, frozen=True, array_like=True, tag=23, gc=False):
    """Several deliveries at once; their bodies lie as those of Puts do."""

    parts: tuple[Work, ...]


class Settled(Struct, frozen=True, array_like=True, tag=20, gc=False):
    """Verdicts that the hub has recorded. In answer to a beat it also says how far deliveries have gone."""

    epoch: Count
    session: Count
    ids: tuple[Count, ...]
    sent_items: int = -1
    sent_bytes: int = -1


class Who(Struct, frozen=True, array_like=True, tag=21, gc=False):
    """I do not know you (any more): say hello."""


class End(Struct, frozen=True, array_like=True, tag=22, gc=False):
    """The stream is finished, empty, and nothing is leased."""

    epoch: Count


# Topic.


class TopicPut(Struct, frozen=True, array_like=True, tag=33, gc=False):
    """Publish; the value is the next frame. `number` counts this client's publications."""

    number: Count
    key: Name


class TopicPing(Struct, frozen=True, array_like=True, tag=34, gc=False):
    """I am alive and hold this revision of this server incarnation."""

    epoch: Count
    revision: Count


class TopicSnapshot(Struct, frozen=True, array_like=True, tag=48, gc=False):
    """All entries. The next frame is a msgpack map of key to value."""

    epoch: Count
    revision: Count


class TopicChange(Struct, frozen=True, array_like=True, tag=49, gc=False):
    """One key changed; the value is the next frame, absent when dropped."""

    epoch: Count
    revision: Count
    key: Name
    dropped: bool = False


class TopicAck(Struct, frozen=True, array_like=True, tag=50, gc=False):
    """Publications up to this number are stored; also the answer to a ping."""

    epoch: Count
    number: Count
    revision: Count


# Byte transfer.


class ByteRequest(Struct, frozen=True, array_like=True, tag=64, gc=False):
    """Send me these bytes of a blob; of none, its size and generation. Complete in itself: it may be repeated."""

    protocol: int
    run_id: Name
    number: Count
    name: Name
    generation: Name  # empty: of whichever there is
    offset: Count
    size: Annotated[int, Meta(ge=0, le=CHUNK_LIMIT)]


class ByteChunk(Struct, frozen=True, array_like=True, tag=65, gc=False):
    """The requested bytes, in the next frame; fewer where the blob ends."""

    number: Count
    generation: Name
    total: Count  # size of the blob
    size: Count
    checksum: Count


class ByteRefusal(Struct, frozen=True, array_like=True, tag=66, gc=False):
    number: Count
    reason: Reason


ToHub = Hello | Put | Puts | Ping | Report | Drain | Fin | FinAck
FromHub = Welcome | Refuse | Accepted | Work | Works | Settled | Who | End | Fin | FinAck
ToTopic = Hello | TopicPut | TopicPing | Fin
FromTopic = TopicSnapshot | TopicChange | TopicAck | Refuse | Who | FinAck
FromBytes = ByteChunk | ByteRefusal
AnyMessage = ToHub | FromHub | ToTopic | FromTopic | ByteRequest | FromBytes

encode = msgspec.msgpack.Encoder().encode
decode_to_hub = msgspec.msgpack.Decoder(ToHub).decode
decode_from_hub = msgspec.msgpack.Decoder(FromHub).decode
decode_to_topic = msgspec.msgpack.Decoder(ToTopic).decode
decode_from_topic = msgspec.msgpack.Decoder(FromTopic).decode
decode_to_bytes = msgspec.msgpack.Decoder(ByteRequest).decode
decode_from_bytes = msgspec.msgpack.Decoder(FromBytes).decode
