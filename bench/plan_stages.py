"""The planner's answer for stages instead of GPUs: how many engines and how many replicas of the reward stage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from bench.plan_cluster import simulate
from bench.plan_types import Cluster

NEAR = 1.03  # splits whose step is within this of the fastest one count as equally fast; the smallest is taken

Split = tuple[int, int]  # engines, replicas of the reward stage


def stage_steps(cluster: Cluster, engines: Iterable[int], graders: Iterable[int]) -> dict[Split, float]:
    """Simulated seconds of a batch for each split."""
    graders = tuple(graders)
    return {
        (e, g): simulate(replace(cluster, engines=e, graders=g)).step_s / cluster.interval
        for e in engines
        for g in graders
    }


def best_split(steps: Mapping[Split, float]) -> Split:
    """The smallest of the fastest ones."""
    least = min(steps.values())
    return min(
        (split for split, step_s in steps.items() if step_s <= NEAR * least), key=lambda split: (sum(split), split)
    )
