"""Several simulated hubs, the shards of one stream: each process has a peer at each of them, dies and leaves with all
of these, and takes from them in turns, as `ShardedInlet` does. A hub, or a link to one, dies alone.

The oracle judges each shard as a stream of its own, and here what a process has of all of them.
"""

from __future__ import annotations

from dataclasses import replace

from transport_simulation import Simulation
from transport_world import Clock, Host, Rules, Scenario, Violation

from transport.ports.shards import window_of


class Shard(Simulation):
    """`processes`: the other shards, set by whoever makes them."""

    processes: Sharded

    def _die(self, host: Host, *, supervised: bool) -> None:
        for shard, peer in self.processes.peers(self, host):
            if peer.alive:
                super(Shard, shard)._die(peer, supervised=supervised)

    def freeze(self, host: Host) -> None:
        for shard, peer in self.processes.peers(self, host):
            super(Shard, shard).freeze(peer)

    def leave(self, host: Host) -> None:
        for shard, peer in self.processes.peers(self, host):
            super(Shard, shard).leave(peer)

    def _work(self, host: Host) -> None:
        """The process takes what any shard has brought."""
        peers = self.processes.peers(self, host)
        while sum(len(peer.working) for _, peer in peers) < self.s.concurrency:
            turn = self.processes.turns.get(host.name, 0)
            numbers = [(turn + step) % len(peers) for step in range(len(peers))]
            taken = next((n for n in numbers if peers[n][0]._begin(peers[n][1])), None)
            if taken is None:
                break
            self.processes.turns[host.name] = taken + 1
            shard, peer = peers[taken]
            if peer is not host:
                shard._flush_host(peer)


class Sharded:
    """A schedule of all shards."""

    def __init__(self, seed: int, scenario: Scenario, count: int, rules: Rules | None = None) -> None:
        self.clock, self.scenario, self.turns = Clock(), scenario, dict[str, int]()
        each = replace(
            scenario,
            window_items=window_of(scenario.window_items, count),
            window_bytes=window_of(scenario.window_bytes, count),
        )
        self.shards: list[Shard] = []
        Shard.processes = self
        for number in range(count):
            self.shards.append(Shard(seed, each, rules, self.clock, (number, count)))

    def peers(self, shard: Shard, host: Host) -> list[tuple[Shard, Host]]:
        """The peers of a process, in the order of the shards."""
        if host in shard.keepers:
            return [(shard, host)]
        name = "consumers" if host in shard.consumers else "producers"
        found = []
        for other in self.shards:
            same = host if other is shard else next((h for h in getattr(other, name) if h.name == host.name), None)
            if same is not None:
                found.append((other, same))
        return found

    def run(self) -> None:
        """Until each shard has ended for all consumers, which is the end of the stream."""
        while self.clock.queue and not all(shard.over for shard in self.shards):
            self.clock.step()
            for shard in self.shards:
                shard.look()
            self._audit()
            if not self.shards[0].finishing and all(shard.ready for shard in self.shards):
                for shard in self.shards:
                    shard.finish()
        for shard in self.shards:
            shard._final_audit()

    def _audit(self) -> None:
        if self.scenario.routing == "keyed":
            hubs = [shard.hub for shard in self.shards]
            held = {
                (part, peer.replica)
                for hub in hubs
                for peer in hub.consumers.values()
                for part in peer.held_parts
                if not peer.draining
            }
            if len(held) != len({part for part, _ in held}):
                raise Violation(f"held by several consumers: {sorted(held)}")
        for host in self.shards[0].consumers:
            peers = [peer for _, peer in self.peers(self.shards[0], host) if peer.alive]
            working = sum(len(peer.working) for peer in peers)
            held = working + sum(len(peer.core.ready) for peer in peers)
            if working > self.scenario.concurrency:
                raise Violation(f"{host.name} works at {working} messages")
            if held > self.scenario.window_items + len(self.shards):
                raise Violation(f"{host.name} holds {held} messages of all shards")


def simulate_shards(seed: int, scenario: Scenario, count: int = 2, rules: Rules | None = None) -> Sharded:
    """Run one schedule; a violation names its seed."""
    sharded = Sharded(seed, scenario, count, rules)
    try:
        sharded.run()
    except Violation as violation:
        raise Violation(f"seed {seed}: {violation}") from violation
    return sharded
