"""Slots of one engine at one of its clients, granted in an order.

Invariants:
- slots are granted in order: samples that go on (with tokens, and often a cache, behind them) before fresh ones, those
  with a smaller `order` before others, then as they came;
- a request for more samples than there are slots is granted when half of them are free: were all to be free, a group
  larger than the limit would wait for the slowest sample of the one before it, and with less it would overshoot twice;
- each sample gives its slot back when it ends, whatever the others of its request do;
- a turn that waits in a tool stage holds no slot.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from dataclasses import dataclass, field

FIRST_COME = (0, 0)  # the order of callers who do not care


class Slots:
    """`limit` slots, for samples that wait in a queue."""

    def __init__(self, limit: int) -> None:
        self.taken = 0
        self.queued = 0  # samples that wait; a number, for every request that chooses an engine asks for it
        self._limit = limit
        self._queue: list[_Waiter] = []  # a heap
        self._serial = itertools.count()

    @property
    def limit(self) -> int:
        return self._limit

    @limit.setter
    def limit(self, value: int) -> None:
        self._limit = value
        self._grant()

    async def take(self, n: int, *, goes_on: bool, order: tuple[int, int] = FIRST_COME) -> None:
        """Waits for `n` slots; unblocked when those before it have theirs and there is room, or by `wake_all`."""
        place = (not goes_on, *order, next(self._serial))
        waiter = _Waiter(place, n, asyncio.get_running_loop().create_future())
        heapq.heappush(self._queue, waiter)
        self.queued += n
        self._grant()
        try:
            await waiter.granted
        except asyncio.CancelledError:
            if waiter.granted.done() and not waiter.granted.cancelled():
                self.release(n)
            else:
                if waiter in self._queue:  # else `_grant` came across it, cancelled, and dropped it
                    self._queue.remove(waiter)
                    heapq.heapify(self._queue)
                    self.queued -= n
                self._grant()
            raise

    def release(self, n: int) -> None:
        self.taken -= n
        self._grant()

    def wake_all(self) -> None:
        """Grant what is asked, whatever the limit: the engine is gone or the run drains, and who waits must look."""
        self._grant(unbounded=True)

    def _grant(self, unbounded: bool = False) -> None:
        while self._queue:
            n = self._queue[0].n
            if self._queue[0].granted.cancelled():  # its task has not run since
                self.queued -= heapq.heappop(self._queue).n
                continue
            fits = self.taken + n <= self._limit or (n > self._limit and 2 * self.taken <= self._limit)
            if not fits and not unbounded:
                return
            waiter = heapq.heappop(self._queue)
            self.queued -= waiter.n
            self.taken += waiter.n
            waiter.granted.set_result(None)


@dataclass(order=True)
class _Waiter:
    place: tuple[bool, int, int, int]  # its last number is like no other's
    n: int = field(compare=False)
    granted: asyncio.Future[None] = field(compare=False)
