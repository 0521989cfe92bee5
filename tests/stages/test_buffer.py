"""The order in which waiting groups are trained: what each order prefers, and what no order may do."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.import_path import ImportPathError
from stages.errors import BufferOrderError
from stages.train.buffer import GroupBuffer
from tests.stages.lease_rig import Held
from tests.stages.stage_rig import make_config, make_sample, make_slice

PARTS = "tests.stages.custom_parts"


def group(group_id: int, *rewards: float, version: int = 0, mask: Any = None) -> Held:
    members = [
        make_sample(i, reward=r, version=version, mask=mask) for i, r in enumerate(rewards or (float(group_id), 0.0))
    ]
    return Held(make_slice(group_id, *members))


def buffer(order: str = "oldest_first", *, eta: int = 2, fallback: bool = False, **sections: Any) -> GroupBuffer:
    filters = ("nonzero_std_fallback",) if fallback else ()
    return GroupBuffer(
        make_config(
            asynchrony={"buffer_order": order, "max_staleness": eta},
            filter={"dynamic_sampling_filter": filters},
            **sections,
        )
    )


def popped(one: GroupBuffer, step: int = 0, missing: int = 1) -> list[int]:
    found = []
    while (lease := one.pop(step, missing)) is not None:
        found.append(lease.message.group.group_id)
    return found


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("oldest_first", [1, 3, 4, 5]),
        ("ready_first", [5, 3, 4, 1]),
        ("priority", [5, 4, 3, 1]),  # the rewards of group g are g and 0
        (f"{PARTS}:newest_first", [5, 4, 3, 1]),
    ],
)
def test_each_order(order: str, expected: list[int]) -> None:
    one = buffer(order)
    for group_id in (5, 3, 4, 1):
        one.push(group(group_id))
    assert popped(one) == expected


def test_priority_breaks_ties_by_age() -> None:
    one = buffer("priority")
    for group_id in (9, 2, 5):
        one.push(group(group_id, 1.0, 0.0))
    assert popped(one) == [2, 5, 9]


def test_priority_takes_first_what_the_next_batch_could_no_longer_take() -> None:
    """Bound 2: at step 4 a token of version 2 has its last chance, one of version 3 has not."""
    one = buffer("priority", eta=2)
    one.push(group(0, 1.0, 0.0, version=3))
    one.push(group(7, 0.1, 0.0, version=2))
    one.push(group(6, 0.1, 0.0, version=2))
    one.push(group(8, 0.0, 0.0, version=0, mask=[0, 0, 0, 0]))  # nothing trained: no age, no signal
    assert popped(one, step=4) == [6, 7, 0, 8]


@settings(max_examples=60)
@given(st.integers(1, 4), st.integers(1, 3), st.lists(st.tuples(st.integers(0, 3), st.floats(0, 1)), max_size=24))
def test_priority_lets_no_group_grow_old_that_the_oldest_first_order_would_train(
    batch: int, eta: int, members: list[tuple[int, float]]
) -> None:
    """All groups are here; each step takes a batch. Versions are at most eta behind at the start."""

    def stale(order: str) -> int:
        one = buffer(order, eta=eta, rollout={"rollout_batch_size": batch})
        for group_id, (age, signal) in enumerate(sorted(members, key=lambda m: -m[0])):
            one.push(group(group_id, signal, 0.0, version=eta - min(age, eta)))
        lost, step = 0, eta
        while len(one):
            for missing in range(batch, 0, -1):
                one.pop(step, missing)
            step += 1
            lost += len(one.take_old(step))
        return lost

    assert stale("priority") == stale("oldest_first")


def test_what_is_too_old_is_taken_out_oldest_first_whatever_the_order() -> None:
    one = buffer("ready_first", eta=1)
    for group_id, version in ((4, 1), (3, 2), (2, 3), (1, 0)):
        one.push(group(group_id, version=version))
    assert [lease.message.group.group_id for lease in one.take_old(3)] == [1, 4]
    assert popped(one, step=3) == [3, 2]


def test_supervised_groups_have_no_age() -> None:
    one = buffer(eta=0, train={"loss_type": "sft_loss"})
    one.push(group(0, version=0))
    assert one.take_old(50) == []
    assert popped(one, step=50) == [0]


def test_a_spare_group_waits_for_better_ones() -> None:
    one = buffer(fallback=True)
    one.push(group(0, 1.0, 1.0))
    assert len(one) == 1
    assert not one.ready(2), "one spare does not fill a batch that lacks two"
    assert one.pop(0, 2) is None
    one.push(group(9, 1.0, 0.0))
    assert one.ready(2)
    assert popped(one, missing=1) == [9, 0], "the better one first, then the spare that fills the batch"


def test_spares_that_are_not_needed_are_given_up_with_their_reason() -> None:
    one = buffer(fallback=True)
    one.push(group(3, 1.0, 1.0))
    one.push(group(2, 0.0, 0.0))
    spares = [(lease.message.group.group_id, reason) for lease, reason in one.take_spares()]
    assert spares == [(2, "zero_std_0.0"), (3, "zero_std_1.0")]
    assert len(one) == 0


def test_without_the_fallback_no_group_is_spare() -> None:
    one = buffer()
    one.push(group(0, 1.0, 1.0))
    assert one.ready(5)


@pytest.mark.parametrize(
    ("order", "words"),
    [
        (f"{PARTS}:beyond_the_end", r"returned 1; it must return the index of one of the 1 waiting groups"),
        (f"{PARTS}:divide", r"raised TypeError: .*; it must return the index of one of the 1"),
    ],
)
def test_a_function_that_gives_no_index_is_named(order: str, words: str) -> None:
    one = buffer(order)
    one.push(group(0))
    with pytest.raises(BufferOrderError, match=words):
        one.pop(0, 1)


def test_a_function_that_does_not_exist_is_refused_at_once() -> None:
    with pytest.raises(ImportPathError, match="check the name"):
        buffer(f"{PARTS}:nowhere")


@settings(max_examples=100)
@given(
    st.sampled_from(["oldest_first", "ready_first", "priority", f"{PARTS}:newest_first"]),
    st.booleans(),
    st.lists(
        st.one_of(
            st.tuples(st.just("push"), st.integers(0, 4), st.booleans()),
            st.tuples(st.just("pop"), st.integers(0, 6), st.integers(1, 3)),
            st.tuples(st.just("clear"), st.integers(0, 6), st.booleans()),
        ),
        max_size=40,
    ),
)
def test_every_group_leaves_exactly_once(order: str, fallback: bool, events: list[tuple[str, int, int]]) -> None:
    one = buffer(order, eta=1, fallback=fallback)
    inside: set[int] = set()
    next_id = step = 0

    def left(group_id: int) -> None:
        inside.remove(group_id)  # KeyError: it was never here, or left before

    for kind, number, flag in events:
        if kind == "push":
            one.push(group(next_id, 1.0, 1.0 if flag else 0.0, version=number))
            inside.add(next_id)
            next_id += 1
        elif kind == "pop":
            before = len(one)
            ready = one.ready(int(flag))
            lease = one.pop(step, int(flag))
            assert (lease is not None) == ready
            assert len(one) == before - ready
            if lease is not None:
                left(lease.message.group.group_id)
        else:
            step = max(step, number)
            for lease in one.take_old(step):
                left(lease.message.group.group_id)
            for lease, _ in one.take_spares() if flag else []:
                left(lease.message.group.group_id)
        assert len(one) == len(inside)
    assert {lease.message.group.group_id for lease in one.take_all()} == inside
    assert len(one) == 0
