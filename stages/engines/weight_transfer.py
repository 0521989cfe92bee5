"""One version on its way into one engine that stands still.

Invariants:
- the label goes with the last bucket, and so does the flush: until then nothing calls the weights new;
- a bucket is copied out of the slot, the slot is checked, then the copy is sent: no torn byte leaves this process;
- a bracket that was opened is closed, also after a failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from models.engines.client import EngineClient, WeightsUpdated
from models.engines.errors import EngineError
from models.engines.update_client import UpdateClient
from models.weights.layout import Bucket, plan_buckets
from models.weights.shared_memory_reader import SlotReader

if TYPE_CHECKING:
    import torch

    from models.weights.broadcast_group import WeightGroup

T = TypeVar("T")


class Transfer(Protocol):
    """Weights that are ready to be put into an engine that is paused."""

    async def apply(self, flush_cache: bool) -> WeightsUpdated:
        """Put them in. Raises EngineError or WeightsError: the engine may hold a mixture then. May be called again."""


class DiskTransfer:
    """A directory that the engine loads by itself; `check` tells afterwards whether it stayed as it was."""

    def __init__(self, client: EngineClient, path: str, label: str, check: Callable[[], None]) -> None:
        self.client, self.path, self.label, self.check = client, path, label, check

    async def apply(self, flush_cache: bool) -> WeightsUpdated:
        done = await self.client.update_weights_from_disk(self.path, self.label, flush_cache=flush_cache)
        self.check()
        return done


class BucketTransfer:
    """Buckets of a verified slot, one after the other inside a bracket. Subclasses say how one is sent."""

    def __init__(self, update: UpdateClient, label: str, slot: SlotReader, bucket_bytes: int) -> None:
        self.update, self.label, self.slot = update, label, slot
        self.buckets = plan_buckets(slot.layout, bucket_bytes)
        self.largest = max(bucket.nbytes for bucket in self.buckets)

    async def apply(self, flush_cache: bool) -> WeightsUpdated:
        await self.update.begin()
        try:
            for bucket in self.buckets[:-1]:
                await self._send(bucket, None, False)
            done = await self._send(self.buckets[-1], self.label, flush_cache)
        except BaseException:
            with contextlib.suppress(EngineError):  # the first error counts; the next update closes it otherwise
                await self.update.end()
            raise
        await self.update.end()
        return done

    async def _send(self, bucket: Bucket, label: str | None, flush_cache: bool) -> WeightsUpdated:
        raise NotImplementedError

    def _fill(self, target: torch.Tensor, bucket: Bucket) -> None:
        """Copy a bucket out of the slot into the begin of a flat host tensor. Raises TornWeights."""
        np.copyto(target.numpy()[: bucket.nbytes], self.slot.between(bucket.start, bucket.end))
        self.slot.check()


class TensorTransfer(BucketTransfer):
    """Through memory that the engine's ranks map."""

    def __init__(
        self, update: UpdateClient, label: str, slot: SlotReader, bucket_bytes: int, ranks: int, device: str
    ) -> None:
        super().__init__(update, label, slot, bucket_bytes)
        from models.weights.tensors import SharedBuffer  # torch

        self.ranks, self.device = ranks, device
        self.buffer = SharedBuffer(self.largest)

    async def _send(self, bucket: Bucket, label: str | None, flush_cache: bool) -> WeightsUpdated:
        await asyncio.to_thread(self._fill, self.buffer.memory, bucket)
        with self.buffer.lent(bucket, self.ranks, self.device) as payloads:
            return await self.update.update_from_tensor(payloads, label=label, flush_cache=flush_cache)


class GroupTransfer(BucketTransfer):
    """Through a process group, of which this process is rank 0."""

    def __init__(
        self, update: UpdateClient, label: str, slot: SlotReader, bucket_bytes: int, group: WeightGroup, device: str
    ) -> None:
        super().__init__(update, label, slot, bucket_bytes)
        import torch

        self.group, self.device = group, device
        self.host = torch.empty(self.largest, dtype=torch.uint8, pin_memory=device == "cuda")

    async def _send(self, bucket: Bucket, label: str | None, flush_cache: bool) -> WeightsUpdated:
        await asyncio.to_thread(self._fill, self.host, bucket)
        staged = self.host[: bucket.nbytes]
        receiving = self.update.update_from_distributed(
            self.group.name, bucket.names, bucket.dtypes, bucket.shapes, label=label, flush_cache=flush_cache
        )
        return await together(lambda: self.group.broadcast(staged.to(self.device)), receiving)


async def together(blocking: Callable[[], None], call: Coroutine[Any, Any, T]) -> T:
    """Run a blocking half of a rendezvous beside the HTTP call that brings the other half; the call's answer.

    Waits for both; unblocked by the first error, which is raised. The blocking half has a thread of its own that does
    not hold the process up at its end: gloo cannot be interrupted, only timed out.
    """
    ended: Future[None] = Future()
    ended.set_running_or_notify_cancel()  # it cannot be interrupted

    def work() -> None:
        try:
            blocking()
        except Exception as error:
            ended.set_exception(error)
        else:
            ended.set_result(None)

    threading.Thread(target=work, name="weights", daemon=True).start()
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_wait(asyncio.wrap_future(ended)))
            answer = tasks.create_task(call)
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    return answer.result()


async def _wait(ended: asyncio.Future[None]) -> None:
    await ended
