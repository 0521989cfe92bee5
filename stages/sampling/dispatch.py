"""Where a request goes: through the router to any engine, or directly to one that a policy chooses.

Invariants:
- only engines that carry published weights get requests, and only while there is a slot for the samples;
- a request that was lost goes on at an engine that has just answered a look at its health, rather not at the one that
  lost it, and never through the router: nobody can tell the router whom to avoid. Where prefill and decode are apart
  there is no other way;
- `Route.label` names the weights that the request will meet, or is None when that is not certain.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Final

from configs.schema import Config
from models.engines.client import EngineClient
from models.engines.errors import EngineError, EngineUnreachable, RequestNotSent
from models.engines.launch.routing import policy_of, router_kind
from models.engines.limits import RequestLimits
from models.engines.protocol import GenerateRequest
from models.engines.router_api import ROUTING_KEY_HEADER, lost_fields
from stages.base import Activity
from stages.engines.engine_link import EngineLink
from stages.engines.load_watch import ROUTER, LoadWatch
from stages.engines.router_workers import RouterMembers
from stages.sampling.engine_directory import EngineDirectory, InFlightRequest
from stages.sampling.routing_policy import Choice, Ranking

ENGINE_WAIT_S = 120.0  # how long a request waits for any engine to come (back) up
PROBE_S: Final = 3.0  # for a look at an engine's health before a lost request goes there
LOOK_S: Final = 1.0  # between looks while no engine answers


@dataclass(frozen=True)
class RouteRequest:
    """What a request wants of its place."""

    key: str  # of its group: requests of one key belong together
    prompt: bytes  # token ids of the group's prompt
    n: int  # samples
    goes_on: bool = False  # it has tokens already, or comes back from a tool
    direct: bool = False  # the router would lose a field of it
    again: bool = False  # it was lost before
    lost: str = ""  # by this engine, if it is known


@dataclass(frozen=True)
class Route:
    """A place for one request, with its slots taken."""

    name: str  # of the engine, or `ROUTER`
    client: EngineClient
    label: str | None  # of the weights on every engine that may get it, if it is one label
    headers: Mapping[str, str] | None = None
    flight: InFlightRequest = field(default_factory=InFlightRequest)


class CachedHealth:
    """Whether an engine answers, asked once for all who wait to know: hundreds of lost requests ask together."""

    def __init__(self) -> None:
        self._client: EngineClient | None = None
        self._asked_s = -math.inf
        self._well = False
        self._asking = asyncio.Lock()

    async def answers_now(self, client: EngineClient) -> bool:
        """Waits for the engine's answer, or for a time limit."""
        async with self._asking:
            if client is not self._client or time.monotonic() - self._asked_s > LOOK_S:
                self._client, self._well = client, await _answers(client)
                self._asked_s = time.monotonic()
            return self._well

    def forget(self) -> None:
        """It was well a moment ago, and is doubted again."""
        self._asked_s = -math.inf


class Dispatcher:
    """Sends for one replica: to the engines of `links`, or through the router to all."""

    def __init__(
        self,
        config: Config,
        links: Sequence[EngineLink],
        activity: Activity,
        changed: asyncio.Event,
        *,
        index: int,
        replicas: int,
        engines: int,
        vocab_size: int | None = None,
    ) -> None:
        self.config, self.links, self.changed = config, links, changed
        self.kind = router_kind(config)
        self.routed = self.kind != "none"
        self.directory = EngineDirectory(timeout_s=config.rollout.request_timeout_secs, changed=changed)
        self.limits = RequestLimits(vocab_size)
        sharers = 1 if replicas <= engines else len(range(index % engines, replicas, engines))
        self.watch = LoadWatch(
            config, links, self.directory, activity, routed=self.routed, replicas=replicas, sharers=sharers
        )
        self.members = RouterMembers(links, self.directory, activity, changed) if self.routed else None
        self.ranking = Ranking(policy_of(config), seed=index)
        sglang = config.engine.engine == "sglang"
        self.wait_s = max(ENGINE_WAIT_S, config.health.rollout_health_check_first_wait if sglang else 0.0)
        self.draining = False
        self._in_flight: Counter[str] = Counter()
        self._pulses: defaultdict[str, CachedHealth] = defaultdict(CachedHealth)
        self._early: bool | None = None if sglang else False  # whether versions' boundaries come a token early

    def ready(self) -> bool:
        """True if a request could be sent now."""
        if self.members is not None:
            return self.members.up and bool(self.directory.serving)
        return any(link.ready.is_set() for link in self.links)

    def drain(self) -> None:
        """Nothing is sent any more; who waits for a place learns it."""
        self.draining = True
        self.changed.set()
        self.watch.drain()

    async def close(self) -> None:
        if self.members is not None:
            await self.members.close()
        await self.directory.close()

    def lost_fields(self, request: GenerateRequest) -> tuple[str, ...]:
        """Fields of the request that would not pass the router."""
        if not self.routed:
            return ()
        router = self.directory.router
        return lost_fields(router.kind if router is not None else self.kind, request)

    @asynccontextmanager
    async def place(self, need: RouteRequest) -> AsyncIterator[Route]:
        """A place with slots for the request. Waits for an engine and for its slots; unblocked by either, by a drain or
        by a time limit. Raises `EngineUnreachable` for the last two."""
        place = await self._take(need)
        flights = self._flights(place.name)
        flights.add(place.flight)
        self._count(place.name, need.n)
        try:
            yield place
        finally:
            flights.discard(place.flight)
            self._count(place.name, -need.n)
            self.watch.of(place.name).release(need.n)

    def lost(self, place: Route) -> None:
        """A request was lost at this place."""
        if place.name == ROUTER and self.members is not None:
            self.members.suspect()
        else:
            self._pulses[place.name].forget()

    def workers(self, place: Route) -> list[EngineClient]:
        """Clients of the engines that may hold a request of this place, for control calls."""
        if place.name != ROUTER:
            return [place.client]
        return [self.directory.client(engine.name) for engine in self.directory.serving]

    async def _take(self, need: RouteRequest) -> Route:
        deadline = time.monotonic() + self.wait_s
        while True:
            place = await self._choose(need, deadline)
            slots = self.watch.of(place.name)
            await slots.take(need.n, goes_on=need.goes_on)
            if not self.draining and self._stands(place):
                return replace(place, label=self._label(place.name))
            slots.release(need.n)

    async def _choose(self, need: RouteRequest, deadline: float) -> Route:
        """Waits for a place that is up; unblocked by any change, or by the deadline, which a trainer that has the
        engines' devices puts off."""
        while not self.draining and (left := deadline - time.monotonic()) > 0:
            if self.directory.trainers_turn:
                deadline = time.monotonic() + self.wait_s
            self.changed.clear()
            place = await self._router(need) or await self._engine(need)
            if place is not None:
                return place
            with contextlib.suppress(TimeoutError):  # the loop looks again
                async with asyncio.timeout(min(left, LOOK_S)):
                    await self.changed.wait()
        names = ", ".join([link.name for link in self.links] if self.members is None else ["the engines", ROUTER])
        why = "the run drains" if self.draining else f"not up within {self.wait_s:g} s; see logs/engine-*.log"
        raise EngineUnreachable(names, why)

    async def _router(self, need: RouteRequest) -> Route | None:
        """The router, if the request may go through it and it has somebody to send it to."""
        members = self.members
        if members is None or self._alone(need) or not self.ready() or members.client is None:
            return None
        if not await self._prepare(members.client):
            return None
        headers = {ROUTING_KEY_HEADER: need.key} if self.ranking.policy == "session" else None
        return Route(ROUTER, members.client, None, headers)

    def _alone(self, need: RouteRequest) -> bool:
        """Whether one engine is to serve the request. Raises `RequestNotSent` for one that nobody can serve."""
        members = self.members
        if members is None or not members.split:
            return need.direct or need.again
        if need.direct:
            raise RequestNotSent(
                members.client.base_url if members.client is not None else ROUTER,
                "the router drops a field of it, and where prefill and decode are apart no engine serves it alone; use "
                "--router smg, which keeps the field, or engines that do both",
            )
        return False

    async def _engine(self, need: RouteRequest) -> Route | None:
        """The engine that the policy ranks first; of those that answer, if the request was lost before."""
        if self.routed and not self._alone(need):
            return None
        clients = self._clients()
        ranked = self.ranking.rank(Choice(need.key, need.prompt, need.n, {n: self._load(n) for n in clients}))
        for name in sorted(ranked, key=lambda name: name == need.lost):
            if need.again and not await self._pulses[name].answers_now(clients[name]):
                continue
            if await self._prepare(clients[name]):
                return Route(name, clients[name], None)
        return None

    def _clients(self) -> dict[str, EngineClient]:
        """Engines that may get a request directly."""
        if self.routed:
            return {engine.name: self.directory.client(engine.name) for engine in self.directory.serving}
        return {link.name: link.client for link in self.links if link.ready.is_set() and link.client is not None}

    def _load(self, name: str) -> int:
        return self._in_flight[name] + (0 if self.routed else self.watch.of(name).queued)

    async def _prepare(self, client: EngineClient) -> bool:
        """Have the client know what all clients of these engines must know. False if no engine could be asked."""
        if self._early is None:
            asked = next(iter(self._clients().values()), None)
            if asked is None:
                return False
            try:
                self._early = await asked.has_early_boundaries(self.config.engine.pause_generation_mode)
            except EngineError:
                return False  # asked again at the next look
        client.early_boundary = self._early
        if client.limits.vocab_size is None:
            client.limits.vocab_size = self.limits.vocab_size
        return True

    def _stands(self, place: Route) -> bool:
        """True if the place is still what it was when it was chosen: slots may take their time."""
        if place.name == ROUTER:
            return self.members is not None and self.members.up and self.members.client is place.client
        return self._clients().get(place.name) is place.client

    def _label(self, name: str) -> str | None:
        """The weights that a request sent there now will meet. The owner of an engine knows before the topic does."""
        if name == ROUTER:
            return self.directory.settled()
        link = next((link for link in self.links if link.name == name and link.owner), None)
        engine = self.directory.engines.get(name)
        if link is None or link.current is None:
            return self.directory.settled([name])
        return None if engine is not None and engine.updating else link.current.label

    def _flights(self, name: str) -> set[InFlightRequest]:
        if name == ROUTER:
            return self.directory.router_flights
        engine = self.directory.engines.get(name)
        return engine.flights if engine is not None else set()

    def _count(self, name: str, n: int) -> None:
        self._in_flight[name] += n
        for link in self.links:
            if link.name == name:
                link.in_flight += n


async def _answers(client: EngineClient) -> bool:
    """Whether the engine answers a look at its health in good time."""
    try:
        async with asyncio.timeout(PROBE_S):
            return await client.health()
    except TimeoutError:
        return False
