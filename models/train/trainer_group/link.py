"""A connection that carries whole messages. Blocking, for one reader at a time.

Invariant: whatever breaks the connection shows as `LinkLost`, and once it has, the link stays lost.
"""

from __future__ import annotations

import contextlib
import os
import socket
from multiprocessing.connection import Connection


class LinkLost(ConnectionError):
    """The other end is gone."""


class Link:
    """One end of a connection. Only bytes are sent: `Connection` would also unpickle."""

    def __init__(self, connected: socket.socket) -> None:
        """Takes over a blocking socket."""
        self._connection = Connection(connected.detach())

    @classmethod
    def to(cls, address: str) -> Link:
        """Connect to a listening socket. Raises LinkLost."""
        connecting = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connecting.connect(address)
        except OSError as error:
            connecting.close()
            raise LinkLost(f"nobody listens at {address} ({error})") from error
        return cls(connecting)

    def send(self, data: bytes) -> None:
        """Waits until the system has taken the message over. Raises LinkLost."""
        try:
            self._connection.send_bytes(data)
        except OSError as error:
            raise LinkLost(f"the connection broke ({error})") from error

    def receive(self) -> bytes:
        """Waits for a message. Raises LinkLost."""
        try:
            return self._connection.recv_bytes()
        except EOFError as error:
            raise LinkLost("the other end closed the connection") from error
        except OSError as error:
            raise LinkLost(f"the connection broke ({error})") from error

    def ask(self, data: bytes) -> bytes:
        """Send, and wait for what comes back. Raises LinkLost."""
        self.send(data)
        return self.receive()

    def readable(self, timeout_s: float) -> bool:
        """Whether a message, or the end, has come within that time."""
        return self._connection.poll(timeout_s)

    def break_off(self) -> None:
        """End the connection; whoever waits here, in any thread, is told so."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as same:
            same.shutdown(socket.SHUT_RDWR)  # has no effect if it has ended already

    def close(self) -> None:
        self.break_off()
        self._connection.close()
