"""Looks at a server: how many in a row count, and what a scheduler that answers nothing may be doing."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from models.engines.client import EngineClient
from pipeline.hosts.launcher import ProcessState
from pipeline.supervise.health_probe import HealthTracker, HttpProbe, SchedulerProbe
from tests.served_app import served_app


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 5))
def test_an_engine_is_lost_after_n_faults_in_a_row_and_recovers_with_one_good_look(looks: list[bool], n: int) -> None:
    account = HealthTracker(n)
    for i, good in enumerate(looks):
        before = account.up
        change = account.saw(None if good else f"fault {i}")
        newest = looks[: i + 1][-n:]
        assert (change == "lost") == (before and len(newest) == n and not any(newest))
        assert (change == "recovered") == (good and not before)
        if change == "lost":
            assert f"fault {i}" in account.why
    faults_at_the_end = next((i for i, good in enumerate(reversed(looks)) if good), len(looks))
    assert account.up == (faults_at_the_end < n)


def test_the_reason_counts_its_looks() -> None:
    account = HealthTracker(2)
    assert account.saw("no answer") is None
    assert account.saw("no answer") == "lost"
    assert account.why == "2 failed health checks in a row (no answer)"
    account.mark_down()
    assert account.saw(None) == "recovered"


class Busy:
    """Processes that use this share of one core."""

    def __init__(self, share: float) -> None:
        self.share = share

    def state(self) -> ProcessState:
        return ProcessState((), self.share * asyncio.get_running_loop().time())


@pytest.mark.parametrize(("share", "healthy"), [(0.1, False), (0.3, True)])
async def test_a_scheduler_that_computes_is_no_dead_one(share: float, healthy: bool) -> None:
    """A long prefill answers nothing and is busy; one that hangs uses next to nothing."""

    over = asyncio.Event()

    async def healthily(_: web.Request) -> web.Response:
        return web.json_response({})

    async def at_the_end(_: web.Request) -> web.Response:
        await over.wait()
        return web.json_response({})

    app = web.Application()
    app.add_routes([web.get("/health", healthily), web.get("/server_info", at_the_end)])
    async with served_app(app) as url, EngineClient(url, connect_timeout_s=5.0) as client:
        first = HttpProbe(client, 0.5)
        look = SchedulerProbe(first, Busy(share), lambda: False)  # type: ignore[arg-type]
        well = await look() is None
        over.set()
    assert well is healthy
