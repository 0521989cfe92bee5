"""Is an engine well? A pure account of looks at it, the looks themselves, and the loop that takes them.

What a look finds is None (well) or a fault in words. N faults in a row make an engine lost, one good look makes it
recovered. What counts as a fault:

1. `/health` gives no 200 within the timeout. A paused engine answers 200 (SGLang because it is started with
   SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=false, without which it would try to generate and fail).
2. With SGLang, `/health` is the HTTP process's alone. So a process of the engine that is stopped is a fault, and so is
   a scheduler without an answer to `/server_info`, which queries it. It may be slow for good reasons: while it loads
   weights, or compiles a kernel. So that look counts only when the engine carries published weights and loads
   none, and when its processes do nothing meanwhile. One that computes for ever is left to SGLang's own watchdog,
   which ends the server (`--sglang-watchdog-timeout`).
   A scheduler that died needs no look: the server notices within a second, and ends itself (0.5.23: 5 s later).
3. An external server may have been started without that variable. Its `/health` is not used; `/model_info`
   shows that its HTTP process is there.

Invariant: the account sees no clock and no socket; equal looks give equal verdicts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal

from models.engines.client import EngineClient
from models.errors import EngineError, EngineTimeout, EngineUnauthorized, EngineUnreachable
from pipeline.hosts.launcher import Handle
from transport import awake_clock

Change = Literal["lost", "recovered"]
Complaint = Callable[[], str | None]
HealthProbe = Callable[[], Awaitable[str | None]]  # one look, within its timeout: a fault in words, or None

IDLE_SHARE = 0.2  # of one core: processes that used less during a look did nothing


class HealthTracker:
    """Looks in the order in which they were taken. Pure.

    States: up (with 0 .. limit-1 faults in a row) and down. `saw` returns a change of state, else None.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.up = True
        self.in_a_row = 0
        self.last = ""  # fault seen last

    def saw(self, fault: str | None) -> Change | None:
        if fault is None:
            recovered = not self.up
            self.up, self.in_a_row = True, 0
            return "recovered" if recovered else None
        self.in_a_row += 1
        self.last = fault
        if self.up and self.in_a_row >= self.limit:
            self.up = False
            return "lost"
        return None

    def mark_down(self) -> None:
        """It answers, but is not to be used: the next good look is a recovery again."""
        self.up = False

    @property
    def why(self) -> str:
        """What made it lost."""
        looks = "a failed health check" if self.in_a_row == 1 else f"{self.in_a_row} failed health checks in a row"
        return f"{looks} ({self.last})"


def no_complaint() -> None:
    """Interval for a server without complaints."""


async def until(
    change: Change, account: HealthTracker, look: HealthProbe, interval_s: float, complaint: Complaint = no_complaint
) -> str:
    """Check every `interval_s` seconds until the account has a `change`; return the reason.

    Waits for the clock and for each look; unblocked by that change, by a complaint of the engines stage about an engine
    that answers and yet takes no weights, or by cancellation.
    """
    clock = awake_clock()
    while True:
        await asyncio.sleep(interval_s)
        if (why := complaint()) is not None:
            account.mark_down()
            return why
        asleep_s = clock.slept()
        fault = await look()
        if fault is not None and clock.slept() > asleep_s:
            continue  # this process was stopped meanwhile: the look's time limit ran, the engine may have answered
        if account.saw(fault) == change:
            return account.why if change == "lost" else ""


class HttpProbe:
    """One GET that the HTTP process of a server answers by itself."""

    def __init__(self, client: EngineClient, timeout_s: float, path: str = "/health") -> None:
        self.client, self.timeout_s, self.path = client, timeout_s, path
        self.unauthorized = False  # by the newest answer

    async def __call__(self) -> str | None:
        """None if a GET is answered with success in time; else what happened instead."""
        self.unauthorized = False
        try:
            await self.client.call("GET", self.path, None, self.timeout_s)
        except EngineUnauthorized as error:
            self.unauthorized = True
            return str(error)
        except EngineTimeout:
            return f"{self.path} gave no answer within {self.timeout_s:g} s"
        except EngineUnreachable as error:
            return error.reason
        except EngineError as error:
            return str(error)
        return None


class SchedulerProbe:
    """The HTTP process, then the processes behind it, then a question that only the scheduler can answer.

    Args:
        first: the look at the HTTP process.
        process: the engine's; None for an external engine, whose processes are not visible.
        loading: whether the engine may be slow to answer now.
    """

    def __init__(self, first: HttpProbe, process: Handle | None, loading: Callable[[], bool]) -> None:
        self.first, self.process, self.loading = first, process, loading

    async def __call__(self) -> str | None:
        fault = await self.first()
        if fault is not None:
            return fault
        before = self.process.state() if self.process is not None else None
        if before is not None and before.stopped:
            return f"{before.stopped[0]} is stopped"
        if self.loading():
            return None
        loop = asyncio.get_running_loop()
        started = loop.time()
        fault = await HttpProbe(self.first.client, self.first.timeout_s, "/server_info")()
        if fault is None or self.loading():  # it began meanwhile
            return None
        after = self.process.state() if self.process is not None else None
        if before is not None and after is not None:
            share = (after.cpu_s - before.cpu_s) / max(loop.time() - started, 1e-3)
            if share > IDLE_SHARE:
                return None
        return f"the scheduler does not answer: {fault}"
