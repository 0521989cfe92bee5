"""How typed messages move between stages: streams with credit and leases, a latest-value topic, bytes by name.

Knows no stage and no tensor. Start at `Node`; the protocol itself is in `transport.core`, as pure state machines.
"""

from transport.core.byte_transfer import Blob, Transfer
from transport.errors import (
    AddressError,
    AddressInUse,
    AddressInvalid,
    AddressRefused,
    BlobGone,
    DecodeError,
    LinkError,
    LinkLost,
    LinkRefused,
    MessageError,
    MessageInvalid,
    MessageTooLarge,
    SecurityError,
    StreamFinished,
    TransportError,
    UsageError,
)
from transport.links.security import Security
from transport.node import Node
from transport.ports.byte_transfer import ByteClient, ByteServer
from transport.ports.hub import Hub
from transport.ports.stream import Inlet, Outlet
from transport.ports.topic import TopicClient, TopicServer
from transport.spec import DeadLetter, Held, HubStats, StreamSpec

__all__ = [
    "AddressError",
    "AddressInUse",
    "AddressInvalid",
    "AddressRefused",
    "Blob",
    "BlobGone",
    "ByteClient",
    "ByteServer",
    "DeadLetter",
    "DecodeError",
    "Held",
    "Hub",
    "HubStats",
    "Inlet",
    "LinkError",
    "LinkLost",
    "LinkRefused",
    "MessageError",
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
    "Transfer",
    "TransportError",
    "UsageError",
]
