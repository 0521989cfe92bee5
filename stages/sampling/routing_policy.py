"""Which engine comes first for a request: the dispatch policies, pure.

Behind a router it is the router that chooses; what goes to an engine directly all the same follows the same policy.

Invariants: every ranking holds each engine once; `session` moves only the keys of an engine that came or went.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import xxhash

from models.engines.launch.router_command import Policy

CROWDED: Final = 1.25  # cache_aware leaves an engine with more than this share of the mean load


@dataclass(frozen=True)
class Choice:
    """What a policy looks at. `loads`: samples in flight and queued by engine."""

    key: str  # requests of one key belong together: a group, with all turns of its rollouts
    prompt: bytes  # token ids of the prompt
    n: int  # samples asked for
    loads: Mapping[str, int]

    @property
    def names(self) -> list[str]:
        return sorted(self.loads)


class Ranking:
    """Orders engines, best first, by one policy."""

    def __init__(self, policy: Policy, seed: int) -> None:
        self.policy = policy
        self._random = random.Random(seed)
        # Replicas begin at different engines: none knows of the others' requests, and at first all loads are equal.
        self._turn = self._first = seed
        self._rank: Callable[[Choice], Sequence[str]] = {
            "least_loaded": self._least_loaded,
            "round_robin": self._round_robin,
            "random": self._shuffled,
            "power_of_two": self._power_of_two,
            "session": _session,
            "cache_aware": _cache_aware,
        }[policy]

    def rank(self, choice: Choice) -> list[str]:
        """Names of all engines of the choice, the best first."""
        return list(self._rank(choice))

    def _round_robin(self, choice: Choice) -> Sequence[str]:
        names = choice.names
        first = self._turn % len(names) if names else 0
        self._turn += 1
        return names[first:] + names[:first]

    def _least_loaded(self, choice: Choice) -> Sequence[str]:
        names = choice.names
        first = self._first % len(names) if names else 0
        return sorted(names[first:] + names[:first], key=lambda name: choice.loads[name])

    def _shuffled(self, choice: Choice) -> Sequence[str]:
        return self._random.sample(choice.names, len(choice.names))

    def _power_of_two(self, choice: Choice) -> Sequence[str]:
        drawn = self._shuffled(choice)
        return sorted(drawn[:2], key=lambda name: choice.loads[name]) + list(drawn[2:])


def _session(choice: Choice) -> Sequence[str]:
    """Rendezvous hashing: each key ranks the engines in an order of its own."""
    return _rendezvous(choice.names, choice.key.encode())


def _cache_aware(choice: Choice) -> Sequence[str]:
    """The engine that a prompt always goes to, which then has its prefix, unless that one is crowded."""
    names = _rendezvous(choice.names, choice.prompt)
    bound = CROWDED * (sum(choice.loads.values()) + choice.n) / max(len(names), 1)
    return sorted(names, key=lambda name: choice.loads[name] > 0 and choice.loads[name] + choice.n > bound)


def _rendezvous(names: Sequence[str], key: bytes) -> list[str]:
    return sorted(names, key=lambda name: xxhash.xxh3_64_intdigest(name.encode() + b"\0" + key))
