"""Records of rollouts that grow, on the disk: what a killed process takes with it, for a replica or a resume to go on.

Files below the run directory, `episodes/<group>/<kind>-<life>-<process>.log`. A life of the run is one start of it.
Parts of responses (stages/records/responses.py) and turns of episodes (stages/records/turns.py) are two kinds. What a
group left is removed when nothing can need it any more (pipeline/record/kept_files.py).

Invariants:
- One process writes a file. A record has only what is new since the previous record of the same key, so that a file
  grows with the tokens and not with their square.
- A record is whole (checksum), or it ends the reading of its file.
- What an earlier life left comes with the newest version of weights that is part of the run's history: the smallest of
  the steps from which the lives after it went on. A higher number was taken back, and may mean other weights now.
"""

from __future__ import annotations

import errno
import logging
import math
import os
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
from models.disk import sync
from stages.messages import PromptGroup, RolloutSlice, joined
from stages.records.once import home_of
from stages.topic_values import sampling
from stages.train.saved_groups import fingerprint, message_decoder, message_encoder

log = logging.getLogger("sluice.records")

Body = TypeVar("Body", bound=Struct)
Key = tuple[int, ...]  # what grows, within its group

RESPONSES: Final = "responses"  # names of kinds
TURNS: Final = "turns"
_REMEMBERED: Final = 65_536  # keys whose previous record is known; the next record of any other key is whole
_HEAD: Final = Layout("<QQ")  # bytes of the record, and their xxh3_64


@dataclass(frozen=True)
class Kind(Generic[Body]):
    """What grows: `arrays` of equal length with one value for each token, and a `text`."""

    name: str
    body: type[Body]
    arrays: tuple[str, ...]  # the first one counts the tokens
    text: str
    synced: bool  # a record is on the disk, and not only with the operating system, when `append` returns


class Piece(Struct, Generic[Body], frozen=True, array_like=True):
    """One record."""

    about: bytes  # see GrowingRecords.about
    key: Key
    tokens: int  # in the previous records of the key: the arrays of the body begin behind them
    characters: int  # of the text, likewise
    body: Body  # all but the arrays and the text is of the whole


class GrowingRecords(Generic[Body]):
    """Records of one kind. `lives`: the step from which each life of the run went on; the last life is this one."""

    def __init__(self, directory: Path, kind: Kind[Body], config: Config, lives: Sequence[int]) -> None:
        self.directory, self.kind, self.lives = directory, kind, lives
        self.writes = bool(lives) and config.checkpoint.save_interval is not None
        self._settings, self._rollout = about_settings(config), config.rollout
        self._name = f"{kind.name}-{len(lives) - 1}-{secrets.token_hex(6)}.log"
        self._encoder = message_encoder()
        self._decoder: msgspec.msgpack.Decoder[Piece[Body]] = message_decoder(Piece[kind.body])  # type: ignore[name-defined]
        self._previous: OrderedDict[tuple[bytes, Key], tuple[int, int, int]] = OrderedDict()  # tokens, hash, characters
        self._warned = False
        self._damaged: set[Path] = set()

    def about(self, group: PromptGroup) -> bytes:
        """Identifies what the rollouts of a group are: other prompts, seeds or settings make other bytes."""
        row = group.key, group.prompt, group.label, group.seed, group.metadata, group.tools
        drawn = sampling(group, self._rollout)
        return xxhash.xxh3_128_digest(msgspec.msgpack.encode((self._settings, row, drawn)))

    def append(self, group: PromptGroup, key: Key, body: Body, *, grows: bool = True) -> bool:
        """Write what is new of a body; blocks. `grows`: more of it will follow.

        False if the disk failed: the first failure is logged, and the run goes on."""
        about = self.about(group)
        tokens, hashed, characters = self._previous.pop((about, key), (0, 0, 0))
        if self._length(body) < tokens or self._hash(body, tokens) != hashed:
            tokens = characters = 0  # begun anew
        piece = Piece(about, key, tokens, characters, self._behind(body, tokens, characters))
        try:
            _append(home_of(self.directory, group.key) / self._name, self._encoder.encode(piece), self.kind.synced)
        except OSError as error:
            if not self._warned:
                log.warning("%s are not written down, and would be lost with their process: %s", self.kind.name, error)
            self._warned = True
            return False
        if grows:
            length = self._length(body)
            self._previous[about, key] = length, self._hash(body, length), len(getattr(body, self.kind.text))
            if len(self._previous) > _REMEMBERED:
                self._previous.popitem(last=False)
        return True

    def read(self, group: PromptGroup, *, this_life: bool) -> Iterator[tuple[float, Key, Body]]:
        """What other processes left of a group: the newest version that counts, the key, the body so far.

        `this_life`: also records written since this start of the run."""
        about = self.about(group)
        for newest, pieces in self.pieces(group, this_life=this_life):
            bodies: dict[Key, Body] = {}
            for piece in pieces:
                before = bodies.pop(piece.key, None)
                body = self._whole(before, piece) if piece.about == about else None
                if body is not None:
                    bodies[piece.key] = body
                    yield newest, piece.key, body

    def pieces(self, group: PromptGroup, *, this_life: bool) -> Iterator[tuple[float, Iterator[Piece[Body]]]]:
        """The files of a group that other processes wrote, each with the newest version that counts."""
        home = home_of(self.directory, group.key)
        if not home.is_dir():
            return
        for path in sorted(home.glob(f"{self.kind.name}-*.log")):
            life = int(path.name.split("-")[1])
            earlier = life < len(self.lives) - 1
            if earlier or (this_life and path.name != self._name):
                yield min(self.lives[life + 1 :], default=math.inf), self._pieces_of(path)

    def _pieces_of(self, path: Path) -> Iterator[Piece[Body]]:
        """The records of a file, up to its end or to the first that is not whole."""
        data = path.read_bytes()
        place = 0
        while place < len(data):
            start, body = place + _HEAD.size, b""
            if start <= len(data):
                size, checksum = _HEAD.unpack_from(data, place)
                body = data[start : start + size]
            try:
                if not body or len(body) < size or xxhash.xxh3_64_intdigest(body) != checksum:
                    raise ValueError("it is not whole")
                piece = self._decoder.decode(body)
            except ValueError as error:  # includes msgspec's: a record of another version of the program
                if path not in self._damaged:
                    log.warning("%s: the record at byte %d is passed over, and what follows: %s", path, place, error)
                self._damaged.add(path)
                return
            yield piece
            place = start + size

    def _length(self, body: Body) -> int:
        return len(getattr(body, self.kind.arrays[0]))

    def _hash(self, body: Body, tokens: int) -> int:
        """Hash of the beginning of a body: everything that a later record leaves out."""
        if not tokens:
            return 0
        parts = (np.asarray(getattr(body, name)[:tokens]).tobytes() for name in self.kind.arrays)
        return xxhash.xxh3_64_intdigest(b"".join(parts))

    def _behind(self, body: Body, tokens: int, characters: int) -> Body:
        rest: dict[str, Any] = {name: getattr(body, name)[tokens:] for name in self.kind.arrays}
        return replace(body, **rest, **{self.kind.text: getattr(body, self.kind.text)[characters:]})

    def _whole(self, before: Body | None, piece: Piece[Body]) -> Body | None:
        """The body with one more piece; None if the piece does not follow the previous ones."""
        if not piece.tokens:
            return piece.body
        text = self.kind.text
        if before is None or self._length(before) != piece.tokens or len(getattr(before, text)) != piece.characters:
            return None
        names: dict[str, Any] = {
            name: _joined(getattr(before, name), getattr(piece.body, name)) for name in self.kind.arrays
        }
        return replace(piece.body, **names, **{text: getattr(before, text) + getattr(piece.body, text)})


def _joined(before: Any, behind: Any) -> Any:
    return before + behind if isinstance(before, tuple) else joined(before, behind)


def about_settings(config: Config) -> bytes:
    """Of all that decides what the tokens of a turn are, beside its weights."""
    # A run may be made longer; temperature and top-p are the group's.
    rollout = replace(config.rollout, num_rollout=None, num_epoch=None, rollout_temperature=1.0, rollout_top_p=1.0)
    data, tools = config.data, config.tools.tools
    settings = config.environment, rollout, config.train.hf_checkpoint, data.chat_template_path, tools
    return xxhash.xxh3_128_digest(fingerprint(RolloutSlice) + msgspec.json.encode(settings, order="sorted"))


def _append(path: Path, body: bytes, synced: bool) -> None:
    new = not path.exists()
    if new:
        path.parent.mkdir(parents=True, exist_ok=True)
    record = _HEAD.pack(len(body), xxhash.xxh3_64_intdigest(body)) + body
    with path.open("ab", buffering=0) as file:
        start = file.tell()
        if file.write(record) < len(record):  # half a record would hide those that follow
            file.truncate(start)
            raise OSError(errno.ENOSPC, "there was room for a part of a record")
        if synced:
            os.fdatasync(file.fileno())
    if new and synced:
        for directory in path.parents[:3]:
            sync(directory)
