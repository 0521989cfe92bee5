"""Keyed streams: what belongs together is held by one consumer at a time, whoever dies, leaves or cannot be reached."""

from __future__ import annotations

from transport.core.hub import HubCore
from transport.spec import StreamSpec
from transport.wire import PROTOCOL, Drain, Fin, Hello, Put, Report, Work

EPOCH = 7
WINDOW = 100


class Stream:
    """A hub whose consumers only hold: they answer when a test says so."""

    def __init__(self, *consumers: str) -> None:
        self.hub = HubCore(StreamSpec("jobs", "here", routing="keyed", lease_s=10.0), "run", EPOCH, grace_s=1.0)
        self.held: dict[str, dict[str, int]] = {}  # consumer -> key -> item
        self.sent = 0
        self._hello("producer", "source")
        for name in consumers:
            self.join(name)

    def _hello(self, role: str, name: str) -> None:
        hello = Hello(PROTOCOL, "run", "jobs", role, name, name, "Job", "hash")  # type: ignore[arg-type]
        self.hub.on_message(0.0, name.encode(), hello)

    def join(self, name: str) -> None:
        self.held[name] = {}
        self._hello("consumer", name)
        session = self.hub.consumers[name].session
        self.hub.on_message(0.0, name.encode(), Report(EPOCH, session, 0, WINDOW, 1 << 20, (), (), (), None))
        self.flush()

    def flush(self, now: float = 0.0) -> None:
        for route, message, _ in self.hub.flush(now):
            if isinstance(message, Work):
                self.held[route.decode()][message.key] = message.id

    def put(self, *keys: str) -> None:
        for key in keys:
            self.sent += 1
            self.hub.on_message(0.0, b"source", Put(self.sent, key, 1, 0), b"x")
            self.flush()

    def lose(self, name: str) -> None:
        self.hub.peer_lost(name)
        self.held[name].clear()
        self.flush()

    def done(self, name: str, key: str) -> None:
        session = self.hub.consumers[name].session
        report = Report(EPOCH, session, 0, WINDOW, 1 << 20, (), (self.held[name].pop(key),))
        self.hub.on_message(0.0, name.encode(), report)
        self.flush()

    def holders(self, part: str) -> set[str]:
        return {name for name, held in self.held.items() if any(key.startswith(f"{part}/") for key in held)}


def spread(stream: Stream, groups: int = 20) -> dict[str, str]:
    """One item of each of many groups; who holds which."""
    for group in range(groups):
        stream.put(f"{group}/0")
    owners = {str(group): next(iter(stream.holders(str(group)))) for group in range(groups)}
    assert set(owners.values()) == set(stream.held), "each has a share"
    return owners


def test_who_holds_one_gets_the_others_also_when_more_consumers_come() -> None:
    stream = Stream("a", "b")
    owners = spread(stream)
    for name in "cdef":
        stream.join(name)
    for group, owner in owners.items():
        stream.put(f"{group}/1,2/1")
        assert stream.holders(group) == {owner}
    stream.put(*(f"{group}/0" for group in range(100, 160)))
    assert all(stream.held[name] for name in "cdef"), "new groups are shared with those that came later"


def test_what_a_lost_consumer_held_goes_to_one_other_together() -> None:
    stream = Stream("a", "b", "c")
    owners = spread(stream)
    for group in owners:
        stream.put(f"{group}/1")
    stream.lose("a")
    for group, owner in owners.items():
        stream.put(f"{group}/2")
        [now] = stream.holders(group)
        assert now != "a"
        assert owner in (now, "a")
        assert {f"{group}/{i}" for i in range(3)} <= stream.held[now].keys()


def test_a_consumer_that_leaves_gets_nothing_more_and_what_it_held_follows() -> None:
    stream = Stream("a", "b", "c")
    owners = spread(stream)
    stream.hub.on_message(0.0, b"a", Drain())
    for group in owners:
        stream.put(f"{group}/1")
        assert f"{group}/1" not in stream.held["a"]
    assert stream.hub.stats().queued == 0
    stream.hub.on_message(0.0, b"a", Fin())
    stream.held["a"].clear()
    stream.flush()
    assert all(len(stream.holders(group)) == 1 for group in owners)
    assert not stream.hub.dispatch.solitary


def test_what_belongs_to_a_consumer_with_a_broken_link_waits_for_it() -> None:
    stream = Stream("a", "b")
    owners = spread(stream)
    group = next(group for group, owner in owners.items() if owner == "a")
    stream.hub.on_unreachable(0.0, b"a")
    stream.put(f"{group}/1")
    assert stream.holders(group) == {"a"}
    assert stream.hub.stats().queued == 1
    stream.join("a")  # the same incarnation again, within its grace
    assert f"{group}/1" in stream.held["a"]


def test_a_suspect_is_run_where_the_others_of_its_group_are() -> None:
    group = next(group for group, owner in spread(Stream("a", "b")).items() if owner == "b")
    stream = Stream("a")
    stream.put("other/0", f"{group}/0")
    for _ in range(3):
        stream.lose("a")
        stream.join("a")
    stream.join("b")
    assert stream.held == {"a": {"other/0": 1}, "b": {}}, "both are suspects, and run alone one after the other"
    stream.put(f"{group}/1", "other/1")
    assert stream.held["b"].keys() == {f"{group}/1"}
    stream.done("a", "other/0")
    assert "other/1" in stream.held["a"]
    assert stream.held["b"].keys() == {f"{group}/1"}, "it is not empty, so that nothing is run alone there"
    stream.hub.on_timer(stream.hub.spec.lease_s - 0.001)
    stream.put(f"{group}/2")
    assert stream.held["b"].keys() == {f"{group}/1"}
    for peer in stream.hub.consumers.values():
        peer.silent_at = 100.0
    stream.hub.on_timer(stream.hub.spec.lease_s)
    stream.flush()
    assert stream.held["b"].keys() == {f"{group}/{i}" for i in range(3)}
