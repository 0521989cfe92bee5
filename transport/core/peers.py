"""Both ends of a stream, as state machines: the consumer's half of the protocol, and the producer's.

A consumer has a window, deliveries in its care, and verdicts until the hub has recorded them:
- A delivery is handed to the application once per lease; a verdict is repeated in every beat until the hub confirms it.
- A delivery whose serial is not above the newest seen is a duplicate or was overtaken: it is dropped, and the next
  beat (a full account) makes the hub redeliver it if it was needed. So the window is never exceeded.
- Deliveries of an earlier hub incarnation (orphans) may still be finished by the application. Their verdicts are
  not reported.

A producer waits for credit, sends, and resends until its message is accepted:
- A message gets its sequence number when it first goes out, and keeps it while the hub remembers this producer, so the
  hub recognises a resend. Acceptance resolves a message once; messages leave in the order in which they were offered.
- A hub that does not remember this producer gets all unaccepted messages once more.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

from transport import wire
from transport.core.session import PeerCore, ReceiveWindow, SendCredit

Verdict = Literal["done", "poison", "returned"]


@dataclass(slots=True, eq=False)
class Delivery:
    """One message in a consumer's care."""

    work: wire.Work
    body: wire.Body
    attempt: int
    started: bool = False
    settled: bool = False
    orphan: bool = False


class ConsumerCore(PeerCore):
    def __init__(
        self, hello: wire.Hello, window_items: int, window_bytes: int, *, give_up_s: float | None = None
    ) -> None:
        super().__init__(hello, give_up_s)
        self.window = ReceiveWindow(window_items, window_bytes)
        self.ready: deque[Delivery] = deque()
        self.held: dict[int, Delivery] = {}
        self.ended = False
        self.draining = False
        self.urgent = False  # a redelivered item was started: report it before it can kill this process
        self._verdicts: dict[int, wire.Refusal | None] = {}  # unconfirmed; None is done
        self._fresh: list[int] = []  # verdicts not yet reported at all
        self._started: list[int] = []

    def on_message(self, now: float, message: wire.FromHub, body: wire.Body = None) -> None:
        if isinstance(message, wire.Work):
            self._work(now, message, body)
        elif isinstance(message, wire.Settled):
            self._settled(now, message)
        elif isinstance(message, wire.End):
            self.session.heard(now)
            self.ended = self.ended or message.epoch == self.session.epoch
        else:
            session = self.session.session
            changed = self.session.on_message(now, message)
            if isinstance(message, wire.Welcome):
                self._welcome(now, message, changed, message.session != session)

    def take(self) -> Delivery | None:
        """Hand the next delivery to the application. From now on the hub blames it if this replica dies."""
        if not self.ready:
            return None
        delivery = self.ready.popleft()
        delivery.started = True
        if not delivery.orphan:
            self._started.append(delivery.work.id)
            self.urgent = self.urgent or delivery.attempt > 1
        return delivery

    def settle(self, delivery: Delivery, verdict: Verdict, reason: str = "") -> None:
        """Record a verdict. The caller settles each delivery once."""
        delivery.settled = True
        self.window.release(delivery.work.size)
        delivery.body = None
        if delivery.orphan:
            return
        item_id = delivery.work.id
        del self.held[item_id]
        refusal = (
            None if verdict == "done" else wire.Refusal(item_id, delivery.attempt, verdict, reason[: wire.REASON_LIMIT])
        )
        self._verdicts[item_id] = refusal
        self._fresh.append(item_id)

    def drain(self) -> None:
        """Accept nothing more and hand back what was not started; what was started may be finished."""
        self.draining = True
        self.session.out.append((wire.Drain(), None))
        self._return(list(self.ready))
        self.ready.clear()

    def fin(self, now: float, *, blame: bool = False) -> None:
        """Say goodbye. What was started and has no verdict is handed back, or blamed."""
        self._return(list(self.ready))
        self.ready.clear()
        if not blame:
            self._return(list(self.held.values()))
        self._report()
        super().fin(now, blame=blame)

    def flush(self, now: float) -> list[tuple[wire.ToHub, wire.Body]]:
        """All that is due: verdicts and starts since the last report with the new credit, or a beat."""
        if self.session.beat_due(now):
            self._report(beat=True)
        elif self._fresh or self._started:
            self._report()
        self.urgent = False
        return self.session.flush()

    def _report(self, *, beat: bool = False) -> None:
        if self.session.epoch is None:
            return
        ids = list(self._verdicts) if beat else self._fresh
        done = tuple(item_id for item_id in ids if item_id in self._verdicts and self._verdicts[item_id] is None)
        refused = tuple(refusal for item_id in ids if (refusal := self._verdicts.get(item_id)) is not None)
        # On a beat all starts are repeated, since a report of them may have been lost.
        starts = [item_id for item_id, held in self.held.items() if held.started] if beat else self._started
        report = wire.Report(
            self.session.epoch,
            self.session.session,
            self.window.seen_items,
            self.window.limit_items,
            self.window.limit_bytes,
            tuple(item_id for item_id in starts if item_id in self.held),
            done,
            refused,
            tuple(self.held) if beat else None,
        )
        self._fresh = []
        self._started = []
        self.session.out.append((report, None))

    def _work(self, now: float, work: wire.Work, body: wire.Body) -> None:
        self.session.heard(now)
        session = self.session
        if work.epoch != session.epoch or work.session != session.session or work.serial <= self.window.seen_items:
            return
        self.window.see(work.serial, work.total_bytes)
        held = self.held.get(work.id)
        if held is not None:  # the hub thought it lost: keep the delivery that is here, under the new attempt
            held.attempt = max(held.attempt, work.attempt)
            self.session.beat_now(now)
            return
        verdict = self._verdicts.get(work.id, "none")
        if verdict is None or (isinstance(verdict, wire.Refusal) and verdict.attempt >= work.attempt):
            self._fresh.append(work.id)  # the verdict was lost on its way: repeat it
            return
        self._verdicts.pop(work.id, None)
        delivery = Delivery(work, body, work.attempt)
        self.window.hold(work.size)
        self.held[work.id] = delivery
        if self.draining or self.session.leaving:
            self.settle(delivery, "returned")
        else:
            self.ready.append(delivery)

    def _settled(self, now: float, message: wire.Settled) -> None:
        self.session.heard(now)
        if message.epoch != self.session.epoch:
            return
        for item_id in message.ids:
            self._verdicts.pop(item_id, None)
        if message.session == self.session.session and message.sent_items > self.window.seen_items:
            # Deliveries before this answer were lost: report that their share of the window is free again.
            self.window.see(message.sent_items, message.sent_bytes)
            self.session.beat_now(now)

    def _welcome(self, now: float, message: wire.Welcome, changed: bool, forgotten: bool) -> None:
        if changed:
            for delivery in self.held.values():
                delivery.orphan = True
            self.held.clear()
            self._verdicts.clear()
            self._fresh.clear()
            self._started.clear()
            self.ended = False
        if changed or forgotten:
            self.window.seen_items = self.window.seen_bytes = 0
        self.window.see(message.sent_items, message.sent_bytes)
        if self.draining:
            self.session.out.append((wire.Drain(), None))
        if self.session.fin_pending:
            self._report(beat=True)
            self.session.fin(now, blame=self.session.blame)

    def _return(self, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            if not delivery.settled:
                self.settle(delivery, "returned")


@dataclass(slots=True, eq=False)
class Parcel:
    """One message on its way to the hub's custody."""

    key: str
    size: int
    checksum: int
    body: wire.Body
    seq: int = 0
    sent: bool = False  # at least once, to any hub
    accepted: bool = False


class ProducerCore(PeerCore):
    def __init__(self, hello: wire.Hello, *, give_up_s: float | None = None) -> None:
        super().__init__(hello, give_up_s)
        self.credit = SendCredit()
        self.waiting: deque[Parcel] = deque()
        self.unaccepted: dict[int, Parcel] = {}
        self.accepted: list[Parcel] = []  # taken by the shell, which wakes the senders
        self._closing = False
        self._quiet_beats = 0

    def offer(self, key: str, size: int, checksum: int, body: wire.Body) -> Parcel:
        parcel = Parcel(key, size, checksum, body)
        self.waiting.append(parcel)
        return parcel

    def withdraw(self, parcel: Parcel) -> None:
        """Forget a message that has not gone out; a message that has is accepted all the same."""
        if not parcel.sent:
            self.waiting.remove(parcel)

    def on_message(self, now: float, message: wire.FromHub) -> None:
        if isinstance(message, wire.Accepted):
            self._accepted(now, message)
            return
        if isinstance(message, wire.Welcome):
            awaited, known_as = self.session.state == "greeting", self.session.session
            changed = self.session.on_message(now, message)
            self._welcome(message, changed or known_as not in (0, message.session), awaited)
        else:
            self.session.on_message(now, message)

    def flush(self, now: float) -> list[tuple[wire.ToHub, wire.Body]]:
        if self.session.beat_due(now):
            self.session.out.append((wire.Ping(), None))
            self._quiet_beats += 1
            if self._quiet_beats >= 2 and self.unaccepted:  # no acceptance for a whole beat: something was lost
                self._resend()
        if self.session.state == "open":
            self._pump()
            if (self._closing or self.session.fin_pending) and self.idle:
                self.session.fin(now)
        return self.session.flush()

    def fin(self, now: float, *, blame: bool = False) -> None:
        """Say goodbye as soon as the hub has everything, or at once if it takes nothing more."""
        if self.idle or self.session.refusal is not None or self.session.lost:
            super().fin(now, blame=blame)
        else:
            self._closing = True

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.unaccepted

    def _pump(self) -> None:
        credit = self.credit
        while self.waiting and credit.free_items and credit.sent_bytes < credit.limit_bytes:
            parcel = self.waiting.popleft()
            if not parcel.seq:
                parcel.seq = self.session.next_seq
                self.session.next_seq += 1
            parcel.sent = True
            credit.use(parcel.size)
            self.unaccepted[parcel.seq] = parcel
            self._put(parcel)

    def _put(self, parcel: Parcel) -> None:
        self.session.out.append((wire.Put(parcel.seq, parcel.key, parcel.size, parcel.checksum), parcel.body))

    def _resend(self) -> None:
        self._quiet_beats = 0
        for parcel in self.unaccepted.values():
            self._put(parcel)

    def _accepted(self, now: float, message: wire.Accepted) -> None:
        self.session.heard(now)
        if message.epoch != self.session.epoch:
            return
        self.credit.grant(message.limit_items, message.limit_bytes)
        for seq in message.seqs:
            parcel = self.unaccepted.pop(seq, None)
            if parcel is not None:
                self._quiet_beats = 0
                parcel.accepted = True
                parcel.body = None
                self.accepted.append(parcel)

    def _welcome(self, message: wire.Welcome, forgotten: bool, awaited: bool) -> None:
        if forgotten:
            self._begin_anew(message.low_seq)
        elif awaited:  # the second answer to two quick hellos shows no loss
            self._resend()
        self.credit.grant(message.limit_items, message.limit_bytes)

    def _begin_anew(self, first_seq: int) -> None:
        """The hub does not remember this producer: all unaccepted messages go again, under new credit and new numbers.
        The previous numbers have gaps, and messages under them may still be on their way."""
        for parcel in self.waiting:
            parcel.seq = 0
        for _, parcel in sorted(self.unaccepted.items(), reverse=True):
            parcel.seq = 0
            self.waiting.appendleft(parcel)
        self.unaccepted.clear()
        self.session.next_seq = first_seq
        self.credit = SendCredit()
