"""The ledger (I1) and the staleness gate (I2) under random schedules."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.prompts.ledger import OUTCOMES, Ledger, LedgerError
from stages.staleness_gate import StalenessGate, over_sampling
from tests.stages.prompt_rig import balanced
from tests.stages.stage_rig import make_config


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
        assert balanced(ledger)
        assert sum(ledger.counts.values()) == len(terminal)
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
    assert balanced(ledger)


FILTER = {"dynamic_sampling_filter": ("nonzero_std",)}


@pytest.mark.parametrize(
    ("filters", "loss", "extra"),
    [
        ({}, "policy_loss", 0),
        ({"over_sampling_batch_size": 48}, "policy_loss", 0),  # without a filter nothing is dropped
        (FILTER, "policy_loss", 0),
        ({**FILTER, "over_sampling_batch_size": 48}, "policy_loss", 16),
        ({**FILTER, "over_sampling_batch_size": 20}, "policy_loss", 0),
        ({"dynamic_sampling_filter_path": "a:b", "over_sampling_batch_size": 33}, "policy_loss", 1),
        ({**FILTER, "over_sampling_batch_size": 48}, "sft_loss", 0),
    ],
)
def test_over_sampling_widens_the_gate_only_while_a_filter_is_on(
    filters: dict[str, object], loss: str, extra: int
) -> None:
    config = make_config(
        filter=filters,
        train={"loss_type": loss},
        rollout={"rollout_batch_size": 32, "num_rollout": 9},
        asynchrony={"max_staleness": 2},
    )
    assert over_sampling(config) == extra
    assert StalenessGate.of(config) == StalenessGate(32, 2, 9, extra, ages=loss != "sft_loss")
    assert StalenessGate.of(config).most_open == 96 + extra


def test_over_sampling_asks_for_nothing_that_no_batch_needs() -> None:
    gate = StalenessGate(batch=8, max_staleness=0, total=2, extra=4)
    assert gate.capacity(version=0, trained=0, open_groups=0) == 12
    assert gate.capacity(version=0, trained=0, open_groups=12) == 0
    assert gate.capacity(version=0, trained=8, open_groups=4) == 0, "born old: the next weights have not landed"
    assert gate.capacity(version=1, trained=8, open_groups=4) == 8, "at least a whole batch besides the leftovers"
    assert gate.capacity(version=2, trained=16, open_groups=0) == 0, "the run is trained"


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 2**32), st.integers(1, 5), st.integers(0, 3), st.integers(0, 12), st.floats(0, 0.8), st.booleans()
)
def test_over_sampled_runs_never_train_beyond_the_bound_and_never_stall(
    seed: int, batch: int, eta: int, extra: int, dropped: float, newest_first: bool
) -> None:
    """Filters drop a share of the groups; whatever order the trainer takes, what is too old is refused and replaced."""
    rng = random.Random(seed)
    gate, ledger = StalenessGate(batch, eta, total=8, extra=extra), Ledger()
    landed = step = 0
    in_flight: list[tuple[int, int, int]] = []  # (ready at, group, version at start)
    ready: list[tuple[int, int]] = []
    taken: list[int] = []
    publications: list[tuple[int, int]] = []
    for clock in range(6000):
        landed = max([landed, *(v for at, v in publications if at <= clock)])
        while gate.capacity(version=landed, trained=ledger.trained, open_groups=ledger.open) > 0:
            group = ledger.admit(position=ledger.cursor)
            in_flight.append((clock + rng.randint(1, 12), group.group_id, landed))
        assert ledger.open <= gate.most_open
        for _, group_id, version in [entry for entry in in_flight if entry[0] <= clock]:
            if rng.random() < dropped:
                ledger.settle(group_id, "filtered")
            else:
                ready.append((group_id, version))
        in_flight = [entry for entry in in_flight if entry[0] > clock]
        ready.sort(reverse=newest_first)
        while ready and len(taken) < batch:
            group_id, version = ready.pop(0)
            if gate.fresh(step=step, oldest_version=version):
                assert step - version <= eta
                taken.append(group_id)
            else:
                ledger.settle(group_id, "discarded" if eta == 0 else "stale")
        if len(taken) == batch:
            for group_id in taken:
                ledger.settle(group_id, "trained")
            taken, step = [], step + 1
            publications.append((clock + rng.randint(1, 6), step))
            for entry in [e for e in ready if not gate.fresh(step=step, oldest_version=e[1])]:
                ready.remove(entry)
                ledger.settle(entry[0], "discarded" if eta == 0 else "stale")
        if step == 8:
            break
    assert step == 8, "the run must not stall"
    assert ledger.trained == 8 * batch
    assert balanced(ledger)
    if eta == 0:
        assert ledger.counts["stale"] == 0
