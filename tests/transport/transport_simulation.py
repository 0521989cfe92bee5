"""Faults that strike a simulated stream, and the oracle that judges it. A violation names its seed.

The oracle believes the applications' books; it looks into the cores only for bounds.
"""

from __future__ import annotations

from transport_world import Host, Scenario, World

from transport.core.custody import SUSPECT_LOSSES, ConsumerPeer, Item
from transport.core.peers import ConsumerCore


class Simulation(World):
    def __init__(self, seed: int, scenario: Scenario) -> None:
        super().__init__(seed, scenario)
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

    def run(self) -> None:
        """Until everything is settled and all consumers have their END; then the final audit."""
        while self.queue and not self._over():
            self.step()
            self._audit()
            patient = self.now <= self.s.patience_s and self.events <= 200_000
            assert patient, f"no end after {self.now:.1f} s and {self.events} events: {self.hub.stats()}"
            if not self.hub.finishing and self.now > self.quiet_at + 0.3 and self._all_accepted():
                self.hub.finish()  # nothing more will be sent
                self._flush_hub()
        self._final_audit()

    def _over(self) -> bool:
        staying = self._alive(self.consumers)
        return self.hub.finishing and bool(staying) and all(host.core.ended for host in staying)

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
            host = self.rng.choice(hosts)
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
            host.core.session.say_hello(self.now)
            self._flush_host(host)

    def _leave(self) -> None:
        if len(hosts := self._alive(self.consumers)) > 1:
            host = self.rng.choice(hosts)
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
        hub, s, peers = self.hub, self.s, len(self.hosts)
        stats = hub.stats()
        held = stats.queued + stats.leased
        assert stats.accepted == stats.settled + stats.dead_letters + held, f"the books do not balance: {stats}"
        assert held <= s.capacity_items + peers * hub.capacity.base_items, f"held beyond capacity: {stats}"
        most_bytes = s.capacity_bytes + peers * (hub.capacity.base_bytes + s.max_size)
        assert stats.bytes_queued <= most_bytes, f"bytes beyond capacity: {stats}"
        for peer in hub.consumers.values():
            self.check_window(peer.replica, [item.size for item in self._outstanding(peer)])
        if s.routing == "keyed":
            parts = [part for peer in hub.consumers.values() if not peer.draining for part in peer.held_parts]
            assert len(parts) == len(set(parts)), f"held by several consumers: {sorted(parts)}"
            held_by = [{item.key.partition("/")[0] for item in peer.held.values()} for peer in hub.consumers.values()]
            counted = [set(peer.held_parts) for peer in hub.consumers.values()]
            assert held_by == counted, "what consumers hold is not what is counted"
        assert hub.finishing or not any(host.core.ended for host in self.consumers if host.alive), "END before finish"

    def _outstanding(self, peer: ConsumerPeer) -> list[Item]:
        """What the hub counts at a consumer, less what the consumer has finished or knows to be lost: the consumer
        reports those again in its next beat, and they take no room in its window."""
        core = next(h.core for h in self.hosts if h.core.session.hello.incarnation == peer.incarnation)
        current = (core.session.epoch, core.session.session) == (self.hub.epoch, peer.session)
        seen = core.window.seen_items if current else 0
        return [item for item in peer.held.values() if item.id in core.held or item.serial > seen]

    def _final_audit(self) -> None:
        s, stats = self.s, self.hub.stats()
        assert stats.queued + stats.leased + stats.bytes_queued == 0, f"END although something is held: {stats}"
        for key in self.offered:
            letters, kills, sure = self.letters[key], self.kills[key], key not in self.doubt
            if key in self.killers or key in self.poisons:
                assert not self.done[key], f"{key} cannot be done"
                again = s.regenerated or s.producer_deaths  # a key that was buried may be sent anew
                if sure:
                    assert 1 <= letters <= (9 if again else 1), f"{key} was dead-lettered {letters} times"
                    most = s.max_attempts + SUSPECT_LOSSES
                    assert kills <= most, f"{key} killed {kills} times, max_attempts is {s.max_attempts}"
            else:
                assert not letters, f"{key} is healthy but was dead-lettered"
                assert self.done[key] or not sure, f"{key} is lost: nobody finished it"
        if not (s.consumer_deaths or s.freezes or s.cuts or s.leaves or s.hub_restarts or s.killers):
            # Nobody died, so nothing justifies a second execution, however bad the network.
            for key in self.offered - self.poisons:
                assert self.done[key] == 1, f"{key} was finished {self.done[key]} times"
        renewed = s.producer_deaths and (s.poisons or s.killers)
        if not s.hub_restarts and not renewed:
            distinct = len(self.offered)
            assert stats.accepted == distinct, f"{stats.accepted} accepted for {distinct} distinct messages"
        for peer in self.hub.producers.values():
            assert len(peer.seqs) <= 2 * self.hub.capacity.base_items, "duplicate detection grows without bound"


def simulate(seed: int, scenario: Scenario) -> None:
    """Run one schedule; a violation names its seed."""
    try:
        Simulation(seed, scenario).run()
    except AssertionError as violation:
        raise AssertionError(f"seed {seed}: {violation}") from violation
