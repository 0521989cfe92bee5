"""Slots of one engine at one of its clients, granted in an order.

Invariants:
- slots are granted in order, samples that go on (with tokens, and often a cache, behind them) before fresh ones;
- a request for more samples than there are slots is granted when half of them are free: were all to be free, a group
  larger than the limit would wait for the slowest sample of the one before it, and with less it would overshoot twice;
- each sample gives its slot back when it ends, whatever the others of its request do;
- a turn that waits in a tool stage holds no slot.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass


class Slots:
    """`limit` slots; samples take them in the order in which they asked."""

    def __init__(self, limit: int) -> None:
        self.taken = 0
        self._limit = limit
        self._queues: tuple[deque[_Waiter], deque[_Waiter]] = (deque(), deque())

    @property
    def limit(self) -> int:
        return self._limit

    @limit.setter
    def limit(self, value: int) -> None:
        self._limit = value
        self._grant()

    @property
    def queued(self) -> int:
        """Samples that wait."""
        return sum(waiter.n for queue in self._queues for waiter in queue)

    async def take(self, n: int, *, goes_on: bool) -> None:
        """Waits for `n` slots; unblocked when those before it have theirs and there is room, or by `wake_all`."""
        waiter = _Waiter(n, asyncio.get_running_loop().create_future())
        self._queues[0 if goes_on else 1].append(waiter)
        self._grant()
        try:
            await waiter.granted
        except asyncio.CancelledError:
            if waiter.granted.done() and not waiter.granted.cancelled():
                self.release(n)
            else:
                self._queues[0 if goes_on else 1].remove(waiter)
                self._grant()
            raise

    def release(self, n: int) -> None:
        self.taken -= n
        self._grant()

    def wake_all(self) -> None:
        """Grant what is asked, whatever the limit: the engine is gone or the run drains, and who waits must look."""
        self._grant(unbounded=True)

    def _grant(self, unbounded: bool = False) -> None:
        for queue in self._queues:
            while queue:
                n = queue[0].n
                fits = self.taken + n <= self._limit or (n > self._limit and 2 * self.taken <= self._limit)
                if not fits and not unbounded:
                    return
                waiter = queue.popleft()
                self.taken += waiter.n
                waiter.granted.set_result(None)


@dataclass(eq=False)
class _Waiter:
    n: int
    granted: asyncio.Future[None]
