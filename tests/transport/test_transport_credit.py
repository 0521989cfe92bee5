"""Arithmetic of credit and duplicate detection, by properties."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from transport.core.session import Capacity, KeyMemory, ReceiveWindow, SendCredit, SeqWindow


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


@given(window=st.integers(1, 10), sizes=st.lists(st.integers(1, 100), max_size=30))
def test_all_credit_comes_back_when_all_is_finished(window: int, sizes: list[int]) -> None:
    receiver = ReceiveWindow(window, 1000)
    for number, size in enumerate(sizes, 1):
        receiver.see(number, sum(sizes[:number]))
        receiver.hold(size)
        receiver.release(size)
    assert receiver.limit_items == len(sizes) + window
    assert receiver.limit_bytes == sum(sizes) + 1000


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
    assert len(window) <= max(known, default=0) - len(known) + len(known)


def test_in_order_numbers_need_no_memory() -> None:
    window = SeqWindow()
    for number in range(1, 10_000):
        window.add(number)
    assert len(window) == 0
    assert window.low == 10_000


def test_key_memory_is_bounded_and_forgets_the_oldest() -> None:
    memory = KeyMemory(100)
    assert all(memory.add(str(number)) for number in range(1000))
    assert len(memory) <= 100
    assert not memory.add("999")
    assert not memory.add("950")
    assert memory.add("0")
    memory.forget("999")
    assert memory.add("999")
