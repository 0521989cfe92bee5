"""The hub of one stream: takes custody from producers, delivers under lease to consumers, counts every message.

Invariants:
- ACCEPTED is sent only for what is in custody; custody ends with the first verdict, or as a dead letter.
- A lease holds while messages of its consumer arrive. A beat lists all that the consumer holds, so the hub notices a
  lost delivery without waiting for the lease.
- A broken link is no death: the consumer may come back within `grace_s` and keep what it holds. The supervisor's
  `peer_lost`, a lease that runs out, and a grace that runs out are deaths, and blame what was started there.
- END is sent only after `finish()`, with nothing in custody.
- Peers are known by incarnation; a route is only where to answer. A peer without a hello leaves no state.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import fields
from typing import NamedTuple

from transport import wire
from transport.core.custody import ConsumerPeer, Custody, ProducerPeer, mismatch
from transport.core.dispatch import Dispatch
from transport.core.session import Capacity, SeqWindow
from transport.spec import Counts, HubStats, StreamSpec

MAX_PEERS = 4096
REMEMBERED_PRODUCERS = 4096
GRACE_S = 1.0
CONFIRMED = 64  # at once


class Send(NamedTuple):
    route: bytes
    message: wire.FromHub
    body: wire.Body = None


class HubCore:
    """See the module. `now` is any monotonic clock, the same in all calls."""

    def __init__(self, spec: StreamSpec, run_id: str, epoch: int, *, grace_s: float = GRACE_S) -> None:
        self.spec = spec
        self.run_id, self.epoch = run_id, epoch
        self.grace_s = min(grace_s, spec.lease_s)
        self.custody = Custody(spec, epoch)
        self.capacity = Capacity(spec.capacity_items, spec.capacity_bytes)
        self.producers: dict[str, ProducerPeer] = {}
        self.consumers: dict[str, ConsumerPeer] = {}
        self.dispatch = Dispatch(spec, self.custody, self.consumers)
        self.schema: tuple[str, str] | None = None  # of the first peer
        self.finishing = False
        self.closing = False
        self.malformed = 0
        self._routes: dict[bytes, ProducerPeer | ConsumerPeer] = {}
        self._departed: OrderedDict[str, ProducerPeer] = OrderedDict()  # so that a resend after a cut is recognised
        # Peers for the next flush: those that sent a message, and producers with less credit than they may need. A look
        # at every peer for every message would cost replicas times messages.
        self._due: dict[ProducerPeer | ConsumerPeer, None] = {}
        self._out: list[Send] = []
        self._wake_at: float | None = None
        self._sessions = itertools.count(1)

    # What comes in.

    def on_message(self, now: float, route: bytes, message: wire.ToHub, body: wire.Body = None) -> None:
        """Take a decoded message. `body` has as many bytes as a Put says: the shell has checked that."""
        if isinstance(message, wire.Hello):
            if not self.closing:
                self._hello(now, route, message)
            return
        peer = self._routes.get(route)
        if peer is None:
            if isinstance(message, wire.Fin):
                self._out.append(Send(route, wire.FinAck()))
            elif not isinstance(message, wire.FinAck):
                self._out.append(Send(route, wire.Who()))
            return
        peer.silent_at = now + self.spec.lease_s
        peer.connected = True
        self._due[peer] = None
        if isinstance(peer, ProducerPeer) and isinstance(message, wire.Put):  # the first two are most messages
            self._put(peer, message, body)
        elif isinstance(peer, ConsumerPeer) and isinstance(message, wire.Report):
            self._report(peer, message)
        elif isinstance(message, wire.Fin | wire.FinAck):
            self._leave(peer, blame=isinstance(message, wire.Fin) and message.blame)
            if isinstance(message, wire.Fin):
                self._out.append(Send(route, wire.FinAck()))
        elif isinstance(peer, ProducerPeer) and isinstance(message, wire.Ping):
            peer.wants_limits = True
        elif isinstance(peer, ConsumerPeer) and isinstance(message, wire.Drain):
            peer.draining = True
            self.dispatch.abandon(peer)
        else:
            self.malformed += 1

    def on_unreachable(self, now: float, route: bytes) -> None:
        """The link behind the route is gone."""
        peer = self._routes.get(route)
        if peer is not None and peer.connected:
            peer.connected = False
            peer.silent_at = now + self.grace_s
            self._note(peer.silent_at)
            if isinstance(peer, ConsumerPeer):
                self.dispatch.abandon(peer)

    def on_timer(self, now: float) -> None:
        """Expire leases and graces."""
        for peer in self._peers():
            if peer.silent_at <= now:
                how = "was silent for a lease" if peer.connected else "lost its link"
                self._leave(peer, blame=True, how=how)
        self.dispatch.on_timer(now)
        self._wake_at = None
        for peer in self._peers():
            self._note(peer.silent_at)

    def peer_lost(self, replica: str, *, blame: bool = True) -> None:
        """The supervisor saw the replica die: do not wait for its lease."""
        for peer in self._peers():
            if peer.replica == replica:
                self._leave(peer, blame=blame, how="died")

    def finish(self) -> None:
        """Send END as soon as nothing is in custody any more."""
        self.finishing = True

    # What goes out.

    def flush(self, now: float) -> list[Send]:
        """Acknowledge, grant and deliver: all that is due now, in this order for each peer."""
        due, self._due = self._due, {}
        for peer in due:
            if isinstance(peer, ConsumerPeer):
                if self.consumers.get(peer.incarnation) is peer:
                    self._confirm(peer)
            elif self.producers.get(peer.incarnation) is peer:
                self._grant(peer)
        for item, consumer in self.dispatch.assign(now):
            item.leased_at = now
            self._out.append(Send(consumer.route, self.custody.lease(item, consumer), item.body))
        if self.ended:
            for consumer in self.consumers.values():
                if not consumer.end_sent and consumer.connected:
                    consumer.end_sent = True
                    self._out.append(Send(consumer.route, wire.End(self.epoch)))
        out, self._out = self._out, []
        return out

    def deadline(self) -> float | None:
        """When on_timer wants to be called; may be early, is never late."""
        times = [self._wake_at, self.dispatch.deadline()]
        return min((time for time in times if time is not None), default=None)

    @property
    def ended(self) -> bool:
        return self.finishing and not self.custody.items

    def knows(self, route: bytes) -> bool:
        return route in self._routes

    def probe(self) -> list[Send]:
        """A harmless message for each connected peer: some link broke, and sending shows which."""
        probes: list[Send] = []
        for peer in self._routes.values():
            if isinstance(peer, ConsumerPeer):
                probes.append(Send(peer.route, wire.Settled(self.epoch, peer.session, ())))
            else:
                probes.append(Send(peer.route, wire.Accepted(self.epoch, (), peer.limit_items, peer.limit_bytes)))
        return [probe for probe in probes if self._routes[probe.route].connected]

    def close(self) -> None:
        """Say goodbye to all peers and admit none; `peerless` is true when all have answered."""
        self.closing = True
        self._out.extend(Send(route, wire.Fin()) for route in self._routes)

    @property
    def peerless(self) -> bool:
        return not any(peer.connected for peer in self._routes.values())

    def stats(self) -> HubStats:
        return HubStats(
            **{counted.name: getattr(self.custody, counted.name) for counted in fields(Counts)},
            queued=len(self.custody.items) - self.custody.leased,
            producers=len(self.producers),
            consumers=len(self.consumers),
            malformed=self.malformed,
        )

    def _peers(self) -> list[ProducerPeer | ConsumerPeer]:
        return [*self.producers.values(), *self.consumers.values()]

    # Producers.

    def _put(self, peer: ProducerPeer, put: wire.Put, body: wire.Body) -> None:
        if put.seq in peer.seqs:
            self.custody.duplicates += 1
            peer.to_accept.append(put.seq)
        elif self.ended:
            self._out.append(Send(peer.route, wire.Refuse("finished", f"stream {self.spec.name!r} has ended")))
        elif put.size > self.spec.max_message_bytes or not peer.within_credit:
            self.malformed += 1
            peer.wants_limits = True
        else:
            peer.seqs.add(put.seq)
            peer.used_items += 1
            peer.used_bytes += put.size
            self.custody.admit(put.key, put.size, put.checksum, body)
            peer.to_accept.append(put.seq)

    def _limits(self, peer: ProducerPeer) -> tuple[int, int]:
        return peer.limits(self.capacity, len(self.custody.items), self.custody.bytes_queued)

    def _grant(self, peer: ProducerPeer) -> None:
        """Acknowledge, and raise the limits: with each acknowledgement, on request, when half is used up."""
        limits = self._limits(peer)
        raised = peer.starved(self.capacity) and limits != (peer.limit_items, peer.limit_bytes)
        if peer.connected and (peer.to_accept or peer.wants_limits or raised):
            peer.limit_items, peer.limit_bytes = limits
            self._out.append(Send(peer.route, wire.Accepted(self.epoch, tuple(peer.to_accept), *limits)))
            peer.to_accept.clear()
            peer.wants_limits = False
        if peer.starved(self.capacity):
            self._due[peer] = None  # grant more as soon as consumers make room

    # Consumers.

    def _confirm(self, peer: ConsumerPeer) -> None:
        """Confirm recorded verdicts; in answer to a beat, also say how far deliveries have gone.

        A done may wait for others: its consumer repeats it in beats, and nothing depends on it. What was refused is
        delivered again, so its verdict must be past."""
        if not peer.refused and not peer.beat and len(peer.done) < CONFIRMED:
            return
        sent = (peer.credit.sent_items, peer.credit.sent_bytes) if peer.beat else (-1, -1)
        verdicts = (*peer.done, *peer.refused)
        self._out.append(Send(peer.route, wire.Settled(self.epoch, peer.session, verdicts, *sent)))
        peer.done.clear()
        peer.refused.clear()
        if peer.beat and self.ended:
            peer.end_sent = False  # a consumer that still beats may have missed it
        peer.beat = False

    def _report(self, peer: ConsumerPeer, report: wire.Report) -> None:
        if report.epoch != self.epoch:
            return
        current = report.session == peer.session
        if current:
            peer.credit.grant(report.limit_items, report.limit_bytes)
        for item_id in report.started:
            if (item := peer.held.get(item_id)) is not None:
                item.started = True
        for item_id in report.done:
            if item_id not in peer.done:
                self.custody.settle(item_id)
                peer.done[item_id] = None
        for refusal in report.refused:
            self._refused(peer, refusal.id, refusal.kind, refusal.reason)
            peer.refused.append(refusal.id)
        if current and report.held is not None:
            peer.beat = True
            kept = set(report.held)
            for item in list(peer.held.values()):
                if item.serial <= report.seen and item.id not in kept:
                    self.custody.requeue(item)  # it never arrived

    def _refused(self, peer: ConsumerPeer, item_id: int, kind: str, reason: str) -> None:
        item = self.custody.items.get(item_id)
        if item is None:
            self.custody.duplicates += 1
        elif kind == "poison":
            self.custody.bury(item, reason)
        elif item.holder is peer:
            self.custody.requeue(item)

    # Coming and going.

    def _hello(self, now: float, route: bytes, hello: wire.Hello) -> None:
        problem = mismatch(hello, self.spec, self.run_id, self.schema)
        known = hello.incarnation in self.producers or hello.incarnation in self.consumers
        if problem is None and not known and len(self._routes) >= MAX_PEERS:
            problem = f"stream {self.spec.name!r} already has {MAX_PEERS} peers, its limit; check for a reconnect loop"
        if problem is not None:
            self._out.append(Send(route, wire.Refuse("refused", problem)))
            return
        self.schema = self.schema or (hello.schema, hello.schema_hash)
        silent_at = now + self.spec.lease_s
        about = (route, hello.replica, hello.incarnation, silent_at)
        peer: ProducerPeer | ConsumerPeer | None
        if hello.role == "producer":
            peer = self.producers.get(hello.incarnation) or self._departed.pop(hello.incarnation, None)
            peer = peer or ProducerPeer(*about, next(self._sessions), seqs=SeqWindow(hello.low_seq))
            self.producers[hello.incarnation] = peer
            peer.limit_items, peer.limit_bytes = limits = self._limits(peer)
            sent = (peer.used_items, peer.used_bytes)
        else:
            peer = self.consumers.get(hello.incarnation) or ConsumerPeer(*about, next(self._sessions))
            self.consumers[hello.incarnation] = peer
            peer.end_sent = False
            limits = (0, 0)
            sent = (peer.credit.sent_items, peer.credit.sent_bytes)
        if peer.route != route:
            self._routes.pop(peer.route, None)
            peer.route = route
        self._routes[route] = peer
        self._due[peer] = None
        peer.connected = True
        peer.silent_at = silent_at
        self._note(silent_at)
        low = peer.seqs.low if isinstance(peer, ProducerPeer) else 1
        bounds = (self.spec.lease_s, self.spec.max_message_bytes)
        self._out.append(Send(route, wire.Welcome(self.epoch, peer.session, *bounds, *limits, *sent, low)))

    def _leave(self, peer: ProducerPeer | ConsumerPeer, *, blame: bool, how: str = "failed") -> None:
        """Forget a peer; its items are delivered to other consumers, and blamed if they had been started."""
        self._routes.pop(peer.route, None)
        if isinstance(peer, ProducerPeer):
            self.producers.pop(peer.incarnation, None)
            peer.to_accept.clear()
            self._departed[peer.incarnation] = peer
            if len(self._departed) > REMEMBERED_PRODUCERS:
                self._departed.popitem(last=False)
            return
        self.consumers.pop(peer.incarnation, None)
        solitary = self.dispatch.solitary
        self.dispatch.abandon(peer)
        for item in list(peer.held.values()):
            if blame and (item.started or item is solitary):
                self.custody.fail(item, f"replica {peer.replica!r} {how} while executing it")
            else:
                self.custody.requeue(item, died=blame)

    def _note(self, time: float) -> None:
        if self._wake_at is None or time < self._wake_at:
            self._wake_at = time
