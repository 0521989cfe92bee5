"""Reading end of the delta route: a local copy of the weights, kept current by differences, that engines load from.

Two slot directories beside the engines, filled in turns as the trainer's are. Getting to a version means the shortest
way there: the differences from the version that lies here, else the newest full version that leads on to it and the
differences after that.

Invariants:
- a version is handed out only if the digest of its bytes is the announced one; a difference is applied only to bytes of
  the digest that it names as its base;
- a slot is not overwritten while an engine loads from it (`lent`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

from models.errors import CheckpointUnavailable, DeltaError, DigestMismatch, SourceError
from models.weights.delta import Label, apply_delta, differences, full_versions, read_header, text_of
from models.weights.layout import WEIGHTS_FILE, StoredTensor, read_layout, stored_tensors
from models.weights.shared_memory_reader import SlotManifest, SlotReader
from models.weights.shared_memory_writer import SlotWriter
from models.weights.slot_directory import choose_directory

log = logging.getLogger("sluice.weights")


def way_to(target: Label, have: Label | None, directory: Path) -> tuple[Label | None, list[Path]]:
    """How to get to `target`: the full version to begin with (None: from `have`), then the differences in order.

    Raises DeltaError if no full version in the directory leads there.
    """
    links, full = differences(directory), full_versions(directory)
    steps: list[Path] = []
    begin: tuple[Label, list[Path]] | None = None  # newest full version on the way, and what leads on from it
    at = target
    while at != have:
        if at in full and begin is None:
            begin = at, [*steps]
        if at not in links:
            break
        at, path = links[at]
        steps.insert(0, path)
    else:
        return None, steps
    if begin is None:
        raise DeltaError(
            f"{directory} has no way to version {text_of(target)}: neither full weights of {text_of(at)} nor a "
            "difference to it; wait for the next version, and check that trainer and engines see one directory"
        )
    return begin


class DeltaMirror:
    """The local copy of one machine. All engines of a process share one.

    It is made when it is first needed: in shared memory if that has the room, else in `fallback`.
    """

    def __init__(self, name: str, fallback: Path) -> None:
        self.name, self.fallback = name, fallback
        self._slots: SlotWriter | None = None
        self._held: SlotManifest | None = None
        self._moving = asyncio.Lock()
        self.preparing = asyncio.Lock()  # held while an engine loads beside its weights
        self._lent: Counter[str] = Counter()
        self._returned = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def lent(self, claim: SlotManifest, source: Path, *, anew: bool = False) -> AsyncIterator[SlotManifest]:
        """The announced version in a local slot, which stays as it is inside the block.

        `source`: the directory of differences. `anew`: begin with full weights, whatever the slots hold. Waits for
        others that load from the slot that is overwritten; unblocked by their end. Raises WeightsError.
        """
        async with self._moving:
            manifest = await self._reach(claim, source, anew)
            self._lent[manifest.path] += 1
        try:
            yield manifest
        finally:
            async with self._returned:
                self._lent[manifest.path] -= 1
                self._returned.notify_all()

    def close(self) -> None:
        """Remove the copy. May be called twice."""
        if self._slots is not None:
            self._slots.close()
        self._slots = self._held = None

    async def _reach(self, claim: SlotManifest, source: Path, anew: bool) -> SlotManifest:
        held = self._held
        if held is not None and not anew and _label(held) == _label(claim) and held.digest == claim.digest:
            return held
        try:
            start, steps = way_to(_label(claim), None if anew or held is None else _label(held), source)
            return await self._walk(claim, source, start, steps)
        except DeltaError as error:
            if held is None or anew:
                raise
            log.warning("the way from %s to %s is broken, taking full weights: %s", held.version, claim.version, error)
        start, steps = way_to(_label(claim), None, source)
        return await self._walk(claim, source, start, steps)

    async def _walk(self, claim: SlotManifest, source: Path, start: Label | None, steps: list[Path]) -> SlotManifest:
        if start is not None:
            await self._step(partial(self._take_full, start, source))
        for step in steps:
            await self._step(partial(self._take_delta, step))
        assert self._held is not None, "a way has at least one step"
        if self._held.digest != claim.digest:
            held, self._held = self._held, None
            raise DigestMismatch(
                f"{source}: version {claim.label} was put together with digest {held.digest}, announced was "
                f"{claim.digest}; the next try begins with full weights"
            )
        return self._held

    async def _step(self, work: Callable[[], None]) -> None:
        """One write, in a thread. Waits until no engine loads from its slot."""
        slots = self._slots
        if slots is not None:
            async with self._returned:
                await self._returned.wait_for(lambda: not self._lent[str(slots.next_path)])
        await asyncio.to_thread(work)

    def _take_full(self, label: Label, source: Path) -> None:
        path = full_versions(source).get(label)
        if path is None:
            raise DeltaError(f"the full weights of {text_of(label)} left {source} meanwhile; fetch again")
        try:
            if self._slots is None:
                nbytes = read_layout(path / WEIGHTS_FILE).file_bytes
                self._slots = SlotWriter(choose_directory(self.name, self.fallback, nbytes), path)
            self._held = self._slots.write(label[1], label[0], stored_tensors(path / WEIGHTS_FILE))
        except (OSError, SourceError, CheckpointUnavailable) as error:
            raise DeltaError(f"{path} cannot be read ({error}); fetch again") from error

    def _take_delta(self, path: Path) -> None:
        held, slots = self._held, self._slots
        assert held is not None, "a difference follows a version that lies here"
        assert slots is not None, "a difference follows a version that lies here"
        header = read_header(path)
        if header.base_digest != held.digest:
            raise DeltaError(
                f"{path} leads on from digest {header.base_digest}, here lies {held.digest} as version "
                f"{held.label}; take the full weights"
            )
        run_generation, _, version = header.label.partition(".")
        stored = ((spec.name, StoredTensor(spec, data.data)) for spec, data in apply_delta(path, SlotReader(held)))
        new = slots.write(int(version), int(run_generation), stored)
        if new.digest != header.digest:
            self._held = None  # both slots are of no use as a base now: one is older, one is wrong
            raise DeltaError(f"{path} gave digest {new.digest} instead of {header.digest}; take the full weights")
        self._held = new


def _label(claim: SlotManifest) -> Label:
    return claim.run_generation, claim.version
