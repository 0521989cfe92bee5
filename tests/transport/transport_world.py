"""A stream under virtual time: protocol cores, an unkind network, and mortal peers with simple applications.

Everything random comes from one seed. The books (offered, accepted, done, ...) are kept here, by the applications.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from transport import wire
from transport.core.hub import HubCore
from transport.core.peers import ConsumerCore, Delivery, Parcel, ProducerCore
from transport.spec import StreamSpec
from transport.wire import PROTOCOL, Hello, Welcome


@dataclass(frozen=True)
class Scenario:
    """What may go wrong, and how often."""

    items: int = 40
    producers: int = 3
    consumers: int = 3
    concurrency: int = 2
    window_items: int = 4
    window_bytes: int = 4000
    capacity_items: int = 16
    capacity_bytes: int = 16_000
    max_size: int = 2000
    lease_s: float = 1.0
    max_attempts: int = 5
    routing: str = "least_loaded"
    drop: float = 0.0
    duplicate: float = 0.0
    reorder: bool = False
    consumer_deaths: int = 0
    producer_deaths: int = 0
    freezes: int = 0
    cuts: int = 0
    leaves: int = 0  # graceful, with a newcomer
    hub_restarts: int = 0
    producer_leaves: int = 0  # graceful, with a newcomer
    offer_s: float = 1.0  # how long messages are offered
    regenerated: int = 0  # messages sent once more by another producer under the same key
    killers: int = 0  # messages that kill whoever executes them
    poisons: int = 0
    supervised: float = 0.7  # deaths that the supervisor sees
    gather: int = 0  # a consumer answers only when it has started so many
    patience_s: float = 300.0
    work_s: float = 0.05


@dataclass(eq=False)
class Host:
    """One peer process: a core, its connection, and its application."""

    name: str
    core: Any
    route: bytes = b""
    alive: bool = True
    frozen_until: float = 0.0
    timer_at: float = float("inf")
    inbox: list[tuple[Any, Any]] = field(default_factory=list)
    working: list[Delivery] = field(default_factory=list)
    parcels: dict[str, Parcel] = field(default_factory=dict)
    leaving: bool = False


class World:
    def __init__(self, seed: int, scenario: Scenario) -> None:
        self.rng = random.Random(seed)
        self.s = scenario
        self.now = 0.0
        self.queue: list[tuple[float, int, Callable[[], None]]] = []  # what will happen
        self.events = 0
        self._planned = 0
        self._last_arrival: dict[tuple[bytes, bool], float] = {}
        self._routes: dict[bytes, Host] = {}
        self._last_words: set[bytes] = set()  # of the dead: what the kernel had already will arrive
        named = ("capacity_items", "capacity_bytes", "lease_s", "max_attempts", "routing")
        self.spec = StreamSpec("s", "sim", **{name: getattr(scenario, name) for name in named})
        self.hub = self._new_hub()
        self._echoes: dict[bytes, Host] = {}  # where what a dead hub had sent still arrives
        self.hub_timer_at = float("inf")
        keys = [f"{i % 7}/{i}" for i in range(scenario.items)]
        self.sizes = {key: self.rng.randint(1, scenario.max_size) for key in keys}
        self.rng.shuffle(keys)
        self.killers = set(keys[: scenario.killers])
        self.poisons = set(keys[scenario.killers : scenario.killers + scenario.poisons])
        # The books of the oracle.
        self.offered: set[str] = set()
        self.accepted: set[str] = set()
        self.done: Counter[str] = Counter()
        self.kills: Counter[str] = Counter()
        self.letters: Counter[str] = Counter()
        self.doubt: set[str] = set()  # accepted by a hub that died
        self.hosts: list[Host] = []
        self.consumers: list[Host] = [self._new_consumer(f"c{i}") for i in range(scenario.consumers)]
        self.producers: list[Host] = [self._new_producer(f"p{i}") for i in range(scenario.producers)]
        for number, key in enumerate(self.sizes):
            self.at(self.rng.uniform(0, scenario.offer_s), lambda key=key, number=number: self._offer(number, key))
        for _ in range(scenario.regenerated):
            key = self.rng.choice(keys)
            self.at(scenario.offer_s + self.rng.uniform(0, 1), lambda key=key: self._offer(self.rng.randrange(99), key))

    # Time.

    def at(self, delay_s: float, action: Callable[[], None]) -> None:
        self._planned += 1
        heapq.heappush(self.queue, (self.now + delay_s, self._planned, action))

    def step(self) -> None:
        self.now, _, action = heapq.heappop(self.queue)
        self.events += 1
        action()

    # Network.

    def _connect(self, host: Host) -> None:
        self._routes.pop(host.route, None)
        host.route = self.rng.randbytes(5)
        self._routes[host.route] = host

    def _transmit(self, route: bytes, to_hub: bool, deliver: Callable[[], None]) -> None:
        if self.rng.random() < self.s.drop:
            return
        for _ in range(2 if self.rng.random() < self.s.duplicate else 1):
            arrival = self.now + self.rng.uniform(0.001, 0.02)
            if not self.s.reorder:
                arrival = max(arrival, self._last_arrival.get((route, to_hub), 0.0) + 1e-6)
                self._last_arrival[(route, to_hub)] = arrival
            self.at(arrival - self.now, deliver)

    def _flush_host(self, host: Host) -> None:
        if not host.alive:
            return
        for message, body in host.core.flush(self.now):
            header, route, hub = wire.encode(message), host.route, self.hub
            self._transmit(route, True, lambda h=header, b=body, r=route, hub=hub: self._to_hub(hub, r, h, b))
        self._plan_timer(host)

    def _to_hub(self, hub: HubCore, route: bytes, header: bytes, body: Any) -> None:
        if hub is self.hub and (route in self._routes or route in self._last_words):
            hub.on_message(self.now, route, wire.decode_to_hub(header), body)
            self._flush_hub()

    def _flush_hub(self) -> None:
        for route, message, body in self.hub.flush(self.now):
            host = self._routes.get(route)
            if host is None or not host.alive:
                self.hub.on_unreachable(self.now, route)
                continue
            header = wire.encode(message)
            self._transmit(route, False, lambda r=route, h=header, b=body: self._to_host(r, h, b))
        self.letters.update(letter.key for letter, _ in self.hub.custody.letters)
        self.hub.custody.letters.clear()
        deadline = self.hub.deadline()
        if deadline is not None and deadline < self.hub_timer_at:
            self.hub_timer_at = deadline
            self.at(max(0.0, deadline - self.now), self._hub_timer)

    def _hub_timer(self) -> None:
        if self.now >= self.hub_timer_at:
            self.hub_timer_at = float("inf")
            self.hub.on_timer(self.now)
            self._flush_hub()

    def _to_host(self, route: bytes, header: bytes, body: Any) -> None:
        message = wire.decode_from_hub(header)
        if (host := self._routes.get(route)) is not None:
            self._arrive(host, message, body)
        elif (host := self._echoes.get(route)) is not None and not isinstance(message, Welcome):
            self.at(self.rng.uniform(0, 0.2), lambda: self._arrive(host, message, body))  # a Welcome keeps its order

    def _arrive(self, host: Host, message: Any, body: Any) -> None:
        host.inbox.append((message, body))
        self._wake(host)

    def _wake(self, host: Host) -> None:
        """The process runs: messages first, then its application, then what is to be sent."""
        if not host.alive or self.now < host.frozen_until:
            return
        for message, body in host.inbox:
            if isinstance(host.core, ConsumerCore):
                host.core.on_message(self.now, message, body)
            else:
                host.core.on_message(self.now, message)
        host.inbox.clear()
        if isinstance(host.core, ConsumerCore):
            held = [*host.core.ready, *(delivery for delivery in host.working if not delivery.settled)]
            # A new hub knows nothing of orphans, so it may add one item of any size to them.
            sizes = [0 if delivery.orphan else delivery.work.size for delivery in held]
            self.check_window(host.name, sizes)
            self._work(host)
        else:
            self.accepted |= {parcel.key for parcel in host.core.accepted}
            host.core.accepted.clear()
            if host.leaving and host.core.session.state == "left":
                host.alive = False
                return
        self._flush_host(host)

    def _plan_timer(self, host: Host) -> None:
        deadline = host.core.session.deadline()
        if deadline is not None and deadline < host.timer_at:
            host.timer_at = deadline
            self.at(max(0.0, deadline - self.now), lambda: self._timer(host))

    def _timer(self, host: Host) -> None:
        if not host.alive or self.now < host.timer_at:
            return
        host.timer_at = float("inf")
        if self.now < host.frozen_until:
            self.at(host.frozen_until - self.now, lambda: self._timer(host))
            host.timer_at = host.frozen_until
            return
        host.core.session.on_timer(self.now)
        self._wake(host)

    # Processes.

    def _new_hub(self) -> HubCore:
        return HubCore(self.spec, "run", self.rng.getrandbits(40), grace_s=0.3)

    def _hello(self, name: str, role: wire.Role) -> Hello:
        return Hello(PROTOCOL, "run", "s", role, name, self.rng.randbytes(8).hex(), "Schema", "hash")

    def _start(self, host: Host) -> Host:
        self.hosts.append(host)
        self._connect(host)
        host.core.session.start(self.now)
        self._flush_host(host)
        return host

    def _new_consumer(self, name: str) -> Host:
        hello = self._hello(name, "consumer")
        return self._start(Host(name, ConsumerCore(hello, self.s.window_items, self.s.window_bytes)))

    def _new_producer(self, name: str) -> Host:
        return self._start(Host(name, ProducerCore(self._hello(name, "producer"))))

    def _offer(self, number: int, key: str) -> None:
        host = self.producers[number % len(self.producers)]
        if host.leaving or not host.alive:  # the newcomer will do it
            self.at(0.2, lambda: self._offer(number, key))
            return
        self.offered.add(key)
        host.parcels[key] = host.core.offer(key, self.sizes[key], 0, key)
        self._flush_host(host)

    def _work(self, host: Host) -> None:
        most = max(self.s.concurrency, self.s.gather)
        while len(host.working) < most and (delivery := host.core.take()) is not None:
            host.working.append(delivery)
            if not self.s.gather:
                takes_s = self.rng.uniform(0.001, self.s.work_s)
                self.at(takes_s, lambda delivery=delivery: self._finish(host, delivery))
        if self.s.gather and (len(host.working) >= self.s.gather or self._all_accepted()):
            for delivery in list(host.working):
                self._finish(host, delivery)

    def _finish(self, host: Host, delivery: Delivery) -> None:
        if not host.alive or delivery.settled or delivery not in host.working:
            return
        if self.now < host.frozen_until:
            self.at(host.frozen_until - self.now, lambda: self._finish(host, delivery))
            return
        key = delivery.work.key
        if key in self.killers:
            self.kills[key] += 1
            self._die(host, supervised=True)
            return
        host.working.remove(delivery)
        if key in self.poisons:
            host.core.settle(delivery, "poison", "bad")
        else:
            self.done[key] += 1
            host.core.settle(delivery, "done")
        if not self.s.gather:
            self._wake(host)

    # Death.

    def _alive(self, hosts: list[Host]) -> list[Host]:
        return [host for host in hosts if host.alive and not host.leaving]

    def _die(self, host: Host, *, supervised: bool) -> None:
        """kill -9, and a new incarnation a little later."""
        host.alive = False
        route = host.route
        self._routes.pop(route, None)
        self._last_words.add(route)
        if supervised:
            self.at(0.03, lambda: (self.hub.peer_lost(host.name), self._flush_hub()))
        elif self.rng.random() < 0.5:
            self.at(0.01, lambda: (self.hub.on_unreachable(self.now, route), self._flush_hub()))
        self.at(0.1, lambda: self._rebirth(host))

    def _rebirth(self, old: Host) -> None:
        if old in self.consumers:
            self.consumers[self.consumers.index(old)] = self._new_consumer(old.name)
            return
        new = self.producers[self.producers.index(old)] = self._new_producer(old.name)
        for key, parcel in old.parcels.items():
            if not parcel.accepted or key not in self.accepted:  # whoever was not told sends anew, under the same key
                new.parcels[key] = new.core.offer(key, self.sizes[key], 0, key)
        self._flush_host(new)

    def _all_accepted(self) -> bool:
        return self.now > self.quiet_at and all(host.alive and host.core.idle for host in self.producers)

    @property
    def quiet_at(self) -> float:
        """When nothing is offered any more and all faults have struck."""
        return max(self.s.offer_s + 1.2, 2.2)

    def check_window(self, who: str, sizes: list[int]) -> None:
        size = sum(sizes)
        fits = len(sizes) <= self.s.window_items and (size <= self.s.window_bytes or len(sizes) <= 1)
        assert fits, f"{who} has {len(sizes)} items of {size} bytes, beyond its window"
