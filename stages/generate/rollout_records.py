"""What a killed process takes with it of rollouts, written down: for a replica that takes them again, and for a resume.

Files of records below the run directory, `episodes/<group>/<kind>-<life>-<process>.log`. A life of the run is one start
of it. Turns of episodes (stages/agents/turn_journal.py) and parts of responses (stages/generate/response_journal.py)
are kept so; what a group left is removed when nothing can ask for it any more (pipeline/record/episodes.py).

Invariants: one process writes a file; a record is whole (checksum) or it ends the reading of its file; what an earlier
life left is given with the newest version of weights that is part of the run's history: the smallest of the steps from
which the lives after it went on. A higher number was taken back, and may mean other weights now.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from struct import Struct as Layout
from typing import Final, Generic, TypeVar

import msgspec
import xxhash
from msgspec import Struct
from msgspec.structs import replace

from configs.schema import Config
from models.disk import sync
from stages.agents.once import home_of
from stages.messages import PromptGroup, RolloutSlice
from stages.topic_values import sampling
from stages.train.saved_groups import fingerprint, message_decoder, message_encoder

log = logging.getLogger("sluice.records")

Record = TypeVar("Record", bound=Struct)
RESPONSES: Final = "responses"  # kinds
TURNS: Final = "turns"
_HEAD: Final = Layout("<QQ")  # bytes of the record, and their xxh3_64


class RolloutRecords(Generic[Record]):
    """Records of one kind. `lives`: the step from which each life of the run went on; the last one is this."""

    def __init__(
        self, directory: Path, kind: str, record: type[Record], config: Config, lives: Sequence[int], *, synced: bool
    ) -> None:
        """`synced`: a record is on the disk, and not only with the operating system, when `append` returns."""
        self.directory, self.kind, self.lives, self._synced = directory, kind, lives, synced
        self.writes = bool(lives) and config.checkpoint.save_interval is not None
        self._settings, self._rollout = about_settings(config), config.rollout
        self._name = f"{kind}-{len(lives) - 1}-{secrets.token_hex(6)}.log"
        self._encoder, self._decoder = message_encoder(), message_decoder(record)
        self._told = False
        self._damaged: set[Path] = set()

    def about(self, group: PromptGroup) -> bytes:
        """Of what the rollouts of a group are: other prompts, seeds or settings make other bytes."""
        row = group.prompt, group.label, group.seed, group.metadata, group.tools
        drawn = sampling(group, self._rollout)
        return xxhash.xxh3_128_digest(msgspec.msgpack.encode((self._settings, row, drawn)))

    def append(self, group: PromptGroup, record: Record) -> bool:
        """Write one record; blocks. False if it could not be written: that is told once, and the run goes on."""
        body = self._encoder.encode(record)
        try:
            _append(home_of(self.directory, group.key) / self._name, body, self._synced)
        except OSError as error:
            if not self._told:
                log.warning("%s are not written down, and would be lost with their process: %s", self.kind, error)
            self._told = True
            return False
        return True

    def read(self, group: PromptGroup, *, this_life: bool) -> Iterator[tuple[float, Iterator[Record]]]:
        """The files of a group that other processes wrote: the newest version that counts, and the records.

        `this_life`: also those that were written since this start of the run."""
        home = home_of(self.directory, group.key)
        if not home.is_dir():
            return
        for path in sorted(home.glob(f"{self.kind}-*.log")):
            life = int(path.name.split("-")[1])
            earlier = life < len(self.lives) - 1
            if earlier or (this_life and path.name != self._name):
                yield min(self.lives[life + 1 :], default=math.inf), self._records(path)

    def _records(self, path: Path) -> Iterator[Record]:
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
                record = self._decoder.decode(body)
            except ValueError as error:  # msgspec's are among them: of another version of the program
                if path not in self._damaged:
                    log.warning("%s: the record at byte %d is passed over, and what follows: %s", path, place, error)
                self._damaged.add(path)
                return
            yield record
            place = start + size


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
