"""How typed messages move between stages: streams with credit and leases, a latest-value topic, bytes by name.

Knows no stage and no tensor. Start at `Node`; `transport.core` has the protocol itself, as state
machines without I/O, clock, randomness or asyncio. Each machine is fed by `on_message(now, ...)` and `on_timer(now)`,
gives what it wants sent by `flush(now)`, and says by `deadline()` when it wants its timer. The shells drive them with
sockets, the tests with virtual time.

Glossary
    chain        neighbouring stages of one process, whose streams are calls (transport/chain.py)
    stream       one edge of the graph: producers send, consumers receive
    hub          the server of one stream, in the controller's process
    custody      a hub's promise to keep a message from ACCEPTED to its verdict
    lease        a message that is handed to one consumer until its verdict
    verdict      done, poison (dead letter) or returned (to be delivered again); done and poison settle a message
    credit       how much a peer may still send, in items and bytes, as absolute counters
    window       how much a consumer may hold
    beat         a peer's periodic message; a consumer's beat lists all that it holds
    epoch        number of a hub's incarnation; a session is that of one peer within it
    incarnation  name of one life of a peer; replica is its name over all lives
    topic        newest value of each key, shared by all processes of a run
"""

from transport.awake import awake_clock
from transport.byte_transfer import ByteClient, ByteServer
from transport.chain import ChainLink, EntryInlet
from transport.errors import (
    AddressInUse,
    AddressInvalid,
    AddressRefused,
    BlobGone,
    LinkError,
    LinkLost,
    LinkRefused,
    MessageInvalid,
    MessageTooLarge,
    SecurityError,
    StreamFinished,
    TransportError,
    UsageError,
)
from transport.node import Node
from transport.security import Security
from transport.spec import DeadLetter, Held, StreamSpec
from transport.stream import Hub, Inlet, Outlet
from transport.topic import TopicClient, TopicServer

__all__ = [
    "AddressInUse",
    "AddressInvalid",
    "AddressRefused",
    "BlobGone",
    "ByteClient",
    "ByteServer",
    "ChainLink",
    "DeadLetter",
    "EntryInlet",
    "Held",
    "Hub",
    "Inlet",
    "LinkError",
    "LinkLost",
    "LinkRefused",
    "MessageInvalid",
    "MessageTooLarge",
    "Node",
    "Outlet",
    "Security",
    "SecurityError",
    "StreamFinished",
    "StreamSpec",
    "TopicClient",
    "TopicServer",
    "TransportError",
    "UsageError",
    "awake_clock",
]
