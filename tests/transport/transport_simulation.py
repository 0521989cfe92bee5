"""Faults that strike a simulated stream, and the oracle that judges it. A violation names its seed.

The oracle believes the applications' books; it looks into the cores only for bounds.
"""

from __future__ import annotations

from transport_world import Host, Rules, Scenario, Violation, World

from transport.core.custody import SUSPECT_LOSSES, ConsumerPeer, Item
from transport.core.peers import ConsumerCore


class Simulation(World):
    def __init__(self, seed: int, scenario: Scenario, rules: Rules | None = None) -> None:
        super().__init__(seed, scenario, rules)
        for fault, times in (
            (self._kill_consumer, scenario.consumer_deaths),
            (self._kill_producer, scenario.producer_deaths),
            (self._freeze, scenario.freezes),
            (self._cut, scenario.cuts),
            (self._leave, scenario.leaves),
            (self._restart_hub, scenario.hub_restarts),
            (self._leave_producer, scenario.producer_leaves),
        ):
            for _ in range(times):
                self.at(self.rng.uniform(0.05, 2), fault)

    finishing = False

    def run(self) -> None:
        """Until everything is settled and all consumers have their END; then the final audit."""
        while self.clock.queue and not self.over:
            self.clock.step()
            self.look()
            if not self.finishing and self.ready:
                self.finish()
        self._final_audit()

    def look(self) -> None:
        """After each event."""
        self.events += 1
        self._audit()
        if self.now > self.s.patience_s or self.events > 200_000:
            raise Violation(f"no end after {self.now:.1f} s and {self.events} events: {self.hub.stats()}")

    @property
    def ready(self) -> bool:
        return self.now > self.quiet_at + 0.3 and self._all_accepted()

    @property
    def over(self) -> bool:
        staying = [host for host in self.consumers if host.alive and not host.leaving]
        return self.finishing and bool(staying) and all(host.core.ended for host in staying)

    def finish(self) -> None:
        """Nothing more will be sent."""
        self.finishing = True
        self.hub.finish()
        self._flush_hub()

    # Faults.

    def _kill_consumer(self) -> None:
        if hosts := self._alive(self.consumers):
            host = self.rng.choice(hosts)
            self._die(host, supervised=self.rng.random() < self.s.supervised)

    def _kill_producer(self) -> None:
        if hosts := self._alive(self.producers):
            self._die(self.rng.choice(hosts), supervised=self.rng.random() < self.s.supervised)

    def _freeze(self) -> None:
        if hosts := self._alive(self.consumers):
            self.freeze(self.rng.choice(hosts))

    def freeze(self, host: Host) -> None:
        host.frozen_until = self.now + 1.5 * self.s.lease_s
        self.at(host.frozen_until - self.now, lambda: self._wake(host))

    def _cut(self) -> None:
        if hosts := self._alive(self.consumers + self.producers):
            host = self.rng.choice(hosts)
            route = host.route
            self._connect(host)  # what was under way on the old route is lost
            self.at(0.005, lambda: (self.hub.on_unreachable(self.now, route), self._flush_hub()))
            self.at(self.rng.uniform(0.01, 0.2), lambda: self._link_up(host))

    def _link_up(self, host: Host) -> None:
        if host.alive and self.now >= host.frozen_until:
            host.core.on_link_up(self.now)
            self._flush_host(host)

    def _leave(self) -> None:
        if len(hosts := self._alive(self.consumers)) > 1:
            self.leave(self.rng.choice(hosts))

    def leave(self, host: Host) -> None:
        host.leaving = True
        host.core.fin(self.now, blame=False)
        host.working.clear()
        self._flush_host(host)
        self.at(0.1, lambda: self.consumers.append(self._new_consumer(host.name + "'")))

    def _leave_producer(self) -> None:
        """It sends nothing more, says goodbye, and its work is taken up by another one."""
        if hosts := self._alive(self.producers):
            host = self.rng.choice(hosts)
            if host.core.waiting or host.core.unaccepted:
                self.at(0.05, self._leave_producer)  # a port waits until all that it sent was accepted
                return
            host.leaving = True
            host.core.fin(self.now)
            self._flush_host(host)
            self.producers[self.producers.index(host)] = self._new_producer(host.name + "'")

    def _restart_hub(self) -> None:
        """kill -9 of the hub: its memory is gone, and another one comes to the same place."""
        self.doubt |= {key for key in self.offered if key not in self.done}
        finishing = self.hub.finishing
        self.hub = self._new_hub()
        self.hub.finishing = finishing  # who asks for the end asks each incarnation
        self.hub_timer_at = float("inf")
        for host in self.hosts:
            if not host.alive or (host.leaving and isinstance(host.core, ConsumerCore)):
                continue
            self._echoes[host.route] = host
            self._connect(host)
            self.at(self.rng.uniform(0.01, 0.2), lambda host=host: self._link_up(host))

    # Oracle.

    def _audit(self) -> None:
        hub = self.hub
        stats = hub.stats()
        peers = len(self.hosts)
        if stats.accepted != stats.settled + stats.dead_letters + stats.queued + stats.leased:
            raise Violation(f"the books do not balance: {stats}")
        if stats.queued + stats.leased > self.s.capacity_items + peers * hub.capacity.base_items:
            raise Violation(f"held beyond capacity: {stats}")
        if stats.bytes_queued > self.s.capacity_bytes + peers * (hub.capacity.base_bytes + self.s.max_size):
            raise Violation(f"bytes beyond capacity: {stats}")
        for peer in hub.consumers.values():
            held = self._outstanding(peer)
            size = sum(item.size for item in held)
            if len(held) > self.s.window_items or (size > self.s.window_bytes and len(held) > 1):
                raise Violation(f"hub has {len(held)} items of {size} bytes at {peer.replica}, beyond its window")
        if self.s.routing == "keyed":
            parts = [part for peer in hub.consumers.values() if not peer.draining for part in peer.held_parts]
            if len(parts) != len(set(parts)):
                raise Violation(f"held by several consumers: {sorted(parts)}")
            held_by = [{item.key.partition("/")[0] for item in peer.held.values()} for peer in hub.consumers.values()]
            if held_by != [set(peer.held_parts) for peer in hub.consumers.values()]:
                raise Violation("what consumers hold is not what is counted")
        if not hub.finishing and any(host.core.ended for host in self.consumers if host.alive):
            raise Violation("END before finish")

    def _outstanding(self, peer: ConsumerPeer) -> list[Item]:
        """What the hub counts at a consumer, less what the consumer has finished or knows to be lost: the consumer
        reports those again in its next beat, and they take no room in its window."""
        core = next(h.core for h in self.hosts if h.core.session.hello.incarnation == peer.incarnation)
        current = (core.session.epoch, core.session.session) == (self.hub.epoch, peer.session)
        seen = core.window.seen_items if current else 0
        return [item for item in peer.held.values() if item.id in core.held or item.serial > seen]

    def _final_audit(self) -> None:
        stats = self.hub.stats()
        if stats.queued or stats.leased or stats.bytes_queued:
            raise Violation(f"END although something is in custody: {stats}")
        for key in self.offered:
            if key in self.killers or key in self.poisons:
                if self.done[key]:
                    raise Violation(f"{key} cannot be done")
                again = self.s.regenerated or self.s.producer_deaths  # a key that was buried may be sent anew
                if not (1 <= self.letters[key] <= (9 if again else 1)) and key not in self.doubt:
                    raise Violation(f"{key} was dead-lettered {self.letters[key]} times instead of once")
                if self.kills[key] > self.s.max_attempts + SUSPECT_LOSSES and key not in self.doubt:
                    raise Violation(f"{key} killed {self.kills[key]} times, max_attempts is {self.s.max_attempts}")
            elif self.letters[key]:
                raise Violation(f"{key} is healthy but was dead-lettered")
            elif not self.done[key] and key not in self.doubt:
                raise Violation(f"{key} is lost: nobody finished it")
        s = self.s
        if not (s.consumer_deaths or s.freezes or s.cuts or s.leaves or s.hub_restarts or s.killers):
            # Nobody died, so nothing justifies a second execution, however bad the network.
            for key in self.offered - self.poisons:
                if self.done[key] != 1:
                    raise Violation(f"{key} was finished {self.done[key]} times")
        if not self.s.hub_restarts:
            distinct = len(self.offered)
            renewed = self.s.producer_deaths and (self.s.poisons or self.s.killers)
            if not renewed and stats.accepted != distinct:
                raise Violation(f"{stats.accepted} accepted for {distinct} distinct messages")
        for peer in self.hub.producers.values():
            if len(peer.seqs) > 2 * self.hub.capacity.base_items:
                raise Violation("duplicate detection grows without bound")


def simulate(seed: int, scenario: Scenario, rules: Rules | None = None) -> Simulation:
    """Run one schedule; a violation names its seed."""
    world = Simulation(seed, scenario, rules)
    try:
        world.run()
    except Violation as violation:
        raise Violation(f"seed {seed}: {violation}") from violation
    return world
