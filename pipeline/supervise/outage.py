"""User-facing text: what happens to the work of a process or server while it is down. No I/O, no clock."""

from __future__ import annotations

from configs.graph import engine_count, replicas
from configs.schema import Config


def outage_text(config: Config, kind: str) -> str:
    """While a process of this kind (engine, frozen, router, or the name of a stage) is down."""
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
