"""Which engine comes first for a request (dispatch policies), and the slots of one engine at one of its clients.

Behind a router the router chooses; requests that bypass it follow the same policy. No I/O, no clock.

Invariants:
- every ranking holds each engine once; `session` moves only the keys of an engine that joined or left, `sticky` also
  those of an engine that has more than its share;
- slots are granted in order: resumed samples (with tokens, and often a cache, behind them) before fresh ones, then
  the smaller `order`, then first come;
- a request for more samples than there are slots is granted when half of them are free. Waiting for all would make a
  group larger than the limit wait for the slowest sample before it; waiting for fewer would overshoot twice;
- each sample returns its slot when it ends, whatever the other samples of its request do;
- a turn that waits for a tool holds no slot.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import xxhash
from msgspec import Struct

from models.engines.launch.command import Policy

FIRST_COME = (0, 0)  # order of callers without a preference


class Slots:
    """`limit` slots, and a queue of samples that wait for them."""

    def __init__(self, limit: int) -> None:
        self.taken = 0
        self.queued = 0  # samples that wait; kept as a number because every choice of an engine reads it
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
                if waiter in self._queue:  # else `_grant` has dropped it as cancelled
                    self._queue.remove(waiter)
                    heapq.heapify(self._queue)
                    self.queued -= n
                self._grant()
            raise

    def release(self, n: int) -> None:
        self.taken -= n
        self._grant()

    def wake_all(self) -> None:
        """Grant all waiting requests whatever the limit: the engine is gone or the run drains, so they choose again."""
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
    place: tuple[bool, int, int, int]  # the last number is unique
    n: int = field(compare=False)
    granted: asyncio.Future[None] = field(compare=False)


CROWDED: Final = 1.25  # cache_aware and sticky leave an engine with more than this share of the mean load


class Choice(Struct, frozen=True):
    """The input of a policy. `loads`: samples in flight and queued, by engine."""

    key: str  # requests of one key belong together: a group, with all turns of its rollouts
    prompt: bytes  # token ids of the prompt
    n: int  # samples of the request
    loads: Mapping[str, int]

    @property
    def names(self) -> list[str]:
        return sorted(self.loads)


class Ranking:
    """Orders engines, best first, by one policy."""

    def __init__(self, policy: Policy, seed: int) -> None:
        self.policy = policy
        self._random = random.Random(seed)
        # Replicas begin at different engines: none sees the requests of the rest, and at first all loads are equal.
        self._turn = self._first = seed
        # Names of all engines, best first.
        self.rank: Callable[[Choice], list[str]] = {
            "least_loaded": self._least_loaded,
            "round_robin": self._round_robin,
            "random": self._shuffled,
            "power_of_two": self._power_of_two,
            "session": lambda choice: _rendezvous(choice.names, choice.key.encode()),
            "sticky": self._sticky,
            "cache_aware": _cache_aware,
        }[policy]

    def _round_robin(self, choice: Choice) -> list[str]:
        names = choice.names
        first = self._turn % len(names) if names else 0
        self._turn += 1
        return names[first:] + names[:first]

    def _least_loaded(self, choice: Choice) -> list[str]:
        names = choice.names
        first = self._first % len(names) if names else 0
        return sorted(names[first:] + names[:first], key=lambda name: choice.loads[name])

    def _sticky(self, choice: Choice) -> list[str]:
        """The engine of the session, unless it has more than its share already: then the least loaded engine.

        A request cannot be divided, so its own samples do not count against the engine.
        """
        names = _rendezvous(choice.names, choice.key.encode())
        share = CROWDED * (sum(choice.loads.values()) + choice.n) / max(len(names), 1)
        return self._least_loaded(choice) if names and choice.loads[names[0]] > share else names

    def _shuffled(self, choice: Choice) -> list[str]:
        return self._random.sample(choice.names, len(choice.names))

    def _power_of_two(self, choice: Choice) -> list[str]:
        drawn = self._shuffled(choice)
        return sorted(drawn[:2], key=lambda name: choice.loads[name]) + drawn[2:]


def _cache_aware(choice: Choice) -> list[str]:
    """The engine that always gets this prompt, and so has its prefix cached, unless it is crowded."""
    names = _rendezvous(choice.names, choice.prompt)
    bound = CROWDED * (sum(choice.loads.values()) + choice.n) / max(len(names), 1)
    return sorted(names, key=lambda name: choice.loads[name] > 0 and choice.loads[name] + choice.n > bound)


def _rendezvous(names: Sequence[str], key: bytes) -> list[str]:
    """Rendezvous hashing: each key ranks the engines in its own order."""
    return sorted(names, key=lambda name: xxhash.xxh3_64_intdigest(name.encode() + b"\0" + key))
