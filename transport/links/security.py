"""CURVE keys, and the clients that a server admits.

Encryption alone is no authentication: a server that does not ask accepts any key. So a server always asks the
allow-list through ZAP, and the list is part of `Security`. Keys live in files of mode 0600; nothing is read from the
command line or the environment.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec
import zmq
from zmq.utils import z85

from transport.errors import SecurityError
from transport.links.address import KEY_LENGTH

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
    admitted: Callable[[], Mapping[str, str]] | None = (
        None  # clients that such a node admits now: the name of each public key
    )

    @property
    def binds_with(self) -> KeyPair | None:
        return self.own if self.own.public == self.server_public else self.serving

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


def create_keys(directory: Path, clients: Iterable[str]) -> None:
    """Write `server.key`, `server.pub` and one `<client>.key` each into a private directory; overwrites nothing."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in (SERVER, *clients):
        public, secret = zmq.curve_keypair()
        _write_private(directory / f"{name}.key", msgspec.json.encode(KeyPair(public.decode(), secret.decode())))
        if name == SERVER:
            _write_private(directory / "server.pub", public)


def add_client(serving: Path, name: str, directory: Path) -> str:
    """Give a client keys of its own in a private directory, and let the server of `serving` know it by that name.
    Returns its public key."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    public, secret = zmq.curve_keypair()
    _write_private(directory / f"{name}.key", msgspec.json.encode(KeyPair(public.decode(), secret.decode())))
    _write_private(directory / "server.pub", _read_public(serving / "server.pub").encode())
    _write_private(serving / f"{name}.pub", public)
    return public.decode()


def with_serving_key(security: Security, admitted: Callable[[], Mapping[str, str]]) -> Security:
    """Of a client that binds addresses too: with a new pair of keys for that. Its secret half is in no file and goes
    nowhere."""
    public, secret = zmq.curve_keypair()
    pair = KeyPair(public.decode(), secret.decode())
    return msgspec.structs.replace(security, serving=pair, admitted=admitted)


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
