"""The ledger (I1) and the staleness gate (I2) under random schedules."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.gate import StalenessGate
from stages.ledger import OUTCOMES, Ledger, LedgerError


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40), st.sampled_from(OUTCOMES)), max_size=200))
def test_admitted_is_settled_plus_open_after_every_call(events: list[tuple[bool, int, str]]) -> None:
    ledger = Ledger()
    terminal: dict[int, str] = {}
    for admit, target, outcome in events:
        if admit or ledger.next_group == 0:
            group = ledger.admit(position=ledger.cursor)
            assert group.group_id not in terminal
        else:
            group_id = target % ledger.next_group
            before = dict(ledger.counts)
            settled = ledger.settle(group_id, outcome)  # type: ignore[arg-type]
            assert (settled is None) == (group_id in terminal)
            if settled is None:
                assert ledger.counts == before, "a second settlement must change nothing"
            terminal.setdefault(group_id, outcome)
        assert ledger.balanced()
        assert ledger.settled == len(terminal)
    assert {o: n for o, n in ledger.counts.items() if n} == {
        o: n for o in OUTCOMES if (n := sum(v == o for v in terminal.values()))
    }


def test_settling_an_unknown_group_is_an_error() -> None:
    ledger = Ledger()
    ledger.admit(position=0)
    with pytest.raises(LedgerError, match="group 7 was settled as trained but never admitted"):
        ledger.settle(7, "trained")


def test_a_snapshot_continues_exactly() -> None:
    ledger = Ledger()
    for position in range(6):
        ledger.admit(position=position)
    ledger.settle(1, "trained", tokens=10)
    ledger.settle(4, "filtered", tokens=3)
    ledger.settle(4, "filtered")
    again = Ledger(ledger.snapshot())
    assert again.snapshot() == ledger.snapshot()
    assert [g.group_id for g in again.open_groups()] == [0, 2, 3, 5]
    assert again.admit(position=again.cursor).group_id == 6
    assert again.settle(1, "stale") is None, "what was settled before the snapshot stays settled"


@pytest.mark.parametrize(
    ("version", "trained", "open_groups", "capacity"),
    [(0, 0, 0, 96), (0, 0, 96, 0), (0, 32, 64, 0), (1, 32, 64, 32), (1, 32, 96, 0), (3, 96, 10, 86)],
)
def test_capacity_follows_the_formula(version: int, trained: int, open_groups: int, capacity: int) -> None:
    gate = StalenessGate(batch=32, max_staleness=2)
    assert gate.capacity(version=version, trained=trained, open_groups=open_groups) == capacity


def test_sync_admits_one_batch_per_version_and_never_beyond_the_end() -> None:
    gate = StalenessGate(batch=8, max_staleness=0, total=2)
    assert gate.capacity(version=0, trained=0, open_groups=0) == 8
    assert gate.capacity(version=0, trained=8, open_groups=0) == 0, "the next batch waits for the weights to land"
    assert gate.capacity(version=1, trained=8, open_groups=0) == 8
    assert gate.capacity(version=2, trained=16, open_groups=0) == 0


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(0, 4), st.integers(1, 3))
def test_simulated_runs_never_train_beyond_the_bound(seed: int, batch: int, eta: int, interval: int) -> None:
    """Groups take random times; the trainer takes oldest first, refuses what is too old; weights land late."""
    rng = random.Random(seed)
    eta = max(eta, interval - 1)  # a smaller bound than the interval could never be met
    gate, ledger = StalenessGate(batch, eta, total=12), Ledger()
    landed = step = 0
    in_flight: list[tuple[int, int, int]] = []  # (ready at, group, version at start)
    ready: list[tuple[int, int]] = []
    taken: list[int] = []
    publications: list[tuple[int, int]] = []
    stale = 0
    for clock in range(4000):
        landed = max([landed, *(v for at, v in publications if at <= clock)])
        while gate.capacity(version=landed, trained=ledger.trained, open_groups=ledger.open) > 0:
            group = ledger.admit(position=ledger.cursor)
            in_flight.append((clock + rng.randint(1, 12), group.group_id, landed))
        ready += [(g, v) for at, g, v in in_flight if at <= clock]
        in_flight = [entry for entry in in_flight if entry[0] > clock]
        ready.sort()
        while ready and len(taken) < batch:
            group_id, version = ready.pop(0)
            if gate.fresh(step=step, oldest_version=version):
                assert step - version <= eta
                taken.append(group_id)
            else:
                stale += 1
                ledger.settle(group_id, "stale")
        assert ledger.open <= gate.most_open + batch * interval
        if len(taken) == batch:
            for group_id in taken:
                ledger.settle(group_id, "trained")
            taken, step = [], step + 1
            if step % interval == 0 or step == 12:
                publications.append((clock + rng.randint(1, 6), step))
        if step == 12:
            break
    assert step == 12, "the run must not stall"
    assert ledger.trained == 12 * batch
    assert ledger.balanced()
