"""How an engine leaves a run that goes on: it gets no new work, gives back what it holds, and then says so.

Clients choose among the entries of the directory, so that `leaving` turns new requests away. What the engine generates
is aborted: each client has the partial output then and goes on behind it at another engine, as after an update that
aborts (stages/sampling/partial_rollouts.py). The abort is repeated until the engine is empty, for a client may have
sent before it heard.

Invariant: nothing depends on this: an engine that ends without it is lost like any other, and its requests go on
elsewhere, with less of what was generated.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from models.engines.client import EngineClient
from models.engines.errors import EngineError

LOOK_S: Final = 0.2
EMPTY_LOOKS: Final = 3  # in a row, after which nothing more is expected: all clients have heard


async def hand_over(client: EngineClient, stands: Callable[[], bool]) -> None:
    """Empty an engine whose entry says `leaving`. Waits until it holds nothing, or is lost.

    `stands`: whether the engine is still the one that `client` asks.
    """
    empty = 0
    while empty < EMPTY_LOOKS and stands():
        with contextlib.suppress(EngineError):  # lost, or busy: looked at again
            loads = await client.loads()
            busy = any(load.num_running_reqs + load.num_waiting_reqs for load in loads)
            empty = 0 if busy else empty + 1
            if busy:
                await client.abort()
        await asyncio.sleep(LOOK_S)
