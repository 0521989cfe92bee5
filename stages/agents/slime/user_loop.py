"""The event loop of a user's coroutines: a thread of its own, so that what they block is not the stage.

Invariant: all calls of one process run in one loop, because clients and locks that user code keeps between calls belong
to the loop in which they were made.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, Final

_END_S: Final = 5.0


class UserLoop:
    """Started at the first call; `close` cancels what still runs."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def submit(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Begin the coroutine. To be asked by one thread at a time."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="user-functions", daemon=True)
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        """What the coroutine returns or raises. Cancelled, it cancels it, and does not wait until that has worked."""
        return await asyncio.wrap_future(self.submit(work))

    def close(self) -> None:
        """Blocking for a few seconds at the most: a thread that does not come back ends with the process."""
        if self._loop is None or self._thread is None:
            return
        asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop)
        self._thread.join(_END_S)


async def _cancel_all() -> None:
    """Cancel what runs in this loop, wait for it, and stop the loop."""
    mine = asyncio.current_task()
    tasks = [task for task in asyncio.all_tasks() if task is not mine]
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_END_S / 2)
    asyncio.get_running_loop().stop()
