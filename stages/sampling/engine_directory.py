"""The engines and the router as the topic tells of them: addresses, weights applied, who is being updated.

Every replica sees all engines, whoever owns them. A request that is under way at an engine whose address is taken back
(the supervisor gave it up) is ended at once; its sender goes on elsewhere.

Invariants:
- an engine may serve if it has an address and its owner has reported weights of this run for it;
- `settled` names weights only while every engine that may serve has exactly these and none is fetching others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
from msgspec import Struct

from models.engines.client import EngineClient
from stages.engines.colocation import trainers_turn
from stages.messages import Applied, EngineAddress, RouterAddress
from stages.ports import Topic

log = logging.getLogger("sluice.directory")

T = TypeVar("T", bound=Struct)


class InFlightRequest:
    """One request under way. `end` cancels it: the connection closes, and the engine then aborts the request.

    Use as an async context manager around the call; `why` tells afterwards whether it was ended, and for what reason.
    """

    def __init__(self) -> None:
        self.why = ""
        self._scope: asyncio.Timeout | None = None

    async def __aenter__(self) -> InFlightRequest:
        self._scope = asyncio.timeout(None)
        await self._scope.__aenter__()
        if self.why:
            self._scope.reschedule(0.0)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        scope, self._scope = self._scope, None
        assert scope is not None
        try:
            await scope.__aexit__(kind, error, None)
        except TimeoutError:
            if not scope.expired():
                raise
            return True
        return False

    def end(self, why: str) -> None:
        """Cancel the call; the first reason counts. Nothing happens if it is over."""
        if not self.why:
            self.why = why
            if self._scope is not None and not self._scope.expired():
                self._scope.reschedule(0.0)


@dataclass
class Engine:
    """One engine of the run."""

    name: str
    address: EngineAddress
    applied: Applied | None = None
    flights: set[InFlightRequest] = field(default_factory=set)
    own_client: EngineClient | None = None

    @property
    def label(self) -> str | None:
        """What its weights are called, if its owner has reported any."""
        applied = self.applied
        return None if applied is None or applied.version < 0 else f"{applied.epoch}.{applied.version}"

    @property
    def updating(self) -> bool:
        return self.applied is not None and self.applied.fetching >= 0


class EngineDirectory:
    """All engines by name, and the router. `changed` is set whenever anything here changes."""

    def __init__(self, *, timeout_s: float, changed: asyncio.Event) -> None:
        self.timeout_s, self.changed = timeout_s, changed
        self.engines: dict[str, Engine] = {}
        self.router: RouterAddress | None = None
        self.router_flights: set[InFlightRequest] = set()
        self.trainers_turn = False  # the engines stand still until the trainer has done its batch

    async def follow(self, topic: Topic) -> None:
        """Waits for the topic; runs until cancelled."""
        revision = 0
        while True:
            revision = await topic.wait(revision)
            await self._update(topic)
            self.changed.set()

    async def close(self) -> None:
        """Close the connections that were opened here."""
        for engine in self.engines.values():
            await _close(engine)

    @property
    def serving(self) -> list[Engine]:
        """Engines that may serve, in the order of their names."""
        return sorted((e for e in self.engines.values() if e.label is not None), key=lambda e: e.name)

    def settled(self, names: Iterable[str] | None = None) -> str | None:
        """The one label of all engines that may serve (or of those named), None while it is not one."""
        engines = self.serving if names is None else [e for n in names if (e := self.engines.get(n)) is not None]
        labels = {engine.label for engine in engines}
        return labels.pop() if len(labels) == 1 and not any(engine.updating for engine in engines) else None

    def state(self) -> str:
        """Which engine has which weights, in a word that changes with any of it."""
        return ",".join(f"{e.name}={e.label}" for e in self.serving)

    def client(self, name: str) -> EngineClient:
        """A client of the engine, opened at the first call and closed with its address."""
        engine = self.engines[name]
        if engine.own_client is None:
            engine.own_client = EngineClient(engine.address.url, timeout_s=self.timeout_s)
        return engine.own_client

    async def _update(self, topic: Topic) -> None:
        addresses = _decoded(topic, "engine/", EngineAddress)
        applied = _decoded(topic, "applied/", Applied)
        for name, engine in list(self.engines.items()):
            if addresses.get(name) != engine.address:
                del self.engines[name]
                for flight in tuple(engine.flights):
                    flight.end(f"{name} was taken out of service")
                await _close(engine)
        for name, address in addresses.items():
            if name not in self.engines:
                self.engines[name] = Engine(name, address)
            report = applied.get(name)
            stale = report is not None and report.url and report.url.rstrip("/") != address.url.rstrip("/")
            self.engines[name].applied = None if stale else report
        self.trainers_turn = trainers_turn(topic)
        value = topic.get("router")
        router = msgspec.msgpack.decode(value, type=RouterAddress) if value is not None else None
        if router != self.router:
            for flight in tuple(self.router_flights):
                flight.end("the router was taken out of service")
            self.router = router


async def _close(engine: Engine) -> None:
    if engine.own_client is not None:
        await engine.own_client.close()
        engine.own_client = None


def _decoded(topic: Topic, prefix: str, kind: type[T]) -> dict[str, T]:
    """Values below a prefix, by the rest of their keys."""
    return {
        key.removeprefix(prefix): msgspec.msgpack.decode(value, type=kind) for key, value in topic.items(prefix).items()
    }
