"""One conformance suite for every kind of link. Subclass `PortConformance` and give a fixture `net`.

Each test uses only what `Node` promises, so a new kind of link is trusted when it passes and not before. Nothing here
measures time: the limits only turn a hang into a failure.
"""

from __future__ import annotations

from transport.testing.bytes import ByteConformance
from transport.testing.departures import DepartureConformance
from transport.testing.extras import ExtrasConformance
from transport.testing.net import Net
from transport.testing.streams import StreamConformance
from transport.testing.topics import TopicConformance

__all__ = ["Net", "PortConformance"]


class PortConformance(StreamConformance, DepartureConformance, ExtrasConformance, TopicConformance, ByteConformance):
    """Everything. The subclass gives the fixture `net`."""
