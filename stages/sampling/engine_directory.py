"""The engines and the router as one of their clients sees them: the topic's entry of each, and a connection to it.

All clients read the same entries (stages/topic_values.py), so no table assigns clients to engines. When the supervisor
gives an engine up it withdraws its address: requests in flight there end at once, and their senders continue at another
engine.

Invariants:
- a target is one incarnation of an engine: its slots, its connections and what is in flight there end with it;
- an engine of the policy may serve only with weights of this run;
- `settled` names weights only while every engine that may serve has exactly these and none is loading others.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from configs.schema.rollout import RolloutConfig
from models.engines.client import EngineClient
from stages.engines.colocation import KEY, trainers_turn
from stages.messages import WeightsAnnouncement
from stages.ports import Topic, read_value, wait_at_most
from stages.sampling.engine_choice import Slots
from stages.topic_values import ADDRESS, DIRECTORY, POLICY, TRAINED, EngineEntry, RouterAddress, RouterState, entries

ROUTER: Final = "router"
WEIGHTS: Final = "weights"
UNBOUNDED: Final = 1 << 30
PROBE_S: Final = 3.0  # time-out of the health check before a lost request is sent to an engine
LOOK_S: Final = 1.0  # between health checks while no engine answers


class InFlightRequest:
    """One request in flight. `end` cancels it: the connection closes, and the engine then aborts the request.

    `why` is the reason if it was ended, else empty.
    """

    def __init__(self) -> None:
        self.why = ""
        self.began_s = time.monotonic()
        self._scope: asyncio.Timeout | None = None

    @asynccontextmanager
    async def under_way(self) -> AsyncIterator[None]:
        """Wraps the call; `end` leaves the block without an error."""
        scope = self._scope = asyncio.timeout(None)
        try:
            async with scope:
                if self.why:
                    scope.reschedule(0.0)
                yield
        except TimeoutError:
            if not scope.expired():
                raise
        finally:
            self._scope = None

    def end(self, why: str) -> None:
        """Cancel the call; the first reason counts. Nothing happens if it is over."""
        if not self.why:
            self.why = why
            if self._scope is not None and not self._scope.expired():
                self._scope.reschedule(0.0)


@dataclass(eq=False)
class Target:
    """A receiver of requests: one incarnation of an engine, or of the router (which has no entry)."""

    name: str
    incarnation: int
    client: EngineClient
    slots: Slots
    entry: EngineEntry | None = None
    flights: set[InFlightRequest] = field(default_factory=set)
    in_flight: int = 0  # samples
    suspected: bool = False  # it lost a request and has not answered since
    refused_in_a_row: int = 0  # answers in a row that were refused
    crawled: bool = False  # an answer came too slowly to be waited for
    avoided_until: float = 0.0  # by the monotonic clock: until then it is the last choice
    checked_s: float = -math.inf  # when its health was last checked, by the monotonic clock
    _well: bool = False
    _checking: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def serves(self) -> bool:
        entry = self.entry
        if entry is None or entry.state not in ("serving", "updating"):
            return False
        return entry.policy not in TRAINED or entry.label is not None

    async def answers_now(self) -> bool:
        """Whether the server is healthy, checked once for all callers: hundreds of lost requests ask at the same time.
        Waits for its answer, or for a time limit."""
        async with self._checking:
            if time.monotonic() - self.checked_s > LOOK_S:
                self._well = bool(await wait_at_most(PROBE_S, self.client.health()))
                self.checked_s = time.monotonic()
            return self._well


class EngineDirectory:
    """All engines by name, and the router, as one of `replicas` clients of the same kind sees them.

    Without a router each engine has slots. With a router the receiving engine is unknown, so the router has slots for
    all. A client's slots are its share of the engines' limits. The number of clients of frozen engines is unknown:
    each such client bounds itself.
    """

    def __init__(self, rollout: RolloutConfig, replicas: int, stage: str, vocab_size: int | None) -> None:
        """`stage`: `scale/<stage>` on the topic holds the number of clients, if it changes."""
        self.timeout_s, self.stage = rollout.request_timeout_secs, stage
        self.concurrency = rollout.server_concurrency  # samples in flight at an engine without a published limit
        self.vocab_size = vocab_size
        self.engines: dict[str, Target] = {}
        self.router: Target | None = None
        self.state: RouterState | None = None
        self.draining = False
        self.published: int | None = None  # version of the newest weights
        self.floor = 0  # the oldest version that may be trained
        self.trainers_turn = False  # the engines stand still until the trainer has done its batch
        self.turn_s = -math.inf  # when the trainer last had its turn, by the monotonic clock
        self._replicas = replicas
        self._changed = asyncio.Event()

    async def follow(self, topic: Topic) -> None:
        """Waits for the topic; runs until cancelled."""
        revision = 0
        while True:
            revision = await topic.wait(revision, ADDRESS, DIRECTORY, KEY, ROUTER, WEIGHTS, "drain", "scale/")
            await self._update(topic)
            self.notify()

    def changed(self) -> asyncio.Event:
        """Set at the next change. Take it before reading, so that no change between reading and waiting is missed."""
        return self._changed

    def notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def close(self) -> None:
        """Close all connections; requests in flight are aborted by their servers."""
        for target in self.engines.values():
            await target.client.close()
        if self.router is not None:
            await self.router.client.close()

    def serving(self, policy: str = POLICY) -> list[Target]:
        """Engines that may serve a policy, in the order of their names."""
        found = [t for t in self.engines.values() if t.serves and t.entry is not None and t.entry.policy == policy]
        return sorted(found, key=lambda target: target.name)

    @property
    def generation(self) -> str:
        """The prefix of this run's weight labels; "" while no engine has any."""
        labels = (target.entry.label for target in self.serving() if target.entry is not None)
        return next((label.partition(".")[0] for label in labels if label), "")

    def settled(self, targets: Iterable[Target]) -> str | None:
        """The label that all these engines share and that a request sent now will meet at each, or None."""
        found = [target.entry for target in targets]
        certain = [e.label for e in found if e is not None and e.state == "serving" and e.fetching < 0]
        return certain[0] if certain and len(certain) == len(found) and len(set(certain)) == 1 else None

    def oldest_request_s(self) -> dict[str, float]:
        """Age in seconds of the oldest request in flight, by target."""
        targets = [*self.engines.values(), *([self.router] if self.router is not None else [])]
        now = time.monotonic()
        return {t.name: now - min(f.began_s for f in t.flights) for t in targets if t.flights}

    async def _update(self, topic: Topic) -> None:
        """Apply the current values of the topic."""
        announced = read_value(topic, WEIGHTS, WeightsAnnouncement)
        self.published = None if announced is None else announced.version
        self.floor = 0 if announced is None else announced.floor
        self.draining = topic.get("drain") is not None
        turn, self.trainers_turn = self.trainers_turn, trainers_turn(topic)
        if turn or self.trainers_turn:
            self.turn_s = time.monotonic()
        if self.stage and (scaled := topic.get(f"scale/{self.stage}")) is not None:
            self._replicas = max(1, int(scaled))
        found = entries(topic)
        for name, target in list(self.engines.items()):
            if name not in found or found[name].incarnation != target.incarnation:
                del self.engines[name]
                await _end(target)
        for name, entry in found.items():
            if name not in self.engines:
                self.engines[name] = self._target(name, entry)
            self.engines[name].entry = entry
        await self._update_router(topic)
        self._share()

    async def _update_router(self, topic: Topic) -> None:
        address = read_value(topic, "router", RouterAddress)
        state = read_value(topic, "router_state", RouterState)
        if address is None or (state is not None and state.incarnation != address.incarnation):
            state = None  # it belongs to an earlier process
        target, self.state = self.router, state
        if target is not None and (address is None or address.incarnation != target.incarnation):
            self.router = None
            await _end(target)
        if self.router is None and address is not None:
            self.router = self._target(ROUTER, address)

    def _target(self, name: str, address: EngineEntry | RouterAddress) -> Target:
        client = EngineClient(address.url, timeout_s=self.timeout_s, vocab_size=self.vocab_size, token=address.token)
        return Target(name, address.incarnation, client, Slots(self.concurrency))

    def _share(self) -> None:
        """Set each target's slots; requests that wait for an engine that is away must choose again."""
        total = 0
        for target in self.engines.values():
            entry = target.entry
            if entry is None or entry.policy not in TRAINED:
                target.slots.limit = UNBOUNDED
            elif target.serves and not self.draining:
                limit = entry.limit or self.concurrency
                target.slots.limit = math.ceil(limit / self._replicas)
                total += limit if entry.policy == POLICY else 0
            else:
                target.slots.wake_all()
        if self.router is not None:
            self.router.slots.limit = max(1, math.ceil((total or self.concurrency) / self._replicas))
            if self.draining or self.state is None or not self.state.up:
                self.router.slots.wake_all()


async def _end(target: Target) -> None:
    """The supervisor gave the process up: its requests, and those that wait for its slots, choose another engine."""
    for flight in tuple(target.flights):
        flight.end(f"{'the router' if target.name == ROUTER else target.name} was taken out of service")
    target.slots.wake_all()
    await target.client.close()
