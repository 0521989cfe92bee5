"""A producer's half of the protocol: waits for credit, sends, resends until accepted.

Invariants: sequence numbers are given when a message first goes out and never change, so the hub recognises a resend;
acceptance resolves a message once; messages leave in the order in which they were offered.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from transport.core.credit import SendCredit
from transport.core.custody import Body
from transport.core.session import PeerCore
from transport.wire import Accepted, FromHub, Hello, Ping, Put, ToHub, Welcome


@dataclass(slots=True, eq=False)
class Parcel:
    """One message on its way to the hub's custody."""

    key: str
    size: int
    checksum: int
    body: Body
    seq: int = 0
    accepted: bool = False


class ProducerCore(PeerCore):
    def __init__(self, hello: Hello, *, give_up_s: float | None = None) -> None:
        super().__init__(hello, give_up_s)
        self.credit = SendCredit()
        self.waiting: deque[Parcel] = deque()
        self.unaccepted: dict[int, Parcel] = {}
        self.accepted: list[Parcel] = []  # taken by the shell, which wakes the senders
        self._next_seq = 1
        self._quiet_beats = 0

    def on_link_up(self, now: float) -> None:
        self._low_seq()
        super().on_link_up(now)

    def offer(self, key: str, size: int, checksum: int, body: Body) -> Parcel:
        parcel = Parcel(key, size, checksum, body)
        self.waiting.append(parcel)
        return parcel

    def withdraw(self, parcel: Parcel) -> None:
        """Forget a message that has not gone out; one that has will be accepted all the same."""
        if not parcel.seq:
            self.waiting.remove(parcel)

    def on_message(self, now: float, message: FromHub) -> None:
        if isinstance(message, Accepted):
            self._accepted(now, message)
            return
        if isinstance(message, Welcome):
            awaited = self.session.state == "greeting"
            changed = self.session.on_message(now, message)
            self._welcome(now, message, changed, awaited)
        else:
            self._low_seq()
            self.session.on_message(now, message)

    def on_timer(self, now: float) -> None:
        self._low_seq()
        super().on_timer(now)

    def fin(self, now: float) -> None:
        self.session.fin(now)

    def flush(self, now: float) -> list[tuple[ToHub, Body]]:
        if self.session.beat_due(now):
            self.session.out.append((Ping(), None))
            self._quiet_beats += 1
            if self._quiet_beats >= 2 and self.unaccepted:  # no acceptance for a whole beat: something was lost
                self._resend()
        if self.session.state == "open":
            self._pump()
        return self.session.flush()

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.unaccepted

    def _low_seq(self) -> None:
        low = min(self.unaccepted, default=0) or min((p.seq for p in self.waiting if p.seq), default=self._next_seq)
        if low != self.session.hello.low_seq:
            self.session.raise_low_seq(low)

    def _pump(self) -> None:
        credit = self.credit
        while self.waiting and credit.free_items and credit.sent_bytes < credit.limit_bytes:
            parcel = self.waiting.popleft()
            if not parcel.seq:
                parcel.seq = self._next_seq
                self._next_seq += 1
            credit.use(parcel.size)
            self.unaccepted[parcel.seq] = parcel
            self._put(parcel)

    def _put(self, parcel: Parcel) -> None:
        self.session.out.append((Put(parcel.seq, parcel.key, parcel.size, parcel.checksum), parcel.body))

    def _resend(self) -> None:
        self._quiet_beats = 0
        for parcel in self.unaccepted.values():
            self._put(parcel)

    def _accepted(self, now: float, message: Accepted) -> None:
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

    def _welcome(self, now: float, message: Welcome, changed: bool, awaited: bool) -> None:
        forgotten = message.sent_items < self.credit.sent_items - len(self.unaccepted)
        if changed or forgotten:  # the counters are gone: everything unaccepted goes again, under the new credit
            self.waiting.extendleft(reversed(self.unaccepted.values()))
            self.unaccepted.clear()
            self.credit = SendCredit()
        elif awaited:  # the second answer to two quick hellos shows no loss
            self._resend()
        self.credit.grant(message.limit_items, message.limit_bytes)
        if self.session.fin_pending:
            self.session.fin(now)
