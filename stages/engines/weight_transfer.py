"""One update of one engine: its turn, the transfer of the bytes, and the check of the result.

Engines update all at once; with `--update-weight-rolling` so many at a time, in the order of their names, while the
others serve.

Invariants:
- the label goes with the last bucket, and so does the flush of the cache: until then the weights do not count as new;
- a bucket is copied out of the slot, the slot is checked, then the copy is sent: no torn byte leaves this process;
- the next bucket is copied while one is sent, the first before the engine is paused; a buffer is written again only
  after the engine has answered for what it held;
- an opened bracket is closed, also after a failure;
- an engine is admitted at a version only if it reports that version itself and, where checksums are compared, if its
  tensors have the checksum that other engines reported for the same version.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from models.engines.client import EngineClient, WeightsUpdated
from models.engines.http_client import NOT_FOUND
from models.errors import EngineError, EngineRefused, NotVerified
from models.weights.layout import plan_buckets
from models.weights.shared_memory_reader import SlotManifest, SlotReader
from stages.base import in_daemon_thread
from stages.messages import WeightsAnnouncement
from stages.ports import Topic, wait_at_most
from stages.topic_values import KEYS, carrying

if TYPE_CHECKING:
    import torch

    from models.weights.transfer import WeightGroup


log = logging.getLogger("sluice.engines")

TURN_TIMEOUT_S = 10.0  # how long an engine waits for previous engines that have not begun
TURN_LIMIT_S = 600.0  # and for previous engines that are updating


async def await_turn(topic: Topic, engine: str, announcement: WeightsAnnouncement, rolling: int | None) -> None:
    """Waits until fewer than `rolling` of the previous engines, by name, still lack the version; None: not at all.

    So at most `rolling` engines stand still at once: all updating engines precede the last of them by name.
    Unblocked by their entries, by their death (their entries then cease to count), or by a time limit, so that an
    engine that cannot be updated does not delay the rest. The limit is short while none of them is updating.
    """
    started, revision = time.monotonic(), 0
    idle_since = started
    while True:
        now = time.monotonic()
        wanted = (announcement.run_generation, announcement.version)
        before = (entry for name, entry in carrying(topic).items() if name < engine)
        lacking = [entry for entry in before if (entry.run_generation, entry.version) < wanted]
        if rolling is None or len(lacking) < rolling:
            return
        if any(entry.fetching >= 0 for entry in lacking):
            idle_since = now
        if now - idle_since > TURN_TIMEOUT_S or now - started > TURN_LIMIT_S:
            names = ", ".join(entry.engine for entry in lacking)
            log.warning("%s loads version %d before its turn: %s lack it", engine, announcement.version, names)
            return
        revision = await wait_at_most(1.0, topic.wait(revision, *KEYS)) or revision


T = TypeVar("T")


# Loads weights that are ready into a paused engine; the argument: whether it flushes its cache. Raises EngineError or
# WeightsError: the engine may hold a mixture then. May be called again.
Transfer = Callable[[bool], Awaitable[WeightsUpdated]]


class Preparation:
    """Has one engine load a directory, once for each version beside its weights, if it is one of ours."""

    def __init__(self, one_at_a_time: asyncio.Lock) -> None:
        """`one_at_a_time`: shared by the engines, of which each must see how much memory those before it took."""
        self._one_at_a_time = one_at_a_time
        self._unable: EngineClient | None = None
        self._loaded: tuple[EngineClient, SlotManifest] | None = None
        self._verifies = False  # that engine has compared the bytes itself, while it copied them

    async def make(
        self, client: EngineClient, claim: SlotManifest, verify: Callable[[], SlotReader] | None
    ) -> Transfer:
        """What has the paused engine load the directory by itself. `verify`: before an engine that does not do so.
        Raises EngineError and WeightsError."""
        if client is not self._unable and self._loaded != (client, claim):
            try:
                async with self._one_at_a_time:
                    self._verifies = await client.prepare_weights(claim)
            except EngineRefused as error:
                if error.status != NOT_FOUND:
                    raise
                self._unable, self._verifies = client, False  # another kind of engine
        verifies = self._verifies
        slot = None if verifies or verify is None else await asyncio.to_thread(verify)
        self._loaded = client, claim  # not before: what was loaded from other bytes is loaded again

        async def apply(flush_cache: bool) -> WeightsUpdated:
            # With the claim, for the engine may have had to give up what it prepared.
            done = await client.update_weights_from_disk(
                claim.path, claim.label, flush_cache=flush_cache, claim=claim if verifies else None
            )
            if slot is not None:
                slot.check()
            return done

        return apply


class BucketTransfer:
    """Buckets of a verified slot, sent in order inside a bracket. Subclasses own two buffers, and send one bucket."""

    memories: list[torch.Tensor]  # flat host tensors; bucket n goes through the one of n % 2

    def __init__(self, client: EngineClient, label: str, slot: SlotReader, bucket_bytes: int) -> None:
        self.client, self.label, self.slot = client, label, slot
        self.buckets = plan_buckets(slot.layout, bucket_bytes)
        self.largest = max(bucket.nbytes for bucket in self.buckets)
        self.parts = range(min(2, len(self.buckets)))  # the buffers
        self._held = [-1, -1]  # number of the bucket that lies in each buffer

    async def apply(self, flush_cache: bool) -> WeightsUpdated:
        last = len(self.buckets) - 1
        await self.client.begin_update()
        try:
            await asyncio.to_thread(self.fill, 0)  # again, if these weights were sent before
            for number in range(last):
                await together(partial(self.fill, number + 1), self._send(number, None, False))
            done = await self._send(last, self.label, flush_cache)
        except BaseException:
            with contextlib.suppress(EngineError):  # the first error counts; the next update closes the bracket
                await self.client.end_update()
            raise
        await self.client.end_update()
        return done

    async def _send(self, number: int, label: str | None, flush_cache: bool) -> WeightsUpdated:
        raise NotImplementedError

    def fill(self, number: int) -> None:
        """Copy a bucket out of the slot to the start of its buffer, if it is not there. Raises TornWeights."""
        if self._held[number % 2] == number:
            return
        bucket, self._held[number % 2] = self.buckets[number], -1
        np.copyto(self.memories[number % 2].numpy()[: bucket.nbytes], self.slot.between(bucket.start, bucket.end))
        self.slot.check()
        self._held[number % 2] = number


class TensorTransfer(BucketTransfer):
    """Through memory that the engine's ranks map."""

    def __init__(
        self, client: EngineClient, label: str, slot: SlotReader, bucket_bytes: int, devices: Sequence[str]
    ) -> None:
        """`devices`: of each rank of the engine, as this process counts them."""
        super().__init__(client, label, slot, bucket_bytes)
        from models.weights.transfer import SharedBuffer  # torch

        self.devices = devices
        self.buffers = [SharedBuffer(self.largest) for _ in self.parts]
        self.memories = [buffer.memory for buffer in self.buffers]

    async def _send(self, number: int, label: str | None, flush_cache: bool) -> WeightsUpdated:
        with self.buffers[number % 2].lent(self.buckets[number], self.devices) as payloads:
            return await self.client.update_from_tensor(payloads, label=label, flush_cache=flush_cache)


class GroupTransfer(BucketTransfer):
    """Through a process group, of which this process is rank 0."""

    def __init__(
        self, client: EngineClient, label: str, slot: SlotReader, bucket_bytes: int, group: WeightGroup, device: str
    ) -> None:
        super().__init__(client, label, slot, bucket_bytes)
        import torch

        self.group, self.device = group, device
        pinned = device == "cuda"
        self.memories = [torch.empty(self.largest, dtype=torch.uint8, pin_memory=pinned) for _ in self.parts]

    async def _send(self, number: int, label: str | None, flush_cache: bool) -> WeightsUpdated:
        bucket = self.buckets[number]
        staged = self.memories[number % 2][: bucket.nbytes]
        receiving = self.client.update_from_distributed(self.group.name, bucket, label=label, flush_cache=flush_cache)
        return await together(lambda: self.group.broadcast(staged.to(self.device)), receiving)


async def together(blocking: Callable[[], None], call: Coroutine[Any, Any, T]) -> T:
    """Run the blocking half of a rendezvous beside the HTTP call that starts the other half; return the call's answer.

    Waits for both; unblocked by the first error, which is raised. The blocking half runs in a daemon thread, so that it
    cannot delay the end of the process: gloo cannot be interrupted, only timed out.
    """
    halves = asyncio.wrap_future(in_daemon_thread(blocking, "weights")), asyncio.get_running_loop().create_task(call)
    try:
        # No TaskGroup: after an error in one, Python before 3.11.3 turns the next time limit into a cancellation.
        return (await asyncio.gather(*halves))[1]
    finally:
        for half in halves:
            half.cancel()
        await asyncio.wait(halves)


LABEL_TRIES = 10
LABEL_WAIT_S = 0.1


class ChecksumDiffers(NotVerified):
    """Two engines at one version hold different tensors."""


async def verify(
    topic: Topic, engine: str, client: EngineClient, announcement: WeightsAnnouncement, checksums: bool
) -> str:
    """The engine's checksum if checksums are compared, else "". Raises NotVerified unless the engine reports the label,
    and ChecksumDiffers if another engine reported another checksum for the same version."""
    label, tries = announcement.label, 1
    # Asked a few times, because a different process of the server answers than the process that loaded the weights.
    while (reported := (await client.model_info()).weight_version) != label:
        if tries == LABEL_TRIES:
            raise NotVerified(
                f"{engine} reports weights {reported!r} after an update to {label!r}; it stays paused until it reports "
                "them. Did another client update it?"
            )
        tries += 1
        await asyncio.sleep(LABEL_WAIT_S)
    if not checksums:
        return ""
    checksum = await client.checksum()
    for peer in carrying(topic).values():
        same = (peer.run_generation, peer.version) == (announcement.run_generation, announcement.version)
        if same and peer.engine != engine and peer.checksum and peer.checksum != checksum:
            raise ChecksumDiffers(
                f"{engine} has checksum {checksum} at version {announcement.version}, {peer.engine} reported "
                f"{peer.checksum}; it gets no requests until they agree, and is now loaded in full. Engines that "
                "differ by design (other tensor-parallel size, other precision) need --no-check-weight-update-equal"
            )
    return checksum
