"""What becomes of the work of a process or server that is away, in words that are true for its kind. Pure."""

from __future__ import annotations

from configs.graph import engine_count, replicas
from configs.schema import Config


def consequence(config: Config, kind: str) -> str:
    """What follows while one of a kind (engine, frozen, router, or the name of a stage) is away."""
    if kind == "router":
        return "new requests wait for it, those it had go on at the engines directly"
    if kind == "engines":
        return "the engines go on with the weights that they have until it is back"
    if kind == "fetcher":
        return "the engines of its node go on with the weights that they have until it is back"
    if kind == "frozen":
        return "what is asked of it waits until it is back"
    there = engine_count(config) if kind == "engine" else replicas(config).get(kind, 1)
    return "its work goes to others" if there > 1 else "its work waits until it is back"
