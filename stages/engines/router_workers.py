"""Keeps the router's list of workers: the engines that carry this run's weights, and no others.

The owner of an engine adds it when its link is ready and removes it when the link is not; what no `engine/*` key of the
topic names is removed by whoever sees it. Every replica looks at the list, for it must know whether the router has
anybody to send to.

Invariants:
- nothing is asked twice while it may be under way: adding takes seconds, and a second POST would bring a worker back
  that was removed in between;
- an error of the router delays and never ends anything: it is logged once per outage, and the look is repeated;
- the list is compared afresh at each look, so a new router gets everything again;
- a worker keeps its role: where prefill and decode are apart, one that was taken out comes back as what it was, and
  workers with a role that are none of this run's engines are left alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence

from models.engines.client import EngineClient
from models.engines.errors import EngineError
from models.engines.router_api import REGULAR, Role, RouterClient, RouterWorker, urls
from stages.base import Activity
from stages.engines.engine_link import EngineLink
from stages.messages import RouterAddress
from stages.sampling.engine_directory import EngineDirectory

log = logging.getLogger("sluice.router_members")

LOOK_INTERVAL_S = 1.0
LONGEST_PAUSE_S = 5.0
UNDER_WAY_S = 15.0  # how long an asked change may take before it is asked again
SPLIT = ("prefill", "decode")
STRANGE_LOOKS = 2  # looks in a row at a worker that nobody knows, before it is removed


class RouterMembers:
    """The router as a replica sees it; `up` while it has a healthy worker that the topic knows."""

    def __init__(
        self, links: Sequence[EngineLink], directory: EngineDirectory, activity: Activity, changed: asyncio.Event
    ) -> None:
        self.links, self.directory, self.activity, self.changed = links, directory, activity, changed
        self.up = False
        self.split = False  # prefill and decode are apart: no engine can serve a request alone
        self.client: EngineClient | None = None  # for /generate
        self._api: RouterClient | None = None
        self._address: RouterAddress | None = None
        self._look = asyncio.Event()
        self._added: set[str] = set()
        self._adding: dict[str, float] = {}  # address -> when to ask again
        self._removing: dict[str, float] = {}
        self._strange: dict[str, int] = {}
        self._roles: dict[str, Role] = {}  # address -> what it was when it was listed, or says that it is
        self._failing = False

    async def run(self) -> None:
        """Waits for the clock or for `suspect`; runs until cancelled."""
        pause_s = LOOK_INTERVAL_S
        while True:
            self._look.clear()
            try:
                await self.look()
                pause_s, self._failing = LOOK_INTERVAL_S, False
            except EngineError as error:
                self._set(up=False)
                if not self._failing:
                    log.warning("the router's list of workers: %s", error)
                self._failing = True
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            with contextlib.suppress(TimeoutError):  # then it is time to look
                async with asyncio.timeout(pause_s):
                    await self._look.wait()

    def suspect(self) -> None:
        """A request was lost through the router: it counts as down until a look finds it well."""
        self.up = False
        self._look.set()

    async def close(self) -> None:
        if self.client is not None:
            await self.client.close()
        if self._api is not None:
            await self._api.close()
        self.client, self._api = None, None

    async def look(self) -> None:
        """Compare the list with what it should be, once. Raises the router's errors."""
        await self._attach()
        api = self._api
        if api is None:
            return
        workers = await api.workers()
        listed, wanted, now = urls(workers), self._wanted(), time.monotonic()
        self._adding = {url: t for url, t in self._adding.items() if t > now and url in wanted - listed}
        self._removing = {url: t for url, t in self._removing.items() if t > now and url in listed}
        self._added |= wanted & listed
        self._roles |= {worker.url.rstrip("/"): worker.role for worker in workers}
        for url in sorted(wanted - listed - self._adding.keys()):
            role = await self._role(url)
            log.info("adding %s to the router as %s", url, role.worker_type)
            self._added.add(url)
            if await api.add(url, role):  # else the router has not yet forgotten it: at the next look
                self._adding[url] = now + UNDER_WAY_S
        for worker in self._unwanted(workers, wanted):
            log.info("removing %s from the router", worker.url)
            self._removing[worker.url.rstrip("/")] = now + UNDER_WAY_S
            await api.remove(worker)
        self._added &= wanted | listed
        healthy = [w for w in workers if w.is_healthy and w.url.rstrip("/") in self._known()]
        self.activity.extra["router_workers"] = float(len(healthy))
        roles = {worker.worker_type for worker in workers if worker.is_healthy}
        self.split = self.split or not roles.isdisjoint(SPLIT)
        self._set(up=bool(healthy) and (roles.issuperset(SPLIT) or not self.split))

    async def _role(self, url: str) -> Role:
        """What the engine was to the router, else what it says itself."""
        if url not in self._roles:
            [client] = {link.client for link in self.links if link.client is not None and link.client.base_url == url}
            try:
                info = await client.server_info()
            except EngineError:
                return Role()  # of one that is just lost
            mode, port = info.disaggregation_mode, info.disaggregation_bootstrap_port
            self._roles[url] = Role(mode, port if mode == "prefill" else None) if mode in SPLIT else Role()
        return self._roles[url]

    def _wanted(self) -> frozenset[str]:
        """Addresses of the engines of this replica that carry published weights."""
        ready = [link.client for link in self.links if link.owner and link.ready.is_set() and link.client is not None]
        return frozenset(client.base_url for client in ready)

    def _known(self) -> frozenset[str]:
        return frozenset(engine.address.url.rstrip("/") for engine in self.directory.engines.values())

    def _unwanted(self, workers: Sequence[RouterWorker], wanted: frozenset[str]) -> list[RouterWorker]:
        """Workers to remove now: ours that are not ready, and those that were strangers for some looks."""
        owned = {link.name for link in self.links if link.owner}
        mine = {e.address.url.rstrip("/") for name, e in self.directory.engines.items() if name in owned} | self._added
        plain = [worker for worker in workers if worker.worker_type == REGULAR]
        strangers = urls(plain) - self._known() - wanted
        self._strange = {url: self._strange.get(url, 0) + 1 for url in strangers}
        gone = {url for url, looks in self._strange.items() if looks >= STRANGE_LOOKS} if owned else set()
        doomed = ((mine - wanted) | gone) - self._removing.keys()
        return [worker for worker in workers if worker.url.rstrip("/") in doomed]

    async def _attach(self) -> None:
        """Take the newest router. Without an address there is none."""
        address = self.directory.router
        if address == self._address:
            return
        await self.close()
        self._address = address
        for asked in (self._adding, self._removing, self._strange, self._roles):
            asked.clear()
        self.split = False
        self._added.clear()
        self._set(up=False)
        if address is not None:
            self._api = RouterClient(address.url)
            self.client = EngineClient(address.url, timeout_s=self.directory.timeout_s)

    def _set(self, *, up: bool) -> None:
        if up != self.up:
            self.up = up
            self.changed.set()
