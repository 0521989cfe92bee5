"""Device memory that an engine gives back while somebody else has the device. Pure: nothing is allocated here.

Invariants:
- memory is given back only by an engine that is paused and runs nothing, and an engine that lacks any does not go on;
- weights that were given back are undefined until new ones are loaded, also after their memory is there again;
- giving back what is away already, and taking what is there, do nothing: a call may be repeated.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal

from msgspec import Struct

from models.engines.errors import RequestRefused, WeightsRefused

MemoryTag = Literal["kv_cache", "weights", "cuda_graph"]
ALL_TAGS: Final[tuple[MemoryTag, ...]] = ("kv_cache", "weights", "cuda_graph")


class MemoryRequest(Struct, frozen=True):
    """Body of both memory calls; without tags it is about everything."""

    tags: list[MemoryTag] | None = None

    @property
    def wanted(self) -> tuple[MemoryTag, ...]:
        return ALL_TAGS if self.tags is None else tuple(dict.fromkeys(self.tags))


class MemoryAccount:
    """What of one engine's memory is away."""

    def __init__(self) -> None:
        self.away: set[MemoryTag] = set()
        self.unloaded = False  # the weights are undefined
        self.releases = 0

    def release(self, tags: Iterable[MemoryTag], *, paused: bool, running: int) -> frozenset[MemoryTag]:
        """Note what is given back; what of it is news. Raises RequestRefused, with nothing noted."""
        if not paused or running:
            state = f"{running} requests are running" if running else "generation is not paused"
            raise RequestRefused(
                f"memory cannot be given back while {state}; call /pause_generation with mode abort first"
            )
        news = frozenset(tags) - self.away
        self.away |= news
        self.unloaded |= "weights" in news
        self.releases += bool(news)
        return news

    def resume(self, tags: Iterable[MemoryTag]) -> frozenset[MemoryTag]:
        """Note what is there again; what of it was away."""
        news = frozenset(tags) & self.away
        self.away -= news
        return news

    def check_load(self) -> None:
        """Raise WeightsRefused if there is no memory for weights."""
        if "weights" in self.away:
            raise WeightsRefused(
                "the memory of the weights is given back, so that none can be loaded; call "
                "/resume_memory_occupation with the tag weights first"
            )

    def loaded(self) -> None:
        """Weights are there."""
        self.unloaded = False

    def check_weights(self) -> None:
        """Raise RequestRefused if there are no weights to look at."""
        if self.unloaded:
            raise RequestRefused("the memory of the weights was given back; load weights first")

    def check_whole(self) -> None:
        """Raise RequestRefused unless everything is there that generation needs."""
        if self.away:
            names = ", ".join(sorted(self.away))
            raise RequestRefused(
                f"generation cannot go on without the memory of {names}; call /resume_memory_occupation first"
            )
        if self.unloaded:
            raise RequestRefused("generation cannot go on: the weights' memory was given back; load weights first")
