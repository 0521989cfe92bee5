"""Keeps the router's list of workers equal to the engines that carry this run's weights; lets engines leave a run.

The list follows the engine directory on the topic, so a restart of the engines stage changes nothing at the router.
`router_state` publishes whether the router has a worker to send to.

An engine that leaves is marked `leaving`: clients send it nothing new. Its running requests are aborted; each client
keeps the partial output and continues at another engine (stages/sampling/partial_rollouts.py). The abort repeats
until the engine is empty, because a client may have sent a request before it read the mark.

Invariants:
- no call is repeated while it may be in progress: adding a worker takes seconds, and a second POST would bring back a
  worker that was removed in between;
- a router error delays and never ends the run: it is logged once per outage, and the comparison is repeated;
- the list is compared afresh each time, so a new router gets all workers again;
- a worker keeps its role (prefill or decode); workers with a role that are not engines of this run are left alone;
- nothing depends on leaving cleanly: an engine that ends without it is lost like any other engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence, Set
from typing import Final

import msgspec

from models.engines.access_token import Token
from models.engines.client import EngineClient
from models.engines.http_client import REGULAR, Role, RouterClient, RouterWorker, urls
from models.errors import EngineError
from stages.base import Activity
from stages.ports import Topic, read_value
from stages.topic_values import POLICY, RouterAddress, RouterState, addresses, carrying

log = logging.getLogger("sluice.router_workers")

LOOK_INTERVAL_S = 1.0
LONGEST_PAUSE_S = 5.0
UNDER_WAY_S = 15.0  # how long a requested change may take before it is requested again
SPLIT = ("prefill", "decode")
STRANGE_LOOKS = 2  # looks in a row at an unknown worker, before it is removed


class RouterWorkers:
    """The router of the run; `state.up` while it has a healthy worker that the directory knows."""

    def __init__(self, activity: Activity) -> None:
        self.activity = activity
        self.state: RouterState | None = None  # as published last; None while there is no router
        self._api: RouterClient | None = None
        self._added: set[str] = set()
        self._adding: dict[str, float] = {}  # address -> when to ask again
        self._removing: dict[str, float] = {}
        self._strange: dict[str, int] = {}
        self._roles: dict[str, Role] = {}  # address -> its role when it was listed, or as it reports
        self._failing = False

    async def run(self, topic: Topic) -> None:
        """Waits for the clock; runs until cancelled."""
        pause_s = LOOK_INTERVAL_S
        try:
            while True:
                try:
                    await self.look(topic)
                    pause_s, self._failing = LOOK_INTERVAL_S, False
                except EngineError as error:
                    await self._publish(topic, up=False)
                    if not self._failing:
                        log.warning("the router's list of workers: %s", error)
                    self._failing = True
                    pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                await asyncio.sleep(pause_s)
        finally:
            if self._api is not None:
                await self._api.close()

    async def look(self, topic: Topic) -> None:
        """Compare the list with what it should be, once. Raises the router's errors."""
        await self._attach(topic)
        api = self._api
        if api is None:
            return
        workers = await api.workers()
        served = (entry for entry in carrying(topic).values() if entry.state in ("serving", "updating"))
        wanted = frozenset(entry.url.rstrip("/") for entry in served)
        listed, now = urls(workers), time.monotonic()
        tokens = {address.url.rstrip("/"): address.token for address in addresses(topic, POLICY).values()}
        known = tokens.keys()
        self._adding = {url: t for url, t in self._adding.items() if t > now and url in wanted - listed}
        self._removing = {url: t for url, t in self._removing.items() if t > now and url in listed}
        self._added |= wanted & listed
        self._roles |= {worker.url.rstrip("/"): worker for worker in workers}
        for url in sorted(wanted - listed - self._adding.keys()):
            role = await self._role(url, tokens.get(url))
            log.info("adding %s to the router as %s", url, role.worker_type)
            self._added.add(url)
            if await api.add(url, role, tokens.get(url)):  # else the router still lists it: add at the next comparison
                self._adding[url] = now + UNDER_WAY_S
        for worker in self._unwanted(workers, known, wanted):
            log.info("removing %s from the router", worker.url)
            self._removing[worker.url.rstrip("/")] = now + UNDER_WAY_S
            await api.remove(worker)
        self._added &= wanted | listed
        healthy = [worker for worker in workers if worker.is_healthy and worker.url.rstrip("/") in known]
        self.activity.extra["router_workers"] = float(len(healthy))
        roles = {worker.worker_type for worker in workers if worker.is_healthy}
        split = (self.state is not None and self.state.split) or not roles.isdisjoint(SPLIT)
        await self._publish(topic, up=bool(healthy) and (roles.issuperset(SPLIT) or not split), split=split)

    async def _role(self, url: str, token: Token | None) -> Role:
        """The role that the router had for the engine, else the role that the engine reports."""
        if url not in self._roles:
            try:
                async with EngineClient(url, token=token) as client:
                    info = await client.server_info()
            except EngineError:
                return Role()  # the engine was just lost
            mode, port = info.disaggregation_mode, info.disaggregation_bootstrap_port
            self._roles[url] = Role(mode, port if mode == "prefill" else None) if mode in SPLIT else Role()
        return self._roles[url]

    def _unwanted(self, workers: Sequence[RouterWorker], known: Set[str], wanted: frozenset[str]) -> list[RouterWorker]:
        """Workers to remove now: engines of this run that must not serve, and workers that stayed unknown."""
        plain = [worker for worker in workers if worker.worker_type == REGULAR]
        self._strange = {url: self._strange.get(url, 0) + 1 for url in urls(plain) - known}
        gone = {url for url, looks in self._strange.items() if looks >= STRANGE_LOOKS}
        doomed = ((known | self._added) - wanted | gone) - self._removing.keys()
        return [worker for worker in workers if worker.url.rstrip("/") in doomed]

    async def _attach(self, topic: Topic) -> None:
        """Take the newest router. Without an address there is none."""
        address = read_value(topic, "router", RouterAddress)
        fresh: RouterState | None = None
        if address is not None:
            fresh = RouterState(address.kind, address.url, address.incarnation, token=address.token)
        if fresh == (None if self.state is None else msgspec.structs.replace(self.state, up=False, split=False)):
            return
        if self._api is not None:
            await self._api.close()
            self._api = None
        for pending in (self._adding, self._removing, self._strange, self._roles):
            pending.clear()
        self._added.clear()
        self.state = fresh
        if fresh is not None:
            self._api = RouterClient(fresh.url, token=fresh.token)

    async def _publish(self, topic: Topic, **changes: bool) -> None:
        """Publish the changed state of the router."""
        if self.state is None:
            return
        self.state = msgspec.structs.replace(self.state, **changes)
        value = msgspec.msgpack.encode(self.state)
        if topic.get("router_state") != value:
            await topic.publish("router_state", value)


LOOK_S: Final = 0.2
EMPTY_LOOKS: Final = 3  # empty observations in a row after which all clients have read the mark


async def hand_over(client: EngineClient, stands: Callable[[], bool]) -> None:
    """Empty an engine whose entry says `leaving`. Waits until it holds nothing, or is lost.

    `stands`: whether `client` still talks to the current incarnation.
    """
    empty = 0
    while empty < EMPTY_LOOKS and stands():
        with contextlib.suppress(EngineError):  # lost, or busy: checked again
            busy = any(load.num_running_reqs + load.num_waiting_reqs for load in await client.loads())
            empty = 0 if busy else empty + 1
            if busy:
                await client.abort()
        await asyncio.sleep(LOOK_S)
