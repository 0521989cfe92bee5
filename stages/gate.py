"""The staleness gate: how many groups may be out, and how old a token may be when it is trained. Pure arithmetic.

A *version* counts the rollout batches that the weights were trained on. With B groups a batch and the bound eta:

    admission    capacity = (v + eta + 1) * B - trained - open,   v = version that every live engine has applied
    consumption  batch t takes a group only if t - (oldest version among its trainable tokens) <= eta

Invariant I2: no token older than eta versions is trained. Admission is the pace, consumption the guarantee: a group
that needs many turns can outlive any admission rule. A slot frees when new weights have landed in the engines, since
until then a new prompt would be born old.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StalenessGate:
    """`batch`: groups per rollout batch (B). `total`: rollout batches of the whole run, None = open end."""

    batch: int
    max_staleness: int
    total: int | None = None

    def capacity(self, *, version: int, trained: int, open_groups: int) -> int:
        """Groups that may be admitted now (never negative). `trained` counts groups."""
        free = (version + self.max_staleness + 1) * self.batch - trained - open_groups
        if self.total is not None:
            free = min(free, self.total * self.batch - trained - open_groups)
        return max(free, 0)

    def fresh(self, *, step: int, oldest_version: int) -> bool:
        """Whether batch `step` (0 = the first) may train a group whose oldest token has this version."""
        return step - oldest_version <= self.max_staleness

    @property
    def most_open(self) -> int:
        """Bound of groups out at any time: what every stream must be able to hold."""
        return (self.max_staleness + 1) * self.batch
