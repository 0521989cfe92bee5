"""A stream socket that carries whole messages: 8 bytes of length, then the bytes. Blocking, for one reader at a time.

Invariant: whatever breaks the connection shows as `LinkLost`, and once it has, the link stays lost.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from typing import Final

_LENGTH: Final = struct.Struct("<Q")
_CHUNK: Final = 1 << 20


class LinkLost(ConnectionError):
    """The other end is gone."""


class Link:
    """One end of a connection."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected

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
            self._socket.sendall(_LENGTH.pack(len(data)))
            self._socket.sendall(data)
        except OSError as error:
            raise LinkLost(f"the connection broke ({error})") from error

    def receive(self) -> bytes:
        """Waits for a message. Raises LinkLost."""
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        return bytes(self._exactly(length))

    def ask(self, data: bytes) -> bytes:
        """Send, and wait for what comes back. Raises LinkLost."""
        self.send(data)
        return self.receive()

    def readable(self, timeout_s: float) -> bool:
        """Whether a message, or the end, has come within that time."""
        looking = select.poll()
        looking.register(self._socket, select.POLLIN)
        return bool(looking.poll(timeout_s * 1000))

    def break_off(self) -> None:
        """End the connection; whoever waits here, in any thread, is told so."""
        with contextlib.suppress(OSError):  # it has ended already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.break_off()
        self._socket.close()

    def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        view, at = memoryview(data), 0
        while at < size:
            try:
                count = self._socket.recv_into(view[at : at + _CHUNK])
            except OSError as error:
                raise LinkLost(f"the connection broke ({error})") from error
            if count == 0:
                raise LinkLost("the other end closed the connection")
            at += count
        return data
