"""Append-only records of growing rollouts on the disk, from which another replica or a resumed run continues.

Files are below the run directory: `episodes/<group>/<kind>-<life>-<process>.log`. A life of the run is one start of it.
Three kinds use this (stages/records/unfinished.py): partial responses, turns of episodes, and answers to agents and
generate functions. pipeline/record/kept_files.py removes the files of a group when nothing can need them any more.

Invariants:
- One process writes a file. A record has only the change since the previous record of the same key, so a file grows
  linearly with the tokens.
- A record is complete (checksum), or reading stops there.
- Records of an earlier life come with the newest valid version of weights: the smallest step from which a later life
  continued. A higher version was rolled back, and its number may mean other weights now.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import re
import secrets
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from struct import Struct as Layout
from typing import Any, Final, Generic, TypeVar

import msgspec
import numpy as np
import xxhash
from msgspec import Struct
from msgspec.structs import replace

from configs.schema import Config
from models.disk import open_file, sync
from stages.messages import PromptGroup, RolloutSlice, joined
from stages.records.once import home_of
from stages.topic_values import sampling
from stages.train.saved_groups import fingerprint, message_decoder, message_encoder

log = logging.getLogger("sluice.records")

Body = TypeVar("Body", bound=Struct)
Key = tuple[int, ...]  # identifies a body within its group

RESPONSES: Final = "responses"  # names of kinds
TURNS: Final = "turns"
ANSWERS: Final = "answers"
_REMEMBERED: Final = 65_536  # limit of keys with a known previous record; the next record of another key is complete
_HEAD: Final = Layout("<QQ")  # bytes of the record, and their xxh3_64


@dataclass(frozen=True)
class Kind(Generic[Body]):
    """The growing parts of a body: `arrays` of equal length with one value for each token, and a `text`."""

    name: str
    body: type[Body]
    arrays: tuple[str, ...]  # the first one counts the tokens
    text: str
    synced: bool  # `append` returns when the record is on the disk, not only in the operating system's cache
    own: bool = False  # a process reads its own records, too


class Piece(Struct, Generic[Body], frozen=True, array_like=True):
    """One record."""

    about: bytes  # see GrowingRecords.about
    key: Key
    tokens: int  # tokens in the previous records of the key; the arrays begin after them
    characters: int  # characters of the text, likewise
    body: Body  # a piece: arrays and text are partial, the rest is complete


class GrowingRecords(Generic[Body]):
    """Records of one kind. `lives`: the step from which each life of the run continued; the last is the current
    life."""

    def __init__(self, directory: Path, kind: Kind[Body], config: Config, lives: Sequence[int]) -> None:
        self.directory, self.kind, self.lives = directory, kind, lives
        self.writes = bool(lives) and config.checkpoint.save_interval is not None
        self._settings, self._rollout = about_settings(config, directory.parent), config.rollout
        self._name = f"{kind.name}-{len(lives) - 1}-{secrets.token_hex(6)}.log"
        self._encoder = message_encoder()
        self._decoder: msgspec.msgpack.Decoder[Piece[Body]] = message_decoder(Piece[kind.body])  # type: ignore[name-defined]
        self._previous: OrderedDict[tuple[bytes, Key], tuple[int, int, int]] = OrderedDict()  # tokens, hash, characters
        self._warned = self._others = False
        self._damaged: set[Path] = set()

    def about(self, group: PromptGroup) -> bytes:
        """Digest of everything that defines a group's rollouts: prompt, seed, settings."""
        row = group.key, group.prompt, group.label, group.seed, group.metadata, group.tools
        drawn = sampling(group, self._rollout)
        return xxhash.xxh3_128_digest(msgspec.msgpack.encode((self._settings, row, drawn)))

    def append(self, group: PromptGroup, key: Key, body: Body, *, grows: bool = True) -> bool:
        """Write the new part of a body; blocks. `grows`: more will follow.

        Returns False if the disk failed. The first failure is logged, and the run continues.
        """
        about = self.about(group)
        tokens, hashed, characters = self._previous.pop((about, key), (0, 0, 0))
        if self._length(body) < tokens or self._hash(body, tokens) != hashed:
            tokens = characters = 0  # restarted
        places = [*((name, tokens) for name in self.kind.arrays), (self.kind.text, characters)]
        behind: dict[str, Any] = {name: getattr(body, name)[place:] for name, place in places}
        piece = Piece(about, key, tokens, characters, replace(body, **behind))
        try:
            _append(home_of(self.directory, group.key) / self._name, self._encoder.encode(piece), self.kind.synced)
        except OSError as error:
            if not self._warned:
                log.warning("%s are not recorded, and will be lost with their process: %s", self.kind.name, error)
            self._warned = True
            return False
        if grows:
            length = self._length(body)
            self._previous[about, key] = length, self._hash(body, length), len(getattr(body, self.kind.text))
            if len(self._previous) > _REMEMBERED:
                self._previous.popitem(last=False)
        return True

    def read(self, group: PromptGroup, *, this_life: bool) -> Iterator[tuple[float, Key, Body]]:
        """Records for a group, those of other processes unless `Kind.own`: newest valid version, key, body so far.

        `this_life`: include records of the current life."""
        about = self.about(group)
        for newest, pieces in self.pieces(group, this_life=this_life):
            bodies: dict[Key, Body] = {}
            for piece in pieces:
                before = bodies.pop(piece.key, None)
                body = self._whole(before, piece) if piece.about == about else None
                if body is not None:
                    bodies[piece.key] = body
                    yield newest, piece.key, body
                if piece.about != about and not self._others:
                    self._others = True  # for all groups
                    log.info("%s of group %s are not continued: prompt or settings differ", self.kind.name, group.key)

    def pieces(self, group: PromptGroup, *, this_life: bool) -> Iterator[tuple[float, Iterator[Piece[Body]]]]:
        """The files of a group, each with the newest valid version."""
        home, name = home_of(self.directory, group.key), re.compile(rf"{self.kind.name}-(\d+)-.*\.log")
        try:
            found = [(path, match) for path in sorted(home.iterdir()) if (match := name.fullmatch(path.name))]
        except FileNotFoundError:
            return
        except OSError as error:
            self._pass_over(home, "", error)
            return
        for path, match in found:
            life = int(match[1])
            earlier = life < len(self.lives) - 1
            if earlier or (this_life and (self.kind.own or path.name != self._name)):
                yield min(self.lives[life + 1 :], default=math.inf), self._pieces_of(path)

    def _pieces_of(self, path: Path) -> Iterator[Piece[Body]]:
        """The records of a file, up to its end or the first incomplete record."""
        place = 0
        try:
            with open_file(path) as file:
                end = os.fstat(file.fileno()).st_size
                while place < end:
                    head = file.read(_HEAD.size)
                    size, checksum = _HEAD.unpack(head) if len(head) == _HEAD.size else (0, 0)
                    body = file.read(size) if size <= end - place else b""
                    if not body or xxhash.xxh3_64_intdigest(body) != checksum:
                        raise ValueError("it is not whole")
                    yield self._decoder.decode(body)
                    place = file.tell()
        except (OSError, ValueError) as error:  # ValueErrors of msgspec: records of another version of the program
            self._pass_over(path, f" from byte {place} on", error)

    def _pass_over(self, path: Path, where: str, error: Exception) -> None:
        """Say once what is not read, and why."""
        if path not in self._damaged:
            log.warning("%s: ignored%s, the record there cannot be read: %s", path, where, error)
        self._damaged.add(path)

    def _length(self, body: Body) -> int:
        return len(getattr(body, self.kind.arrays[0]))

    def _hash(self, body: Body, tokens: int) -> int:
        """Hash of the beginning of a body, which later records omit."""
        if not tokens:
            return 0
        parts = (np.asarray(getattr(body, name)[:tokens]).tobytes() for name in self.kind.arrays)
        return xxhash.xxh3_64_intdigest(b"".join(parts))

    def _whole(self, before: Body | None, piece: Piece[Body]) -> Body | None:
        """The body with the next piece; None if the piece does not continue it."""
        if not piece.tokens:
            return piece.body
        text = self.kind.text
        if before is None or self._length(before) != piece.tokens or len(getattr(before, text)) != piece.characters:
            return None
        whole: dict[str, Any] = {}
        for name in (*self.kind.arrays, text):
            first, second = getattr(before, name), getattr(piece.body, name)
            whole[name] = first + second if isinstance(first, tuple | str) else joined(first, second)
        return replace(piece.body, **whole)


def about_settings(config: Config, run_dir: Path) -> bytes:
    """Digest of the settings that, with the weights, decide the tokens of a turn. Paths in the run directory count from
    there, so that a run which was moved continues."""
    # num_rollout may change at a resume; temperature and top-p belong to the group.
    rollout = replace(config.rollout, num_rollout=None, num_epoch=None, rollout_temperature=1.0, rollout_top_p=1.0)
    data, tools = config.data, config.tools.tools
    settings = config.environment, rollout, config.train.hf_checkpoint, data.chat_template_path, tools
    inside = msgspec.json.encode(str(run_dir.absolute()))[:-1] + b"/"
    written = msgspec.json.encode(settings, order="sorted").replace(inside, b'"RUN/')
    return xxhash.xxh3_128_digest(fingerprint(RolloutSlice) + written)


def _append(path: Path, body: bytes, synced: bool) -> None:
    new = not path.exists()
    if new:
        path.parent.mkdir(parents=True, exist_ok=True)
    record = _HEAD.pack(len(body), xxhash.xxh3_64_intdigest(body)) + body
    with path.open("ab", buffering=0) as file:
        start = file.tell()
        if file.write(record) < len(record):  # an incomplete record would hide later records
            file.truncate(start)
            raise OSError(errno.ENOSPC, "the disk had room for a part of the record only")
        if synced:
            os.fdatasync(file.fileno())
    if new and synced:
        for directory in path.parents[:3]:
            sync(directory)
