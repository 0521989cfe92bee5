"""Where a request goes: through the router to any engine, or directly to the engine that the routing policy chooses.

Sessions are hashed over the engine directory (rendezvous hashing). The directory is the same for all clients, so a
returning turn finds the engine that has its prefix from any client, without a table. This is a hint: an engine that is
away is skipped.

Invariants:
- only engines that may serve get requests, and only while there is a slot for the samples;
- a lost request continues at an engine that has just passed a health check, preferably not the engine that lost it.
  It bypasses the router, which cannot be given an engine to avoid, unless prefill and decode are separate;
- `Route.label` names the weights that the request will meet, or is None when that is not certain.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import msgspec
from msgspec import Struct

from configs.schema import Config, router_kind
from models.engines.client import EngineClient
from models.engines.http_client import ROUTING_KEY_HEADER, lost_fields
from models.engines.launch.command import policy_of
from models.engines.protocol import GenerateRequest
from models.errors import LOSSES, EngineError, EngineRefused, EngineTimeout, EngineUnreachable, RequestNotSent
from stages.ports import wait_at_most
from stages.sampling.engine_choice import FIRST_COME, Choice, Ranking
from stages.sampling.engine_directory import LOOK_S, ROUTER, EngineDirectory, InFlightRequest, Target
from stages.topic_values import EVALUATION, POLICY, TRAINED, Complaint

REFUSED_LIMIT: Final = 8  # refused answers in a row, after which an engine is to be started anew
LONGEST_AVOIDED_S: Final = 30.0
UNHEARD: Final = 8  # publications that a busy client may lag behind the engines
ENGINE_WAIT_S: Final = 120.0  # how long a request without a deadline waits for an engine to be up


TRANSIENT_STATUS: Final = (408, 425, 429)  # refusals that are no fault of the request
FIRST_PAUSE_S: Final = 0.2  # before a lost request is sent again, doubled at each loss
LONGEST_PAUSE_S: Final = 5.0


@dataclass
class RetryState:
    """The retry budget of one member in one call: failed requests so far, and the deadline."""

    deadline_s: float | None = None  # of the whole call, as the caller gave it
    deadline: float | None = None  # the same by the monotonic clock
    count: int = 0
    engine: str = ""  # the engine that was lost last, if known

    @classmethod
    def until(cls, deadline_s: float | None) -> RetryState:
        return cls(deadline_s, None if deadline_s is None else time.monotonic() + deadline_s)

    @property
    def left_s(self) -> float | None:
        return None if self.deadline is None else self.deadline - time.monotonic()

    @property
    def pause_s(self) -> float:
        """Seconds to wait before the next attempt."""
        return min(FIRST_PAUSE_S * 2.0 ** min(max(self.count - 1, 0), 10), LONGEST_PAUSE_S)

    def record(self, error: Exception, *, progress: bool) -> bool:
        """Record a failed request. False if sending it again cannot help.

        A request that timed out but returned tokens is no loss: the next request begins after them.
        """
        transient = isinstance(error, EngineRefused) and error.status in TRANSIENT_STATUS
        if not transient and not isinstance(error, LOSSES):
            return False
        if not (isinstance(error, EngineTimeout) and progress):
            self.count += 1
        return True


class RouteRequest(Struct, frozen=True):
    """The requirements of a request on its route."""

    key: str  # of its session: requests with one key belong together
    prompt: bytes  # token ids of the prompt
    n: int  # samples
    policy: str = POLICY
    goes_on: bool = False  # it has tokens already, or returns from a tool
    order: tuple[int, int] = FIRST_COME  # in the queue for slots, smaller first
    direct: bool = False  # the router would drop one of its fields
    pinned_version: int = -1
    retries: RetryState = msgspec.field(default_factory=RetryState)


@dataclass
class Route:
    """A target for one request, with its slots taken."""

    target: Target
    label: str | None  # of the weights on every engine that may get the request, if all have the same
    held: int  # slots
    headers: Mapping[str, str] | None = None
    generation: str = ""  # of the weights of this run, "" before an engine has any
    oldest: int = -1  # lowest version among the engines that may get the request
    newest: Callable[[], int | None] = lambda: None  # highest version that an engine can have at the time of the call
    flight: InFlightRequest = field(default_factory=InFlightRequest)

    def release(self, n: int = 1) -> None:
        """Return slots, each of them once."""
        n = min(n, self.held)
        self.held -= n
        self.target.in_flight -= n
        self.target.slots.release(n)


class Routes:
    """Chooses routes for one client."""

    def __init__(self, config: Config, directory: EngineDirectory, *, index: int) -> None:
        self.config, self.directory = config, directory
        self.kind = router_kind(config)
        self.routed = self.kind != "none"
        self.ranking = Ranking(policy_of(config), seed=index)
        sglang = config.engine.engine == "sglang"
        self.wait_s = max(ENGINE_WAIT_S, config.health.rollout_health_check_first_wait if sglang else 0.0)
        self._early: bool | None = None if sglang else False  # whether version boundaries come one token early

    def ready(self, policy: str = POLICY) -> bool:
        """True if a request could be sent now."""
        if self.routed and policy == POLICY:
            state = self.directory.state
            return state is not None and state.up and bool(self.directory.serving())
        return bool(self.directory.serving(policy))

    def lost_fields(self, request: GenerateRequest) -> tuple[str, ...]:
        """Fields of the request that the router would drop."""
        if not self.routed:
            return ()
        return lost_fields(self.directory.state.kind if self.directory.state is not None else self.kind, request)

    @asynccontextmanager
    async def place(self, need: RouteRequest) -> AsyncIterator[Route]:
        """A route with slots for the request. Waits for an engine and for its slots.

        Unblocked by both, by a drain or by a time limit; raises `EngineUnreachable` for the last two.
        """
        route = await self._take(need)
        target = route.target
        target.flights.add(route.flight)
        try:
            yield route
        finally:
            target.flights.discard(route.flight)
            route.release(route.held)

    def lost(self, target: Target, retries: RetryState) -> None:
        """A request was lost at the target: it gets no more before it has passed a health check."""
        retries.engine, target.suspected, target.checked_s = target.name, True, -math.inf

    def answered(self, target: Target, fault: Exception | None) -> Complaint | None:
        """Record an answer of an engine. After a refused answer the engine ranks last for a while, longer each time.

        Returns a complaint for the supervisor after `REFUSED_LIMIT` refused answers in a row.
        """
        if fault is None:
            target.refused_in_a_row = 0
            return None
        target.refused_in_a_row += 1
        target.avoided_until = time.monotonic() + min(0.5 * 2**target.refused_in_a_row, LONGEST_AVOIDED_S)
        # Late answers cluster where an engine has too much work: no reason to restart it.
        late = isinstance(fault, EngineTimeout)
        if late or target.refused_in_a_row % REFUSED_LIMIT or target.entry is None:
            return None
        return Complaint(
            target.name, target.incarnation, f"{target.refused_in_a_row} answers in a row were refused: {fault}"[:500]
        )

    async def _take(self, need: RouteRequest) -> Route:
        # One deadline for all choices: a second choice, after a wait for slots in vain, gets no extra time.
        deadline = time.monotonic() + self.wait_s if need.retries.deadline is None else need.retries.deadline
        while True:
            target = await self._choose(need, deadline)
            await target.slots.take(need.n, goes_on=need.goes_on, order=need.order)
            target.in_flight += need.n
            route = Route(target, None, need.n)
            if (need.policy not in TRAINED or not self.directory.draining) and self._stands(target, need):
                # Read only now, because the slots may have taken long. An engine's entry becomes `updating` before its
                # weights change. A client that has not received that yet names the old weights for a moment, as does
                # every request in flight during the change.
                behind = self.behind(target)
                route.label = self.directory.settled(behind)
                route.generation = self.directory.generation
                if need.policy in TRAINED:
                    # Their lowest version; an entry lags behind its engine.
                    route.oldest = min((one.entry.version for one in behind if one.entry is not None), default=-1)
                    route.newest = self._newest
                if target.name == ROUTER and self.ranking.policy == "session":
                    route.headers = {ROUTING_KEY_HEADER: need.key}
                return route
            route.release(need.n)

    async def _choose(self, need: RouteRequest, deadline: float) -> Target:
        """Waits for a target that is up; unblocked by any change, or by the deadline.

        The deadline moves while the trainer holds the engines' devices.
        """
        directory = self.directory
        while (left := deadline - time.monotonic()) > 0:
            if need.retries.deadline is None and directory.trainers_turn:
                deadline = time.monotonic() + self.wait_s
            changed = directory.changed()  # before looking
            if need.policy in TRAINED and directory.draining:
                break
            target = await self._router(need) or await self._engine(need)
            if target is not None:
                return target
            if directory.draining:  # frozen engines serve to the end, but are not waited for
                break
            await wait_at_most(min(left, LOOK_S), changed.wait())
        wait_s = self.wait_s if need.retries.deadline_s is None else need.retries.deadline_s
        name = "the engines" if need.policy in TRAINED else need.policy
        logs = {POLICY: "engine-*", EVALUATION: "eval-engine-*"}.get(need.policy, f"frozen-{need.policy}")
        why = "the run is stopping" if directory.draining else f"it was not up within {wait_s:g} s; see logs/{logs}.log"
        raise EngineUnreachable(name, why)

    async def _router(self, need: RouteRequest) -> Target | None:
        """The router, if the request may use it and it has a worker to send it to."""
        target = self.directory.router
        if target is None or self._alone(need) or not self.ready() or not await self._well(target, need):
            return None
        return target if await self._prepare(target.client) else None

    def _alone(self, need: RouteRequest) -> bool:
        """Whether the request must go to one engine directly. Raises `RequestNotSent` if no engine can serve it."""
        if not self.routed or need.policy != POLICY:
            return True
        if self.directory.state is None or not self.directory.state.split:
            return need.direct or need.retries.count > 0
        if need.direct:
            raise RequestNotSent(
                self.directory.state.url,
                "the router drops a field of it, and where prefill and decode are apart no engine serves it alone; use "
                "--router smg, which keeps the field, or engines that do both",
            )
        return False

    async def _engine(self, need: RouteRequest) -> Target | None:
        """The engine that the policy ranks first; after a lost attempt, the first that passes a health check."""
        if not self._alone(need):
            return None
        targets = {target.name: target for target in self.directory.serving(need.policy)}
        loads = {name: t.in_flight + (0 if self.routed else t.slots.queued) for name, t in targets.items()}
        ranked = [targets[name] for name in self.ranking.rank(Choice(need.key, need.prompt, need.n, loads))]
        for target in sorted(ranked, key=lambda target: _misgiving(target, need)):
            if not await self._well(target, need):
                continue
            if need.policy not in TRAINED or await self._prepare(target.client):
                return target
        return None

    async def _well(self, target: Target, need: RouteRequest) -> bool:
        """Whether a request may be sent to the target.

        After a lost request the target's health is checked first: until the supervisor notices, a dead engine has the
        least load of all.
        """
        if need.retries.count > 0 or target.suspected:
            target.suspected = not await target.answers_now()
            return not target.suspected
        return True

    async def _prepare(self, client: EngineClient) -> bool:
        """Give the client the facts that hold for all engines. False if no engine has answered yet."""
        if self._early is None:
            engine = next(iter(self.directory.serving()), None)
            if engine is None:
                return False
            try:
                self._early = await engine.client.has_early_boundaries(self.config.engine.pause_generation_mode)
            except EngineError:
                return False  # the next attempt asks again
        client.early_boundary = self._early
        return True

    def _stands(self, target: Target, need: RouteRequest) -> bool:
        """Whether the target is still valid after the wait for slots."""
        if target.name == ROUTER:
            return self.directory.router is target and self.ready()
        return any(target is serving for serving in self.directory.serving(need.policy))

    def behind(self, target: Target) -> list[Target]:
        """The engines that may get a request sent to the target."""
        return self.directory.serving() if target.name == ROUTER else [target]

    def _newest(self) -> int | None:
        """Highest version that an engine can have now. An engine may apply a version before this client learns of it.

        The bound is loose by `UNHEARD` publications; the trainer, which knows the exact version, checks again.
        """
        published = self.directory.published
        return None if published is None else published + UNHEARD * self.config.asynchrony.update_weights_interval


def _misgiving(target: Target, need: RouteRequest) -> tuple[bool, bool, bool]:
    """Reasons against an engine that count before its rank: it lost the request, gave a refused answer lately, or has
    weights that the caller cannot use. Refused answers come quickly, so such an engine would have the least load.
    """
    version = target.entry.version if target.entry is not None else -1
    wrong = need.pinned_version >= 0 and version != need.pinned_version
    return target.name == need.retries.engine, time.monotonic() < target.avoided_until, wrong
