"""How typed messages move between stages: streams with credit and leases, and a latest-value topic.

Knows no stage and no tensor. Start at `Node`; the protocol itself is in `transport.core`, as pure state machines.
"""

from transport.errors import (
    AddressError,
    AddressInUse,
    AddressInvalid,
    AddressRefused,
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
from transport.hub import Hub
from transport.inlet import Inlet
from transport.node import Node
from transport.outlet import Outlet
from transport.security import Security
from transport.spec import DeadLetter, HubStats, StreamSpec
from transport.topic import TopicClient, TopicServer

__all__ = [
    "AddressError",
    "AddressInUse",
    "AddressInvalid",
    "AddressRefused",
    "DeadLetter",
    "DecodeError",
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
    "TransportError",
    "UsageError",
]
