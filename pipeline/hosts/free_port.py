"""Ports for servers that cannot choose one themselves and tell which.

A port that is only looked up is free until somebody else looks one up. So it is bound here, not listened on, until the
server that it is meant for listens: the kernel gives a bound port to nobody who asks for any free one, while a server
that asks for it by number, with SO_REUSEADDR as they all do, gets it.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

HOST = "127.0.0.1"


class PortInUse(OSError):
    """A port that was asked for by number is taken."""


@contextlib.contextmanager
def held_port(port: int = 0, host: str = HOST) -> Iterator[int]:
    """A port kept from others for the time of the block: `port`, or any free one if that is 0. Raises PortInUse."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held.bind((host, port))
        except OSError as error:
            raise PortInUse(error.errno, f"port {port} of {host} cannot be used: {error.strerror}") from error
        yield int(held.getsockname()[1])
