"""The time during which this process could run: the clock by which silence and leases are measured.

A process may be stopped (Ctrl-Z, `docker pause`, swap, a machine that sleeps). Messages arrive all the same and wait
to be read, so a peer is not silent because this process did not listen. Loop time would run on; this clock does not.
"""

from __future__ import annotations

import asyncio
import weakref
from typing import Final

TICK_S: Final = 1.0
LATE_S: Final = 1.0  # a tick that is later than this found the process stopped, or its loop blocked: nobody listened

_clocks: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, AwakeClock] = weakref.WeakKeyDictionary()


class AwakeClock:
    """Loop time without the time in which the loop could not run. Made by `awake_clock`, one for each loop.

    The first reader after a stop finds the tick late, so the order in which tasks continue does not matter.
    """

    def __init__(self, time: float) -> None:
        self.asleep_s = 0.0  # so far
        self._due_at = time + TICK_S  # by then something reads the clock, if only its tick

    def now(self, time: float) -> float:
        """The awake time at this loop time, in seconds; never goes back."""
        if (late_s := time - self._due_at) > LATE_S:
            self.asleep_s += late_s
        self._due_at = max(self._due_at, time)
        return time - self.asleep_s

    def slept(self) -> float:
        """Seconds in which the running loop could not run, so far."""
        self.now(asyncio.get_running_loop().time())
        return self.asleep_s

    def tick(self, loop_of: weakref.ref[asyncio.AbstractEventLoop]) -> None:
        """The loop runs: the next tick is due in TICK_S."""
        if (loop := loop_of()) is not None and not loop.is_closed():
            self.now(loop.time())
            self._due_at = loop.time() + TICK_S
            loop.call_later(TICK_S, self.tick, loop_of)


def awake_clock() -> AwakeClock:
    """The clock of the running loop."""
    loop = asyncio.get_running_loop()
    if (clock := _clocks.get(loop)) is None:
        clock = _clocks[loop] = AwakeClock(loop.time())
        clock.tick(weakref.ref(loop))
    return clock
