"""The conformance suite on every kind of link: a new kind of link is trusted when it passes, and not before.

Each test uses only what `Node` promises. Nothing measures time: the limits only turn a hang into a failure.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.transport.conformance_departures import DepartureConformance, ExtrasConformance
from tests.transport.conformance_net import Net
from tests.transport.conformance_streams import StreamConformance
from tests.transport.conformance_topics import ByteConformance, TopicConformance
from tests.transport.memory_link import MemoryNetwork, MemoryNode
from transport import Node
from transport.security import create_keys, load_security


class PortConformance(StreamConformance, DepartureConformance, ExtrasConformance, TopicConformance, ByteConformance):
    """Everything. The subclass gives the fixture `net`."""


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """pytest's own directories are too deep for a socket path."""
    with tempfile.TemporaryDirectory(prefix="t") as directory:
        yield Path(directory)


class TestMemory(PortConformance):
    @pytest.fixture
    def net(self) -> Net:
        network = MemoryNetwork()
        return Net(lambda: MemoryNode("run", "node", network), lambda name: name)


class TestInproc(PortConformance):
    @pytest.fixture
    def net(self) -> Net:
        numbers = itertools.count()
        return Net(lambda: Node("run", "node"), lambda name: f"inproc://{name}{next(numbers)}", rebinds=False)


class TestIpc(PortConformance):
    @pytest.fixture
    def net(self, short_dir: Path) -> Net:
        return Net(lambda: Node("run", "node"), lambda name: f"ipc://{short_dir}/{name}")


class TestTcp(PortConformance):
    @pytest.fixture
    def net(self) -> Net:
        return Net(lambda: Node("run", "node"), lambda name: "tcp://127.0.0.1:0")


class TestCurve(PortConformance):
    @pytest.fixture
    def net(self, short_dir: Path) -> Net:
        create_keys(short_dir / "keys", [])
        security = load_security(short_dir / "keys")
        return Net(lambda: Node("run", "node", security), lambda name: "tcp://127.0.0.1:0")
