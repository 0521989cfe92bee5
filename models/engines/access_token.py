"""The token of a server: only a client that sends it may use the server.

Each run makes a token for the engines and the router that it starts, in a file that only its owner can read. Command
lines hold the path of the file, never the token; processes of the run get it from the topic. As with SGLang, routes for
health and metrics are open.

Invariant: no `repr` shows a token, so that no log has it by accident; tokens are compared in constant time.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import stat
from pathlib import Path
from typing import Final

from msgspec import Struct

from models.disk import open_file
from models.errors import EngineStartError

OPEN_ROUTES: Final = ("/health", "/ready", "/metrics")  # and routes that begin with one of them
_LONGEST: Final = 4096
_WRITTEN: Final = re.compile(rb"[!-~]{8,}")  # fits into a header, and is not guessed at once


class Token(Struct, frozen=True):
    """Sent as `Authorization: Bearer TEXT`."""

    text: str

    def __repr__(self) -> str:
        return "Token(hidden)"

    @property
    def header(self) -> str:
        return f"Bearer {self.text}"

    def is_sent_by(self, authorization: str | None) -> bool:
        """Whether the header of a request holds this token."""
        kind, _, sent = (authorization or "").partition(" ")
        return kind.lower() == "bearer" and hmac.compare_digest(
            sent.encode(errors="surrogateescape"), self.text.encode()
        )


class TokenFile(Struct, frozen=True):
    """A token and its file."""

    path: str
    token: Token


def run_token(path: Path) -> TokenFile:
    """The token of a run, made at the first call. The directory must be private."""
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_urlsafe(32))
    except FileExistsError:
        pass
    return read_token(path)


def read_token(path: Path) -> TokenFile:
    """Read a token file; refuse one that others can read. Raises EngineStartError."""
    try:
        with open_file(path) as file:
            found, text = os.fstat(file.fileno()), file.read(_LONGEST + 1).strip()
    except OSError as error:
        raise EngineStartError(
            f"the token file {path} cannot be read ({error.strerror}); name the file that the servers' token is in"
        ) from error
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        raise EngineStartError(
            f"the token file {path} has mode {mode:04o}, so that other users may know the token; make a new token, in "
            "a file with mode 0600"
        )
    if found.st_uid not in (os.geteuid(), 0):
        raise EngineStartError(
            f"the token file {path} is owned by user {found.st_uid}, who knows the token; make a new token in a file "
            "of your own"
        )
    if len(text) > _LONGEST or _WRITTEN.fullmatch(text) is None:
        raise EngineStartError(
            f"the token file {path} holds no token: one line of 8 to {_LONGEST} letters, digits and signs, without "
            "spaces; write one, for example with: openssl rand -hex 32"
        )
    return TokenFile(str(path), Token(text.decode()))
