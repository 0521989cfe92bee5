"""Turns that have ended, on the disk: what a killed controller takes with it, since every hub lives in its process.

`RUN/episodes/<group>/turns-<life>-<process>.log` has a record for each message that came with a turn of the model: only
what stands behind the turn before. A life of the run is one start of it. When a run is resumed and a rollout is begun
that an earlier life had begun, it goes on from the newest of its turns whose weights are part of the run's history:
their version is not above the steps from which every later life was resumed.

Invariants: a record is on the disk before the environment sees its turn; one process writes a file; a record is whole
(checksum) or it ends the reading of its file; records of this life are never read, so what is begun anew on purpose is;
of another message format, sampling or prompt nothing is restored.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from struct import Struct as Layout
from typing import Final

import msgspec
import numpy as np
import xxhash
from msgspec import Struct
from msgspec.structs import replace

from configs.schema import Config
from models.disk import sync
from stages.agents.once import home_of
from stages.live_settings import sampling
from stages.messages import PromptGroup, RolloutSlice, Sample, joined
from stages.train.saved_groups import fingerprint, message_decoder, message_encoder

log = logging.getLogger("sluice.agents")

_HEAD: Final = Layout("<QQ")  # bytes of the record, and their xxh3_64
_KNOWN: Final = 65_536  # rollouts of which is known what was written last


class Kept(Struct, frozen=True, array_like=True):
    """A rollout with a turn that its environment has not answered yet."""

    about: bytes  # of what it is a rollout: other prompts, seeds or settings make other bytes
    tokens: int  # that stand in the record before this one of the same rollout; the arrays begin behind them
    characters: int  # of its response
    sample: Sample


class TurnJournal:
    """The turns of one replica. `lives`: the step from which each life of the run went on; the last one is this."""

    def __init__(self, directory: Path, config: Config, lives: Sequence[int]) -> None:
        self._directory, self._lives = directory, lives
        self._writes = bool(lives) and config.checkpoint.save_interval is not None
        self._settings, self._rollout = about_settings(config), config.rollout
        self._name = f"turns-{len(lives) - 1}-{secrets.token_hex(6)}.log"
        self._last: OrderedDict[str, tuple[int, int, int]] = OrderedDict()  # tokens, their hash, characters
        self._told = False
        self.restored = 0

    async def keep(self, group: PromptGroup, sample: Sample) -> None:
        """Write a rollout down that has come with a turn. A disk that fails is told; the run goes on."""
        if not self._writes or group.purpose == "eval":
            return
        name = f"{group.key}/{sample.index}"
        tokens, was, characters = self._last.pop(name, (0, 0, 0))
        if sample.extras or sample.length < tokens or _hash(sample, tokens) != was:
            tokens = characters = 0
        body = _encoder.encode(Kept(self._about(group), tokens, characters, _behind(sample, tokens, characters)))
        try:
            await asyncio.to_thread(_append, home_of(self._directory, group.key) / self._name, body)
        except OSError as error:
            if not self._told:
                log.warning("turns are not written down, and would be lost with the controller: %s", error)
            self._told = True
            return
        self._last[name] = sample.length, _hash(sample, sample.length), len(sample.response)
        if len(self._last) > _KNOWN:
            self._last.popitem(last=False)

    async def restore(self, group: PromptGroup, sample: Sample) -> Sample:
        """The rollout with the turns that earlier lives have left of it, or as it is."""
        if len(self._lives) < 2 or group.purpose == "eval":
            return sample
        found = await asyncio.to_thread(self._found, group, sample.index)
        if found is None:
            return sample
        self.restored += 1
        log.info(
            "group %s: rollout %d goes on from turn %d, which an earlier life left",
            group.key,
            sample.index,
            found.turns,
        )
        return found

    def _found(self, group: PromptGroup, index: int) -> Sample | None:
        newest, about = None, self._about(group)
        for path in home_of(self._directory, group.key).glob("turns-*.log"):
            life = int(path.name.split("-")[1])
            if life >= len(self._lives) - 1:
                continue
            bound, before = min(self._lives[life + 1 :]), dict[int, Sample]()
            for kept in read_turns(path):
                sample = kept.sample
                if kept.tokens:
                    sample = _joined(before[sample.index], sample)
                before[sample.index] = sample
                fits = sample.index == index and kept.about == about and max(sample.model_versions, default=0) <= bound
                if fits and (newest is None or sample.turns > newest.turns):
                    newest = sample
        return newest

    def _about(self, group: PromptGroup) -> bytes:
        row = group.prompt, group.label, group.seed, group.metadata, group.tools
        drawn = sampling(group, self._rollout)
        return xxhash.xxh3_128_digest(msgspec.msgpack.encode((self._settings, row, drawn)))


def about_settings(config: Config) -> bytes:
    """Of all that decides what the tokens of a turn are, beside its weights."""
    # A run may be made longer; temperature and top-p are the group's.
    rollout = replace(config.rollout, num_rollout=None, num_epoch=None, rollout_temperature=1.0, rollout_top_p=1.0)
    settings = config.environment, rollout, config.train.hf_checkpoint, config.data.chat_template_path
    return xxhash.xxh3_128_digest(fingerprint(RolloutSlice) + msgspec.json.encode(settings, order="sorted"))


def read_turns(path: Path) -> Iterator[Kept]:
    """The records of a file, up to its end or to the first that is not whole."""
    data = path.read_bytes()
    place = 0
    while place + _HEAD.size <= len(data):
        size, checksum = _HEAD.unpack_from(data, place)
        place += _HEAD.size
        body = data[place : place + size]
        if len(body) < size or xxhash.xxh3_64_intdigest(body) != checksum:
            return
        try:
            yield _decoder.decode(body)
        except msgspec.MsgspecError:  # of another version of the program
            return
        place += size


_encoder = message_encoder()
_decoder = message_decoder(Kept)


def _behind(sample: Sample, tokens: int, characters: int) -> Sample:
    return replace(
        sample,
        token_ids=sample.token_ids[tokens:],
        loss_mask=sample.loss_mask[tokens:],
        log_probs=sample.log_probs[tokens:],
        response=sample.response[characters:],
    )


def _joined(before: Sample, behind: Sample) -> Sample:
    return replace(
        behind,
        token_ids=joined(before.token_ids, behind.token_ids),
        loss_mask=joined(before.loss_mask, behind.loss_mask),
        log_probs=joined(before.log_probs, behind.log_probs),
        response=before.response + behind.response,
    )


def _hash(sample: Sample, tokens: int) -> int:
    """Of the beginning of a sequence, everything that a later record leaves out."""
    arrays = sample.token_ids, sample.loss_mask, sample.log_probs
    return xxhash.xxh3_64_intdigest(b"".join(np.ascontiguousarray(array[:tokens]).tobytes() for array in arrays))


def _append(path: Path, body: bytes) -> None:
    new = not path.exists()
    if new:
        path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(_HEAD.pack(len(body), xxhash.xxh3_64_intdigest(body)) + body)
        file.flush()
        os.fdatasync(file.fileno())
    if new:
        for directory in path.parents[:3]:
            sync(directory)
