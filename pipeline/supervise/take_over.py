"""May a server that an earlier start of the run left be used by this one? Its note says what it was started as; then it
is asked.

Invariants: a server is taken over only if it was started as it would be started now, but for its port and its seed, and
has given up all that it was asked before; then it stands still, a frozen one serves. It is asked for a few seconds at
the most, and whatever is wrong with it is a reason to start a new one, never an error.
"""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from models.engines.client import EngineClient
from models.engines.errors import EngineError
from models.engines.token import Token
from pipeline.hosts.launcher import ProcessSpec

LIMIT_S: Final = 10.0  # for a server to answer; it is busy with nothing


class Note(Struct, frozen=True):
    """What is told of a server from one start of the run to the next. `digest`: of how it was started."""

    url: str
    digest: str

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()


def read_note(text: str) -> Note | None:
    """None for one that this version did not write."""
    try:
        return msgspec.json.decode(text, type=Note)
    except msgspec.MsgspecError:
        return None


def digest(process: ProcessSpec, *more: object) -> str:
    """Of how a server is started: command line, variables, and the files of its model, by size and time of change. The
    weights of a frozen one are nowhere else."""
    files = [
        (str(file), (found := file.stat()).st_size, found.st_mtime_ns)
        for place in process.files
        for file in sorted(Path(place).iterdir() if Path(place).is_dir() else ())
        if file.exists()
    ]
    told = (process.argv, dict(process.env), files, more)
    return hashlib.sha256(msgspec.json.encode(told, order="sorted")).hexdigest()


async def refusal(url: str, token: Token | None, *, frozen: bool) -> str | None:
    """Have a server give up all that it does; why it cannot be used, None if it can. Waits `LIMIT_S` at the most."""
    try:
        async with asyncio.timeout(LIMIT_S):
            async with EngineClient(url, token=token) as client:
                await client.server_info()  # SGLang's HTTP process has to ask its scheduler
                await client.resume()  # what stands still would not end its requests
                await client.abort()
                await client.pause("abort")  # those that came meanwhile too
                if frozen:
                    await client.resume()
    except EngineError as error:
        return str(error)
    except TimeoutError:
        return f"it did not answer within {LIMIT_S:g} s"
    return None
