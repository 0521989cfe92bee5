"""A lease without a hub behind it, for parts that only pass leases on."""

from __future__ import annotations

from dataclasses import dataclass, field

from stages.messages import RolloutSlice


@dataclass
class Held:
    """A lease that belongs to no hub."""

    message: RolloutSlice
    key: str = ""
    attempt: int = 1
    ends: list[str] = field(default_factory=list)

    def done(self) -> None:
        self.ends.append("done")

    def poison(self, reason: str) -> None:
        self.ends.append("poison")
