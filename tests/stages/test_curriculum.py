"""The curriculum by pass rate: which visits it leaves out, that a resume repeats it, and that it starves nobody."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import DataConfig
from stages.prompts.ledger import Ledger, LedgerSnapshot
from stages.prompts.prompt_order import PassRateCurriculum, PromptOrder


def curriculum(
    n: int = 10, *, keep: float = 0.25, seed: int = 1, rates: dict[int, float] | None = None, shuffle: bool = True
) -> PassRateCurriculum:
    data = DataConfig(
        curriculum="pass_rate", curriculum_keep=keep, rollout_seed=seed, curriculum_low=0.2, curriculum_high=0.8
    )
    return PassRateCurriculum(data, PromptOrder(n, seed, shuffle), rates)


def test_switched_off_it_visits_every_position() -> None:
    off = PassRateCurriculum(DataConfig(), PromptOrder(4, 1, shuffle=True))
    off.observe(0, 0.0)
    assert [off.next_position(i) for i in range(9)] == list(range(9))
    assert off.rates == {}


@pytest.mark.parametrize("rate", [0.2, 0.5, 0.8])
def test_prompts_within_the_bounds_and_unknown_ones_are_always_asked(rate: float) -> None:
    one = curriculum(rates={0: rate}, keep=0.01)
    assert not any(one.skips(position) for position in range(500))


@pytest.mark.parametrize("rate", [0.0, 0.19, 0.81, 1.0])
def test_prompts_outside_are_asked_with_the_given_probability(rate: float) -> None:
    one = curriculum(n=1, rates={0: rate}, keep=0.25)
    asked = sum(not one.skips(position) for position in range(4000))
    assert 0.22 < asked / 4000 < 0.28


def test_pass_rates_are_averaged_with_more_weight_on_the_newest() -> None:
    one = curriculum()
    one.observe(3, 1.0)
    assert one.rates[3] == 1.0, "the first one is taken as it is"
    one.observe(3, 0.0)
    one.observe(3, None)
    assert one.rates[3] == 0.5
    one.observe(3, 0.0)
    assert one.rates[3] == 0.25


@given(st.integers(0, 2**40), st.floats(0.01, 1), st.dictionaries(st.integers(0, 9), st.floats(0, 1)))
@settings(max_examples=50)
def test_draws_repeat_after_a_resume_and_a_search_ends(seed: int, keep: float, rates: dict[int, float]) -> None:
    first, again = curriculum(seed=seed, keep=keep, rates=rates), curriculum(seed=seed, keep=keep, rates=rates)
    cursor = 0
    for _ in range(30):
        position = first.next_position(cursor)
        assert position == again.next_position(cursor)
        assert cursor <= position <= cursor + 10, "at most one epoch is passed over in a row"
        if position < cursor + 10:
            assert not first.skips(position)
        assert all(first.skips(p) for p in range(cursor, position))
        cursor = position + 1


def test_no_prompt_starves() -> None:
    """All prompts are too easy: each is still asked, now and then."""
    one = curriculum(n=20, keep=0.1, rates=dict.fromkeys(range(20), 1.0))
    order = PromptOrder(20, 1, shuffle=True)
    asked, cursor = set(), 0
    for _ in range(200):
        cursor = one.next_position(cursor)
        asked.add(order.index(cursor)[1])
        cursor += 1
    assert asked == set(range(20))


def test_the_ledger_counts_what_is_passed_over_and_a_snapshot_keeps_it() -> None:
    ledger = Ledger()
    for position in (0, 3, 4, 1):  # 1 is asked once more
        ledger.admit(position=position)
    assert (ledger.cursor, ledger.skipped) == (5, 2)
    kept = msgspec.structs.replace(ledger.snapshot(), pass_rates={7: 0.5})
    read = msgspec.json.decode(msgspec.json.encode(kept), type=LedgerSnapshot)
    assert read.pass_rates == {7: 0.5}
    assert Ledger(read).skipped == 2


def test_a_snapshot_of_an_earlier_run_has_no_pass_rates() -> None:
    old = b'{"next_group": 1, "cursor": 1, "counts": {}, "open": []}'
    read = msgspec.json.decode(old, type=LedgerSnapshot)
    assert (read.pass_rates, read.skipped) == ({}, 0)
