"""Calls that change the world, made once, whatever is killed and however often an episode takes its turns again.

    answer = await self.once(pay, "invoice 7", 12.5)      # in an environment; `pay` is an async function

A file records the begin of a call before the call, and its result behind it; each is on the disk before anything else
happens. A call that has ended gives its recorded result, and is not made again. Of a call that began and did not end it
is not known whether it took effect: `Uncertain`, for the model to read. Within a call, `call_id()` is a text that no
other call has. A service that gets it can look up what became of an uncertain call (`Uncertain.call_id`).

A call is known by its episode, its task, the turn (its number and what the model wrote), its place among the calls of
the turn, the function and the arguments. So a turn that was written anew makes calls of its own.

Invariants: no call is made before its begin is on the disk, and none twice; what cannot be read counts as
begun. Nothing but the standard library is imported: the interpreter of a worker may be one that has only that.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import re
import secrets
import zlib
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, unquote

from models.disk import sync, write_whole

EPISODES_DIR: Final = "episodes"  # in the run directory
ENDED_FILE: Final = "ended.json"  # there
_CALL: Final = re.compile(r"[0-9a-f]{40}")
_EVALUATED: Final = re.compile(r".*@(\d+):\d+")  # key of an evaluation's group, and the version that it is of

_UNCERTAIN = "whether this call took effect is not known: its process was lost before the result was written down"
_call_id: ContextVar[str] = ContextVar("call_id")
log = logging.getLogger("sluice.agents")


class Uncertain(Exception):
    """The call began earlier, and how it ended is not known. Or the call raises this itself, for the same reason.

    `call_id`: as the call had it; empty where that is not known.
    """

    def __init__(self, reason: str = _UNCERTAIN, call_id: str = "") -> None:
        super().__init__(reason)
        self.call_id = call_id


class NoEffect(Exception):
    """For a call to raise that has certainly changed nothing: it is forgotten, and may be made again."""


class GroupEnded(Exception):
    """The call was not made: its group has ended, so that its result would not be kept."""


class CallRaised(Exception):
    """What the call raised, now or when it was made: its type and text."""


def call_id() -> str:
    """Within a call that is made once: its name, which no other call of any run has. Raises LookupError elsewhere."""
    return _call_id.get()


async def once(home: Path, key: Mapping[str, object], call: Callable[[], Awaitable[object]]) -> Any:
    """The result of `call`, which is made unless it was made before under this key. Results and keys are JSON.

    Raises Uncertain, CallRaised, NoEffect, GroupEnded, and OSError where nothing can be written down: the call is not
    made then.
    """
    path = home / hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:40]
    begun = {"key": key, "call_id": secrets.token_hex(16)}
    ended = await asyncio.to_thread(_begin, path, json.dumps(begun))
    if ended is None:
        inside = _call_id.set(str(begun["call_id"]))
        try:
            ended = {"value": json.loads(json.dumps(await call()))}  # as it will be read
        except NoEffect:
            await asyncio.to_thread(_forget, path)
            raise
        except Uncertain as error:
            error.call_id = error.call_id or call_id()
            uncertain = json.dumps({**begun, "reason": str(error)}).encode()  # to say the same again
            await asyncio.to_thread(write_whole, path, uncertain, durable=True)
            raise
        except Exception as error:
            ended = {"raised": f"{type(error).__name__}: {error}"}
        finally:
            _call_id.reset(inside)
        await asyncio.to_thread(_end, path, {**begun, **ended})
    if "raised" in ended:
        raise CallRaised(ended["raised"])
    return ended["value"]


class Once:
    """The calls of one episode: `self.once` of an environment, which its worker sets.

    `directory`: of all episodes of a run; `episode`: its group's name, a slash, its number; `about`: tells its task
    from another one that had the same name.
    """

    def __init__(self, directory: str | Path, episode: str, about: str = "") -> None:
        self.calls = self.uncertain = 0  # so far; calls with an unknown end
        self._home = home_of(Path(directory), episode.rpartition("/")[0])
        self._known: dict[str, object] = {"episode": episode, "about": about}
        self.begin_turn(-1, "")

    def begin_turn(self, number: int, text: str) -> None:
        """What the model wrote, before the environment answers it."""
        self._known |= {"turn": number, "text": text}
        self._place = 0

    async def __call__(self, function: Callable[..., Awaitable[object]], *arguments: object) -> Any:
        """`await function(*arguments)`, made once. Arguments and result are JSON. Raises as `once` does."""
        name = getattr(function, "__qualname__", type(function).__qualname__)
        key = {**self._known, "call": self._place, "function": name, "arguments": arguments}
        self._place += 1
        self.calls += 1
        try:
            return await once(self._home, key, lambda: function(*arguments))
        except Uncertain as error:
            self.uncertain += 1
            log.warning("episode %s, turn %s: %s%s: %s", key["episode"], key["turn"], name, arguments, error)
            raise


@dataclass(frozen=True)
class Ended:
    """Groups that have ended for good: below `next_group`, not `open`; evaluations of versions before `step`."""

    next_group: int
    open: tuple[int, ...] = ()
    step: int = 0

    def has(self, group: str) -> bool:
        """Whether the group with this key has."""
        evaluated = _EVALUATED.fullmatch(group)
        if evaluated is not None:
            return int(evaluated[1]) < self.step
        return group.isdigit() and int(group) < self.next_group and int(group) not in self.open


def home_of(directory: Path, group: str) -> Path:
    """Where the calls of a group's episodes are written down."""
    return directory / quote(group, safe="")


def groups_in(directory: Path) -> dict[str, Path]:
    """The groups of which something is written down, and where."""
    if not directory.is_dir():
        return {}
    return {unquote(path.name): path for path in directory.iterdir() if path.is_dir()}


def uncertain_calls(home: Path) -> list[Path]:
    """The files of a group's calls that have begun and not ended."""
    return [path for path in home.iterdir() if _CALL.fullmatch(path.name) and not _has_ended(path)]


def forget(home: Path) -> None:
    """Remove the records of a group, but for calls of which it is not known whether they took effect."""
    kept = set(uncertain_calls(home))
    for path in home.iterdir():
        if path not in kept:
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not empty
        home.rmdir()


def _begin(path: Path, text: str) -> dict[str, Any] | None:
    """None if the call may be made now; else how it ended. Raises Uncertain."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        for directory in path.parents[1:3]:  # its entry, and that of the directory of all groups
            sync(directory)
        return _begin(path, text)
    except FileExistsError:
        return _ended(path)
    with os.fdopen(file, "w") as begun:
        begun.write(text)
        begun.flush()
        os.fsync(begun.fileno())
    sync(path.parent)
    ended = path.parents[1] / ENDED_FILE
    if ended.exists() and Ended(**json.loads(ended.read_bytes())).has(unquote(path.parent.name)):
        _forget(path)
        raise GroupEnded(f"group {unquote(path.parent.name)} has ended: its episodes make no call any more")
    return None


def _end(path: Path, ended: Mapping[str, object]) -> None:
    body = json.dumps(ended).encode()
    write_whole(path, b"%08x %b" % (zlib.crc32(body), body), durable=True)


def _has_ended(path: Path) -> bool:
    try:
        _ended(path)
    except Uncertain:
        return False
    return True


def _ended(path: Path) -> dict[str, Any]:
    """Raises Uncertain for what is not whole."""
    text = path.read_bytes()
    checksum, _, body = text.partition(b" ")
    if checksum != b"%08x" % zlib.crc32(body):
        raise _uncertain(text)
    found: dict[str, Any] = json.loads(body)
    return found


def _uncertain(text: bytes) -> Uncertain:
    """Of a call that has only begun."""
    try:
        begun = json.loads(text)
        return Uncertain(str(begun.get("reason", _UNCERTAIN)), str(begun["call_id"]))
    except (ValueError, KeyError, AttributeError):  # its bytes did not all reach the disk
        return Uncertain()


def _forget(path: Path) -> None:
    path.unlink(missing_ok=True)
    sync(path.parent)
