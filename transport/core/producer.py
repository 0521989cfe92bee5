"""A producer's half of the protocol: waits for credit, sends, resends until accepted.

Invariants: a message gets its sequence number when it first goes out, and keeps it while the hub remembers this
producer, so the hub recognises a resend; acceptance resolves a message once; messages leave in the order in which they
were offered. A hub that does not remember this producer gets all unaccepted messages once more.
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
    sent: bool = False  # at least once, to any hub
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
        self._renew_hello()
        super().on_link_up(now)

    def offer(self, key: str, size: int, checksum: int, body: Body) -> Parcel:
        parcel = Parcel(key, size, checksum, body)
        self.waiting.append(parcel)
        return parcel

    def withdraw(self, parcel: Parcel) -> None:
        """Forget a message that has not gone out; a message that has is accepted all the same."""
        if not parcel.sent:
            self.waiting.remove(parcel)

    def on_message(self, now: float, message: FromHub) -> None:
        if isinstance(message, Accepted):
            self._accepted(now, message)
            return
        if isinstance(message, Welcome):
            awaited, known_as = self.session.state == "greeting", self.session.session
            changed = self.session.on_message(now, message)
            self._welcome(message, changed or known_as not in (0, message.session), awaited)
        else:
            self._renew_hello()
            self.session.on_message(now, message)

    def on_timer(self, now: float) -> None:
        self._renew_hello()
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
            if self.session.fin_pending and self.idle:
                self.session.fin(now)
        return self.session.flush()

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.unaccepted

    def _renew_hello(self) -> None:
        self.session.renew_hello(self._next_seq)

    def _pump(self) -> None:
        credit = self.credit
        while self.waiting and credit.free_items and credit.sent_bytes < credit.limit_bytes:
            parcel = self.waiting.popleft()
            if not parcel.seq:
                parcel.seq = self._next_seq
                self._next_seq += 1
            parcel.sent = True
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

    def _welcome(self, message: Welcome, forgotten: bool, awaited: bool) -> None:
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
        self._next_seq = first_seq
        self.credit = SendCredit()
