"""Processes that train together, each with its number among them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def run_ranks(
    target: Callable[..., None],
    arguments: Sequence[Any],
    world: int,
    meeting: Path,
    *,
    imports: list[str],
    deadline_s: float,
) -> None:
    """Call `target(*arguments, rank, world, meeting)` in so many processes, and check that all of them end well.

    `imports`: what all of them need, imported once, in a process that has trained nothing.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(imports)
    processes = [
        context.Process(target=target, args=(*map(str, arguments), rank, world, str(meeting)), daemon=True)
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(deadline_s)
    left = [process for process in processes if process.is_alive()]
    for process in left:
        process.kill()
    assert not left, "a process waits for the others: they took different decisions"
    assert [process.exitcode for process in processes] == [0] * world
