"""Addresses and keys: where a hub may bind, where a peer may connect, and which clients a server admits.

A breach is refused at the start, with the cure: an ipc path fits into a socket address and lies in a directory that
only this user can enter; tcp outside loopback needs keys on both sides.

Encryption alone is no authentication: a server that does not ask accepts any key. So a server always asks the
allow-list through ZAP, and the list is part of `Security`. Keys live in files of mode 0600; nothing is read from the
command line or the environment.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import zmq
from zmq.utils import z85

from transport.errors import AddressInUse, AddressInvalid, AddressRefused, SecurityError

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


def parse_address(text: str) -> Address:
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
    with contextlib.suppress(ValueError):  # a name
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


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
        f"give the node Security (transport.security.create_keys), or use 127.0.0.1 or ipc"
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


BESIDE = "+"  # between the names of replicas that share a process and its key
SERVER = "server"  # name of the key with which the run's addresses are bound
ZAP_ADDRESS = "inproc://zeromq.zap.01"
KEY_FILE_LIMIT = 4096  # bytes


class KeyPair(msgspec.Struct, frozen=True):
    """A CURVE key pair in Z85 text."""

    public: str
    secret: str

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r}, secret=hidden)"


class Security(msgspec.Struct, frozen=True):
    """What a node needs to speak over tcp beyond loopback: its own keys, the run's server key, the accepted clients.

    A node that binds addresses owns the server's secret key, or has a pair of its own for that, whose public half is
    in its addresses; the others know only public halves.
    """

    own: KeyPair
    server_public: str
    directory: Path | None = None  # of a server: its clients' keys lie there, by their names, and may become more
    serving: KeyPair | None = None  # with which a node binds that is not the run's server
    # Clients that such a node admits now: the name of each public key.
    admitted: Callable[[], Mapping[str, str]] | None = None

    def clients(self) -> Mapping[str, str]:
        """Who may connect now: the name of each public key."""
        if self.admitted is not None:
            return self.admitted()
        if self.directory is None:
            return {}
        found = {_read_public(path): path.stem for path in self.directory.glob("*.pub")}
        return found | {read_keys(path).public: path.stem for path in self.directory.glob("*.key")}

    def __post_init__(self) -> None:
        for what, key in (
            ("own public key", self.own.public),
            ("own secret key", self.own.secret),
            ("server_public", self.server_public),
        ):
            if len(key) != KEY_LENGTH:
                raise SecurityError(
                    f"{what} has {len(key)} characters, a Z85 key has {KEY_LENGTH}; create it with create_keys"
                )


def _new_pair() -> KeyPair:
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def create_keys(directory: Path, clients: Iterable[str]) -> None:
    """Write `server.key`, `server.pub` and one `<client>.key` each into a private directory; overwrites nothing."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in (SERVER, *clients):
        pair = _new_pair()
        _write_private(directory / f"{name}.key", msgspec.json.encode(pair))
        if name == SERVER:
            _write_private(directory / "server.pub", pair.public.encode())


def add_client(serving: Path, name: str, directory: Path, others: Sequence[str] = ()) -> str:
    """Give a client keys of its own in a private directory, and let the server of `serving` know it by that name, and
    by the names of other replicas in its process. Returns its public key."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    pair = _new_pair()
    _write_private(directory / f"{name}.key", msgspec.json.encode(pair))
    _write_private(directory / "server.pub", _read_public(serving / "server.pub").encode())
    _write_private(serving / f"{BESIDE.join((name, *others))}.pub", pair.public.encode())
    return pair.public


def with_serving_key(security: Security, admitted: Callable[[], Mapping[str, str]]) -> Security:
    """Of a client that binds addresses too: with a new pair of keys for that. Its secret half is in no file and goes
    nowhere."""
    return msgspec.structs.replace(security, serving=_new_pair(), admitted=admitted)


def load_security(directory: Path, name: str = SERVER) -> Security:
    """The security of one node: keys of `name`, and for the server as the allow-list all keys of the directory."""
    own = read_keys(directory / f"{name}.key")
    if name != SERVER:
        return Security(own, _read_public(directory / "server.pub"))
    return Security(own, own.public, directory)


def read_keys(path: Path) -> KeyPair:
    """Read one key file; refuse it when others could have read or made it."""
    try:
        # Looked at after it is open: what is read is what was looked at, and a link leads nowhere else.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            found = os.fstat(file.fileno())
            data = file.read(KEY_FILE_LIMIT)
    except OSError as error:
        raise SecurityError(
            f"key file {str(path)!r} cannot be read ({error.strerror}); create it with create_keys"
        ) from error
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        raise SecurityError(
            f"key file {str(path)!r} has mode {mode:04o}, others can read it; create new keys with mode 0600"
        )
    if found.st_uid != os.geteuid():
        raise SecurityError(
            f"key file {str(path)!r} is owned by user {found.st_uid}, who knows it; create new keys with create_keys"
        )
    try:
        return msgspec.json.decode(data, type=KeyPair)
    except (msgspec.MsgspecError, ValueError) as error:
        raise SecurityError(
            f"key file {str(path)!r} holds no key pair ({error}); create it with create_keys"
        ) from error


def _read_public(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError as error:
        raise SecurityError(
            f"public key {str(path)!r} cannot be read ({error.strerror}); create it with create_keys"
        ) from error


def _write_private(path: Path, data: bytes) -> None:
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise SecurityError(
            f"key file {str(path)!r} exists and is not overwritten; remove it or use a new directory"
        ) from error
    with os.fdopen(handle, "wb") as file:
        file.write(data)


def zap_reply(frames: list[bytes], allowed: Mapping[str, str], *, retry_unknown: bool = False) -> list[bytes]:
    """Answer a ZAP request (RFC 27): 200 and the name for an allowed CURVE key, 400 for everything else.

    `retry_unknown`: an unknown key may be on the list in a moment, so the reply is 300 and the client tries again.
    """
    request_id = frames[1] if len(frames) > 1 else b""
    valid = len(frames) == 7 and frames[0] == b"1.0" and frames[5] == b"CURVE" and len(frames[6]) == 32
    name = allowed.get(z85.encode(frames[6]).decode(), "") if valid else ""
    status = (b"200", b"OK") if name else (b"300" if retry_unknown else b"400", b"key is not on the allow-list")
    return [b"1.0", request_id, *status, name.encode(), b""]
