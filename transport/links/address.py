"""Addresses: how they parse, where a hub may bind, where a peer may connect.

Invariants (a breach is refused at the start, with the cure): an ipc path fits into a socket address and lies in a
directory that only this user can enter; tcp outside loopback needs keys on both sides.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from transport.errors import AddressInUse, AddressInvalid, AddressRefused

IPC_PATH_LIMIT = 107  # bytes of sun_path, less the final zero
KEY_LENGTH = 40  # characters of Z85
KEY_MARK = "|"  # in no Z85 text
WILDCARDS = ("*", "0.0.0.0", "::", "")


@dataclass(frozen=True, slots=True)
class Address:
    scheme: Literal["inproc", "ipc", "tcp"]
    place: str  # name, path or host
    port: int = 0
    key: str = ""  # public key of the server there, if it is not the run's server key

    def __str__(self) -> str:
        """Without the key."""
        if self.scheme != "tcp":
            return f"{self.scheme}://{self.place}"
        host = f"[{self.place}]" if ":" in self.place else self.place
        return f"tcp://{host}:{self.port}"


def parse(text: str) -> Address:
    """Parse inproc://NAME, ipc:///PATH, tcp://HOST:PORT or tcp://HOST:PORT|KEY; port 0 or * lets the system choose."""
    scheme, separator, place = text.partition("://")
    if not separator or not place or scheme not in ("inproc", "ipc", "tcp"):
        raise AddressInvalid(
            f"address {text!r} is none of inproc://NAME, ipc:///PATH, tcp://HOST:PORT; write one of these"
        )
    if scheme == "inproc":
        return Address("inproc", place)
    if scheme == "ipc":
        return _parse_ipc(text, place)
    place, marked, key = place.partition(KEY_MARK)
    if marked and len(key) != KEY_LENGTH:
        raise AddressInvalid(
            f"address {text!r} names a key of {len(key)} characters, a Z85 key has {KEY_LENGTH}; use the address that "
            "the hub reports"
        )
    host, separator, port = place.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    number = 0 if port == "*" else int(port) if port.isascii() and port.isdigit() else -1
    if not separator or not 0 <= number < 65536:
        raise AddressInvalid(f"address {text!r} has port {port!r}, which is not 0 to 65535; use 0 for a free one")
    return Address("tcp", host, number, key)


def _parse_ipc(text: str, place: str) -> Address:
    if place.startswith("@") or not place.startswith("/"):
        raise AddressInvalid(
            f"address {text!r} is not an absolute path; write ipc:///DIRECTORY/NAME (no abstract sockets)"
        )
    length = len(os.fsencode(place))
    if length > IPC_PATH_LIMIT:
        raise AddressInvalid(
            f"address {text!r} has a path of {length} bytes but the system allows {IPC_PATH_LIMIT}; "
            f"use a shorter run directory"
        )
    return Address("ipc", place)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_exposure(address: Address, *, keys: bool, binding: bool) -> None:
    """Refuse tcp beyond loopback without keys, and connecting to a wildcard."""
    if address.scheme != "tcp":
        return
    if not binding and (address.place in WILDCARDS or address.port == 0):
        raise AddressInvalid(
            f"cannot connect to {address}: it names no single place; use the address that the hub reports"
        )
    if keys or is_loopback(address.place):
        return
    verb = "bind" if binding else "connect to"
    raise AddressRefused(
        f"will not {verb} {address} without keys: beyond loopback anybody could read and inject messages; "
        f"give the node Security (transport.links.security.create_keys), or use 127.0.0.1 or ipc"
    )


def prepare_ipc(address: Address) -> None:
    """Make the directory private, and make sure that no living process is bound to the path."""
    path = Path(address.place)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.parent.stat()
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise AddressInvalid(
            f"directory {str(path.parent)!r} of {address} has mode {stat.S_IMODE(found.st_mode):04o} and "
            f"owner {found.st_uid}, but sockets must lie where only this user can enter; chmod 700 it or use another"
        )
    # libzmq unlinks whatever lies at the path, so a live hub would lose its address without notice.
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(address.place)
        except OSError:
            return  # no listener: absent, or left behind by a dead process
    raise in_use(address)


def in_use(address: Address) -> AddressInUse:
    cure = (
        "stop that process or choose another run directory" if address.scheme == "ipc" else "choose another, or port 0"
    )
    return AddressInUse(f"address {address} is in use by another hub or process; {cure}")
