"""The part of the protocol that producers, consumers and topic clients share: hello, beats, silence, goodbye."""

from __future__ import annotations

from typing import Literal

from msgspec import structs

from transport.core.custody import Body
from transport.wire import Fin, FinAck, FromHub, Hello, Refuse, ToHub, Welcome, Who

HELLO_RETRY_S = 1.0
FIN_RETRY_S = 0.3
BEAT_LIMIT_S = 5.0

State = Literal["new", "greeting", "open", "leaving", "left"]


class PeerCore:
    """Base of the protocol cores of all peers: each has a session, which has its timer."""

    def __init__(self, hello: Hello, give_up_s: float | None) -> None:
        self.session = Session(hello, give_up_s)

    def start(self, now: float) -> None:
        self.session.start(now)

    def on_link_up(self, now: float) -> None:
        self.session.say_hello(now)

    def on_timer(self, now: float) -> None:
        self.session.on_timer(now)

    def deadline(self) -> float | None:
        return self.session.deadline()


class Session:
    """One peer's relation to its hub, across reconnects and hub restarts."""

    def __init__(self, hello: Hello, give_up_s: float | None) -> None:
        self.hello = hello
        self.give_up_s = give_up_s
        self.state: State = "new"
        self.epoch: int | None = None
        self.lease_s = 0.0
        self.max_message_bytes = 0
        self.refusal: Refuse | None = None
        self.lost = False  # silent for longer than give_up_s
        self.out: list[tuple[ToHub, Body]] = []
        self._heard_at = 0.0
        self._beat_at = 0.0
        self._beat_due = False
        self.session = 0
        self.fin_pending = False  # the hub lost this peer during the goodbye: greet, report, say goodbye again
        self.blame = False

    @property
    def leaving(self) -> bool:
        return self.fin_pending or self.state in ("leaving", "left")

    def start(self, now: float) -> None:
        self._heard_at = now
        self.say_hello(now)

    def say_hello(self, now: float) -> None:
        """Introduce this peer: at the start, after a reconnect, and when the hub does not know it."""
        if self.state == "left":
            return
        self.fin_pending = self.fin_pending or self.state == "leaving"
        self.state = "greeting"
        self.out.append((self.hello, None))
        self._beat_at = now + self._interval(HELLO_RETRY_S)

    def renew_hello(self, low_seq: int) -> None:
        if low_seq != self.hello.low_seq:
            self.hello = structs.replace(self.hello, low_seq=low_seq)

    def heard(self, now: float) -> None:
        self._heard_at = now
        self.lost = False

    def on_message(self, now: float, message: FromHub) -> bool:
        """Take a message about the session itself. True: this is another incarnation of the hub."""
        self.heard(now)
        if isinstance(message, Welcome):
            changed = self.epoch is not None and self.epoch != message.epoch
            self.epoch = message.epoch
            self.session = message.session
            self.lease_s = message.lease_s
            self.max_message_bytes = message.max_message_bytes
            if self.state != "left":
                self.state = "open"
                self.beat_now(now)
            return changed
        if isinstance(message, Refuse):
            self.refusal = message
        elif isinstance(message, Who):
            self.say_hello(now)
        elif isinstance(message, Fin):  # the hub closes; all that was reported before is with it
            self.out.append((FinAck(), None))
            if self.leaving:
                self.state = "left"
            elif self.state == "open":  # another incarnation may come: greet it when it does
                self.state = "greeting"
                self._beat_at = now + self._interval(HELLO_RETRY_S)
        elif isinstance(message, FinAck) and self.state == "leaving":
            self.state = "left"
        return False

    def beat_now(self, now: float) -> None:
        if self.state == "open":
            self._beat_at = now
            self._beat_due = True

    def beat_due(self, now: float) -> bool:
        """Whether to beat in this flush; plans the next one."""
        if self.state != "open" or not self._beat_due:
            return False
        self._beat_due = False
        self._beat_at = now + self._interval(min(BEAT_LIMIT_S, self.lease_s / 3))
        return True

    def fin(self, now: float, *, blame: bool = False) -> None:
        if self.state == "new" or (self.state == "greeting" and self.epoch is None):
            self.state = "left"
        elif self.state == "greeting":  # between two connections: report and say goodbye once welcomed again
            self.fin_pending = True
            self.blame = blame
        elif self.state == "open":
            self.state = "leaving"
            self.fin_pending = False
            self.blame = blame
            self.out.append((Fin(blame), None))
            self._beat_at = now + FIN_RETRY_S

    def on_timer(self, now: float) -> None:
        if self.give_up_s is not None and now - self._heard_at >= self.give_up_s:
            self.lost = True
        if now < self._beat_at:
            return
        if self.state == "greeting":
            self.say_hello(now)
        elif self.state == "open":
            self._beat_due = True
        elif self.state == "leaving":
            self.out.append((Fin(self.blame), None))
            self._beat_at = now + FIN_RETRY_S

    def deadline(self) -> float | None:
        return None if self.state in ("new", "left") or self.refusal is not None else self._beat_at

    def flush(self) -> list[tuple[ToHub, Body]]:
        out, self.out = self.out, []
        return out

    def _interval(self, normal_s: float) -> float:
        return normal_s if self.give_up_s is None else min(normal_s, self.give_up_s / 3)
