"""A topic as two pure machines: the server holds the newest value of each key, a client holds a copy.

Invariants: the topic is level-triggered, so a client that missed changes asks for a snapshot and skips the intermediate
values; revisions rise by one for each change of one server incarnation; a repeated publication of the same
client is stored once. Keys under `private` prefixes stay with the server: what only its own process reads (figures
that every replica publishes twice a second) must not cost a message to every client.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from transport import wire
from transport.core.custody import stage_of
from transport.core.session import PeerCore

Writers = Mapping[str, frozenset[str]]  # by key
ANYBODY: Writers = MappingProxyType({})
BEAT_S = 5.0
REMEMBERED_CLIENTS = 4096
decode_entries = msgspec.msgpack.Decoder(dict[str, bytes]).decode
encode_entries = msgspec.msgpack.Encoder().encode


class Entries:
    """Newest value of each key, and when each changed last.

    A dropped key keeps its revision: a task that waits for the key must learn that it is gone.
    """

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.revision = 0
        self._changed_at: OrderedDict[str, int] = OrderedDict()  # the newest change last

    def change(self, changes: Mapping[str, bytes | None]) -> None:
        """Put (or, with None, drop) keys: one revision for all of them."""
        self.revision += 1
        for key, value in changes.items():
            if value is None:
                self.values.pop(key, None)
            else:
                self.values[key] = value
            self._changed_at[key] = self.revision
            self._changed_at.move_to_end(key)

    def changed_since(self, revision: int, prefixes: tuple[str, ...]) -> bool:
        """Whether a key below one of the prefixes changed after `revision`; costs as much as changed since then."""
        for key, changed_at in reversed(self._changed_at.items()):
            if changed_at <= revision:
                return False
            if key.startswith(prefixes):
                return True
        return False


class TopicServerCore:
    def __init__(self, run_id: str, epoch: int, private: tuple[str, ...] = (), writers: Writers = ANYBODY) -> None:
        """`writers`: the stages whose replicas may write a key, and what stands below it after a slash; `name/` is of
        the latter alone. Any client may write other keys."""
        self.run_id, self.epoch = run_id, epoch
        self.private, self.writers = private, writers
        self.entries = Entries()
        self.shared_revision = 0  # of what clients see
        self.malformed = 0
        self.closing = False
        self.clients: dict[bytes, wire.Hello] = {}  # by route
        self._dismissed: set[str] = set()
        self._newest: OrderedDict[str, int] = OrderedDict()  # publications stored, by incarnation
        self._out: list[tuple[bytes, wire.FromTopic, wire.Body]] = []

    def publish(self, key: str, value: bytes | None) -> None:
        """Put a key or, with None, drop it."""
        self.entries.change({key: value})
        if key.startswith(self.private):
            return
        self.shared_revision += 1
        change = wire.TopicChange(self.epoch, self.shared_revision, key, value is None)
        self._out.extend((route, change, value) for route in self.clients)

    def drop(self, key: str) -> None:
        if key in self.entries.values:
            self.publish(key, None)

    def dismiss(self, replica: str) -> None:
        """A replica has ended for good: its keys (`.../<replica>`) go, and what it sent before is stored no more. A
        message may be on its way longer than its sender lives, and its key would stay."""
        self._dismissed.add(replica)
        for key in [key for key in self.entries.values if key.endswith(f"/{replica}")]:
            self.drop(key)

    def on_message(self, route: bytes, message: wire.ToTopic, body: bytes | None) -> None:
        if isinstance(message, wire.Hello):
            self._hello(route, message)
        elif isinstance(message, wire.Fin):
            self.on_unreachable(route)
            self._out.append((route, wire.FinAck(), None))
        elif (client := self.clients.get(route)) is None:
            self._out.append((route, wire.Who(), None))
        elif isinstance(message, wire.TopicPut):
            if (refusal := self._forbidden(client.replica, message.key)) is not None:
                self.malformed += 1
                self._out.append((route, wire.Refuse("refused", refusal), None))
                return
            if body is None:
                self.malformed += 1
                return
            if message.number > self._newest.get(client.incarnation, 0):
                self._remember(client.incarnation, message.number)
                if client.replica not in self._dismissed:
                    self.publish(message.key, body)
            self._ack(route, message.number)
        elif (message.epoch, message.revision) != (self.epoch, self.shared_revision):
            self._snapshot(route)
        else:
            self._ack(route, 0)

    def _forbidden(self, name: str, key: str) -> str | None:
        """Why the replica of this name may not write the key, or None."""
        first, slash, _ = key.partition("/")
        stages = self.writers.get(first + slash, self.writers.get(first))
        if stages is None or stage_of(name) in stages:
            return None
        writers = ", ".join(sorted(stages)) or "the controller"
        return f"{name!r} may not write {key[:100]!r} on the topic; only {writers} may"

    def on_unreachable(self, route: bytes) -> None:
        self.clients.pop(route, None)

    def flush(self) -> list[tuple[bytes, wire.FromTopic, wire.Body]]:
        out, self._out = self._out, []
        return out

    def _hello(self, route: bytes, hello: wire.Hello) -> None:
        if self.closing:
            return
        if hello.protocol != wire.PROTOCOL or hello.run_id != self.run_id:
            reason = (
                f"{hello.replica!r} is of run {hello.run_id!r}, protocol {hello.protocol}; this topic is of run "
                f"{self.run_id!r}, protocol {wire.PROTOCOL}; check the address and the version"
            )
            self._out.append((route, wire.Refuse("refused", reason), None))
            return
        self.clients[route] = hello
        self._snapshot(route)

    def _snapshot(self, route: bytes) -> None:
        shared = {key: value for key, value in self.entries.values.items() if not key.startswith(self.private)}
        self._out.append((route, wire.TopicSnapshot(self.epoch, self.shared_revision), encode_entries(shared)))

    def _ack(self, route: bytes, number: int) -> None:
        self._out.append((route, wire.TopicAck(self.epoch, number, self.shared_revision), None))

    def _remember(self, incarnation: str, number: int) -> None:
        self._newest[incarnation] = number
        self._newest.move_to_end(incarnation)
        if len(self._newest) > REMEMBERED_CLIENTS:
            self._newest.popitem(last=False)


class TopicClientCore(PeerCore):
    """The revision of `entries` is local: it rises whenever anything changed here, also across servers."""

    def __init__(self, hello: wire.Hello, *, give_up_s: float | None = None) -> None:
        super().__init__(hello, give_up_s)
        self.entries = Entries()
        self.waiting: deque[tuple[wire.TopicPut, bytes]] = deque()  # published here, not yet acknowledged
        self.stored: list[int] = []  # numbers of what was acknowledged: taken by the shell, which wakes the publishers
        self._number = 0
        self._server_revision = 0
        self._out: list[tuple[wire.ToTopic | wire.ToHub, wire.Body]] = []

    def publish(self, key: str, value: bytes) -> int:
        """Queue a publication; returns its number, which is acknowledged later."""
        self._number += 1
        put = wire.TopicPut(self._number, key)
        self.waiting.append((put, value))
        if self.session.state == "open":
            self._out.append((put, value))
        return self._number

    def on_message(self, now: float, message: wire.FromTopic, body: bytes | None) -> None:
        if isinstance(message, wire.TopicSnapshot):
            self._snapshot(now, message, body or b"")
        elif isinstance(message, wire.TopicChange):
            self.session.heard(now)
            self._change(now, message, body)
        elif isinstance(message, wire.TopicAck):
            self.session.heard(now)
            while self.waiting and self.waiting[0][0].number <= message.number:
                self.stored.append(self.waiting.popleft()[0].number)
        else:
            self.session.on_message(now, message)

    def flush(self, now: float) -> list[tuple[wire.ToTopic | wire.ToHub, wire.Body]]:
        if self.session.beat_due(now) and self.session.epoch is not None:
            self._out.append((wire.TopicPing(self.session.epoch, self._server_revision), None))
        out, self._out = [*self._out, *self.session.flush()], []
        return out

    def _snapshot(self, now: float, message: wire.TopicSnapshot, body: bytes) -> None:
        newcomer = self.session.state == "greeting"
        self.session.on_message(now, wire.Welcome(message.epoch, 0, 3 * BEAT_S, 0, 0, 0, 0, 0))
        try:
            entries = decode_entries(body)
        except (msgspec.MsgspecError, ValueError):
            return  # damaged: the next ping asks again
        held = self.entries.values
        changes = {key: entries.get(key) for key in {*entries, *held} if entries.get(key) != held.get(key)}
        if changes:
            self.entries.change(changes)
        self._server_revision = message.revision
        if newcomer:
            self._out.extend(self.waiting)
        if self.session.fin_pending:
            self.session.fin(now)

    def _change(self, now: float, message: wire.TopicChange, body: bytes | None) -> None:
        if message.epoch != self.session.epoch or message.revision <= self._server_revision:
            return
        if message.revision > self._server_revision + 1:
            self.session.beat_now(now)  # something was missed: the ping shows it, the answer is a snapshot
            return
        self._server_revision = message.revision
        self.entries.change({message.key: None if message.dropped else body or b""})
