"""The hub core and its counters: work that does not grow with the replicas, keyed streams, credit, duplicates."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.core.hub import CONFIRMED, HubCore
from transport.core.session import Capacity, KeyMemory, ReceiveWindow, SendCredit, SeqWindow
from transport.spec import Routing, StreamSpec
from transport.wire import PROTOCOL, Accepted, FromHub, Hello, Put, Refusal, Report, Settled, Work

EPOCH = 7
WINDOW = 100


class Stream:
    """A hub whose consumers only hold: they answer when a test says so."""

    def __init__(
        self, *consumers: str, routing: Routing = "keyed", window: int = WINDOW, sources: int = 1, **of_spec: int
    ) -> None:
        spec = StreamSpec("jobs", "here", routing=routing, lease_s=10.0, **of_spec)  # type: ignore[arg-type]
        self.hub = HubCore(spec, "run", EPOCH, grace_s=1.0)
        self.window = window
        self.held: dict[str, dict[str, int]] = {}  # consumer -> key -> item
        self.limits: dict[bytes, int] = {}  # of the sources
        self.sent = 0
        for number in range(sources):
            self._hello("producer", f"source-{number}")
        for name in consumers:
            self.join(name)

    def _hello(self, role: str, name: str) -> None:
        hello = Hello(PROTOCOL, "run", "jobs", role, name, name, "Job", "hash")  # type: ignore[arg-type]
        self.hub.on_message(0.0, name.encode(), hello)

    def join(self, name: str) -> None:
        self.held[name] = {}
        self._hello("consumer", name)
        self.report(name)

    def report(self, name: str, done: tuple[int, ...] = ()) -> None:
        session = self.hub.consumers[name].session
        self.hub.on_message(0.0, name.encode(), Report(EPOCH, session, 0, self.window, 1 << 20, (), done))
        self.flush()

    def flush(self, now: float = 0.0) -> None:
        for route, message, _ in self.hub.flush(now):
            if isinstance(message, Work):
                self.held[route.decode()][message.key] = message.id
            elif isinstance(message, Accepted):
                self.limits[route] = message.limit_items

    def put(self, *keys: str, source: int = 0) -> None:
        for key in keys:
            self.sent += 1
            self.hub.on_message(0.0, f"source-{source}".encode(), Put(self.sent, key, 1, 0), b"x")
            self.flush()

    def lose(self, name: str) -> None:
        self.hub.peer_lost(name)
        self.held[name].clear()
        self.flush()

    def done(self, name: str, *keys: str) -> None:
        self.report(name, tuple(self.held[name].pop(key) for key in keys))


@pytest.mark.parametrize("replicas", [1, 32])
def test_a_message_is_work_for_its_own_peers_only(replicas: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(*(f"c{number}" for number in range(replicas)), sources=replicas)
    looks: list[str] = []

    def watch(method: str) -> None:
        original = getattr(HubCore, method)
        monkeypatch.setattr(HubCore, method, lambda hub, peer: (looks.append(peer.replica), original(hub, peer)))

    watch("_grant")
    watch("_confirm")
    stream.hub.on_message(1.0, b"source-0", Put(1, "k", 3, 0), b"abc")
    accepted, delivered = stream.hub.flush(1.0)
    assert isinstance(accepted.message, Accepted)
    assert accepted.message.seqs == (1,)
    assert isinstance(delivered.message, Work)
    taker = delivered.route.decode()
    session = stream.hub.consumers[taker].session
    done = Report(EPOCH, session, 1, WINDOW + 1, 1 << 20, (), (delivered.message.id,))
    stream.hub.on_message(1.0, delivered.route, done)
    assert stream.hub.flush(1.0) == []
    assert looks == ["source-0", taker], "nobody else was heard of, nobody else is looked at"


def test_what_is_done_is_confirmed_many_at_a_time_and_what_is_refused_at_once() -> None:
    stream = Stream("a", capacity_items=2 * CONFIRMED, window=2 * CONFIRMED)
    stream.put(*map(str, range(CONFIRMED + 1)))
    *items, last = stream.held["a"].values()

    def report(*done: int, refused: tuple[Refusal, ...] = (), held: tuple[int, ...] | None = None) -> list[FromHub]:
        peer = stream.hub.consumers["a"]
        message = Report(EPOCH, peer.session, 0, stream.window, 1 << 20, (), done, refused, held)
        stream.hub.on_message(1.0, b"a", message)
        return [send.message for send in stream.hub.flush(1.0) if isinstance(send.message, Settled)]

    for item in items[:-1]:
        assert report(item) == [], "nothing waits for it"
    [many] = report(items[-1])
    assert many.ids == tuple(items)
    assert report(last) == []
    [answer] = report(last, held=())
    assert answer.ids == (last,), "a beat repeats it, is answered, and it counts once"
    assert (stream.hub.stats().settled, stream.hub.stats().duplicates) == (CONFIRMED + 1, 0)
    stream.put("more")
    more = stream.held["a"]["more"]
    [refused] = report(refused=(Refusal(more, 1, "poison", "bad"),))
    assert refused.ids == (more,)


def test_a_producer_that_waits_for_room_hears_of_it_when_others_make_it() -> None:
    stream = Stream(sources=2, window=4, capacity_items=8)
    stream.put(*map(str, range(8)))
    assert stream.limits[b"source-0"] == 8, "the hub is full"
    stream.put("other", source=1)
    assert stream.hub.flush(1.0) == []
    stream.join("a")
    assert len(stream.held["a"]) == 4
    stream.done("a", *stream.held["a"])
    assert stream.limits[b"source-0"] == 9


def test_a_suspect_is_run_where_the_others_of_its_group_are() -> None:
    both = Stream("a", "b")
    both.put(*(f"{group}/0" for group in range(20)))
    assert both.held["a"], "each has a share"
    group = next(key.partition("/")[0] for key in both.held["b"])
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


def test_turns_of_a_rollout_meet_one_consumer_until_it_is_lost() -> None:
    stream = Stream("a", "b", routing="sticky")
    rollouts = [f"{group}/{index}" for group in range(5) for index in range(3)]  # odd: in turns they would change
    owners: dict[str, set[str]] = {rollout: set() for rollout in rollouts}
    for turn in range(5):
        for rollout in rollouts:
            stream.put(key := f"{rollout}/{turn}")
            [name] = [name for name, held in stream.held.items() if key in held]
            owners[rollout].add(name)
            stream.done(name, key)
    assert all(len(names) == 1 for names in owners.values())
    assert any(len(set.union(*(owners[f"{group}/{index}"] for index in range(3)))) == 2 for group in range(5))
    stream.put(*(f"{rollout}/5" for rollout in rollouts))
    assert stream.held["a"]
    stream.lose("a")
    stream.put(*(f"{rollout}/6" for rollout in rollouts))
    assert stream.held["b"].keys() == {f"{rollout}/{turn}" for rollout in rollouts for turn in (5, 6)}


def test_a_full_consumer_is_passed_over() -> None:
    stream = Stream("a", "b", routing="sticky", window=3)
    stream.put(*(f"1/1/{turn}" for turn in range(6)))
    assert [len(held) for held in stream.held.values()] == [3, 3]


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 10**6)), min_size=1), st.randoms(use_true_random=False))
def test_grants_commute_and_repeat_without_harm(grants: list[tuple[int, int]], rng: random.Random) -> None:
    one, other = SendCredit(), SendCredit()
    for items, size in grants:
        one.grant(items, size)
    shuffled = grants + grants[: len(grants) // 2]
    rng.shuffle(shuffled)
    for items, size in shuffled:
        other.grant(items, size)
    assert one == other


@given(
    window_items=st.integers(1, 8),
    window_bytes=st.integers(1, 2000),
    steps=st.lists(st.tuples(st.sampled_from("sldrg"), st.integers(1, 1500)), max_size=200),
)
def test_a_window_is_never_exceeded_whatever_is_lost(
    window_items: int, window_bytes: int, steps: list[tuple[str, int]]
) -> None:
    """s send and receive, l send and lose, d finish one, g grant, r repeat an old grant."""
    sender, receiver = SendCredit(), ReceiveWindow(window_items, window_bytes)
    sender.grant(receiver.limit_items, receiver.limit_bytes)
    held: list[int] = []
    old = (receiver.limit_items, receiver.limit_bytes)
    for step, size in steps:
        if step in "sl" and sender.fits(size, alone=not held and step == "s"):
            sender.use(size)
            if step == "s":
                receiver.see(sender.sent_items, sender.sent_bytes)
                receiver.hold(size)
                held.append(size)
        elif step == "d" and held:
            receiver.release(held.pop())
        elif step == "g":
            sender.grant(receiver.limit_items, receiver.limit_bytes)
            old = (receiver.limit_items, receiver.limit_bytes)
        elif step == "r":
            sender.grant(*old)
        assert len(held) <= window_items
        assert sum(held) <= window_bytes or len(held) == 1
        assert (receiver.held_items, receiver.held_bytes) == (len(held), sum(held))
    receiver.see(sender.sent_items, sender.sent_bytes)
    for size in held:
        receiver.release(size)
    all_of_it = (sender.sent_items + window_items, sender.sent_bytes + window_bytes)
    assert (receiver.limit_items, receiver.limit_bytes) == all_of_it, "all credit comes back when all is finished"


@given(items=st.integers(1, 10**6), size=st.integers(1, 1 << 40), held=st.integers(0, 2 * 10**6))
def test_a_hub_grants_exactly_while_it_has_room(items: int, size: int, held: int) -> None:
    capacity = Capacity(items, size)
    assert (capacity.unused_items(held) > 0) == (held < items)
    assert (capacity.unused_bytes(held) > 0) == (held < size)
    assert capacity.unused_items(held) <= capacity.base_items <= max(1, items // 8)


@given(st.lists(st.integers(1, 60)))
def test_sequence_windows_know_exactly_what_was_added(numbers: list[int]) -> None:
    window, known = SeqWindow(), set[int]()
    for number in numbers:
        assert (number in window) == (number in known)
        if number not in window:
            window.add(number)
            known.add(number)
    assert all((number in window) == (number in known) for number in range(1, 62))
    assert window.low == min(set(range(1, 62)) - known)
    assert len(window) == sum(number > window.low for number in known), "numbers in order need no memory"


def test_key_memory_is_bounded_and_forgets_the_oldest() -> None:
    memory = KeyMemory(100)
    assert all(memory.add(str(number)) for number in range(1000))
    assert len(memory) <= 100
    assert not memory.add("999")
    assert not memory.add("950")
    assert memory.add("0")
    memory.forget("999")
    assert memory.add("999")
