"""Calls with side effects, made exactly once despite kills and replays of an episode.

    answer = await self.once(pay, "invoice 7", 12.5)      # in an environment; `pay` is an async function

A file records the begin of a call before the call, and its result afterwards; each is on the disk before anything else
happens. A call that has ended returns its recorded result and is not made again. If a call began and did not end, it is
unknown whether it took effect: `Uncertain`, for the model to read. Within a call, `call_id()` is a unique text. A
service that gets it can look up an uncertain call (`Uncertain.call_id`).

A call is identified by its episode, its task, the turn (number and text), its place among the calls of the turn, the
function and the arguments. So a turn that was generated again makes new calls.

Invariants: a call's begin is on the disk before the call, and no call is made twice; an unreadable record counts as
begun. Only the standard library is imported: the interpreter of a worker may have nothing else.
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

from models.disk import read_file, sync, write_whole

EPISODES_DIR: Final = "episodes"  # in the run directory
ENDED_FILE: Final = "ended.json"  # there
_CALL: Final = re.compile(r"[0-9a-f]{40}")
_EVALUATED: Final = re.compile(r".*@(\d+):\d+")  # key of an evaluation's group, with its version

_UNCERTAIN = "whether this call took effect is not known: its process was lost before the result was recorded"
_BEGUN_AGAIN = (
    "whether what it did outside of the gateway took effect is not known: its process was lost after some answers. It "
    "is started again, and gets these answers again"
)
_call_id: ContextVar[str] = ContextVar("call_id")
log = logging.getLogger("sluice.agents")


class Uncertain(Exception):
    """The call began earlier and its end is unknown. A call may also raise this itself, for the same reason.

    `call_id`: id of the call; empty if unknown.
    """

    def __init__(self, reason: str = _UNCERTAIN, call_id: str = "") -> None:
        super().__init__(reason)
        self.call_id = call_id


class NoEffect(Exception):
    """Raised by a call that certainly changed nothing: its record is deleted, and it may be made again."""


class GroupEnded(Exception):
    """The call was not made: its group has ended, so its result would not be kept."""


class CallRaised(Exception):
    """Type and text of the call's exception, raised now or in an earlier attempt."""


def call_id() -> str:
    """The unique id of the current call. Raises LookupError outside of a call that is made once."""
    return _call_id.get()


async def once(home: Path, key: Mapping[str, object], call: Callable[[], Awaitable[object]]) -> Any:
    """The result of `call`, made only if no earlier call had this key. Results and keys are JSON.

    Raises Uncertain, CallRaised, NoEffect, GroupEnded, and OSError if the begin cannot be recorded: no call then.
    """
    path = _path(home, key)
    begun = {"key": key, "call_id": secrets.token_hex(16)}
    ended = await asyncio.to_thread(_begin, path, json.dumps(begun))
    if ended is None:
        inside = _call_id.set(str(begun["call_id"]))
        try:
            ended = {"value": json.loads(json.dumps(await call()))}  # as a reader will get it
        except NoEffect:
            await asyncio.to_thread(_forget, path)
            raise
        except Uncertain as error:
            error.call_id = error.call_id or call_id()
            uncertain = json.dumps({**begun, "reason": str(error)}).encode()  # so a replay gets the same answer
            await asyncio.to_thread(write_whole, path, uncertain, durable=True)
            raise
        except Exception as error:
            ended = {"raised": f"{type(error).__name__}: {error}"}
        finally:
            _call_id.reset(inside)
        body = json.dumps({**begun, **ended}).encode()
        await asyncio.to_thread(write_whole, path, b"%08x %b" % (zlib.crc32(body), body), durable=True)
    if "raised" in ended:
        raise CallRaised(ended["raised"])
    return ended["value"]


async def begun_again(home: Path, episode: str) -> None:
    """Record and log, once, that what a lost program did is uncertain. A disk failure is logged only."""
    key = {"episode": episode, "function": "run", "arguments": [episode]}
    text = json.dumps({"key": key, "call_id": secrets.token_hex(16), "reason": _BEGUN_AGAIN})
    try:
        await asyncio.to_thread(_begin, _path(home, key), text)
    except (Uncertain, GroupEnded):
        return
    except OSError as error:
        log.warning("episode %s is not recorded as uncertain: %s", episode, error)
    log.warning("episode %s: %s", episode, _BEGUN_AGAIN)


class Once:
    """The calls of one episode: `self.once` of an environment, which its worker sets.

    `directory`: for all episodes of a run; `episode`: group key, slash, number; `about`: digest of its task, since
        another task may have had the same id.
    """

    def __init__(self, directory: str | Path, episode: str, about: str = "") -> None:
        self.calls = self.uncertain = 0  # so far; calls with an unknown end
        self._home = home_of(Path(directory), episode.rpartition("/")[0])
        self._known: dict[str, object] = {"episode": episode, "about": about}
        self.begin_turn(-1, "")

    @property
    def place(self) -> str:
        """A file name for the episode, which no other run has. It stays the same when the episode starts again."""
        return hashlib.sha256(f"{self._home.absolute()} {self._known['episode']}".encode()).hexdigest()[:16]

    def begin_turn(self, number: int, text: str) -> None:
        """Start a turn: the model's text, before the environment answers it."""
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
    """Groups that have ended for good: training groups below `next_group` except `open`, evaluations before `step`."""

    next_group: int
    open: tuple[int, ...] = ()
    step: int = 0

    def has(self, group: str) -> bool:
        """Whether the group with this key has ended."""
        evaluated = _EVALUATED.fullmatch(group)
        if evaluated is not None:
            return int(evaluated[1]) < self.step
        return group.isdigit() and int(group) < self.next_group and int(group) not in self.open


def home_of(directory: Path, group: str) -> Path:
    """The directory for records of a group's calls."""
    return directory / quote(group, safe="")


def groups_in(directory: Path) -> dict[str, Path]:
    """The groups with records, and their directories."""
    return {} if not directory.is_dir() else {unquote(path.name): path for path in directory.iterdir() if path.is_dir()}


def uncertain_calls(home: Path) -> list[Path]:
    """Records of a group's calls that began and did not end."""
    return [path for path in home.iterdir() if _CALL.fullmatch(path.name) and not _has_ended(path)]


def forget(home: Path) -> None:
    """Remove the records of a group, except those of uncertain calls."""
    kept = set(uncertain_calls(home))
    for path in home.iterdir():
        if path not in kept:
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not empty
        home.rmdir()


def _path(home: Path, key: Mapping[str, object]) -> Path:
    return home / hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:40]


def _begin(path: Path, text: str) -> dict[str, Any] | None:
    """Claim a call: None if it may be made now, else its recorded end. Raises Uncertain."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        for directory in path.parents[1:3]:  # the entries of both directories
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
    if ended.exists() and Ended(**json.loads(read_file(ended))).has(unquote(path.parent.name)):
        _forget(path)
        raise GroupEnded(f"group {unquote(path.parent.name)} has ended, so its episodes may make no calls")
    return None


def _has_ended(path: Path) -> bool:
    try:
        _ended(path)
    except Uncertain:
        return False
    return True


def _ended(path: Path) -> dict[str, Any]:
    """The recorded end of a call. Raises Uncertain for a record that is incomplete or cannot be read."""
    try:
        text = read_file(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Uncertain(f"whether this call took effect is not known: its record cannot be read ({error})") from error
    checksum, _, body = text.partition(b" ")
    if checksum == b"%08x" % zlib.crc32(body):
        end: dict[str, Any] = json.loads(body)
        return end
    try:  # the call only began
        begun = json.loads(text)
        uncertain = Uncertain(str(begun.get("reason", _UNCERTAIN)), str(begun["call_id"]))
    except (ValueError, KeyError, AttributeError):  # the record of its begin is incomplete
        uncertain = Uncertain()
    raise uncertain


def _forget(path: Path) -> None:
    path.unlink(missing_ok=True)
    sync(path.parent)
