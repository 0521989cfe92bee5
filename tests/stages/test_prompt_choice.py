"""Which prompts are sampled, and how many: curriculum, over-sampling, and settings that change during a run."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import Config, DataConfig, FilterConfig
from stages.errors import NoVerdicts
from stages.messages import CheckpointReady, EvalDone, Outcome, Settled, StepDone
from stages.prompts.ledger import OUTCOMES, Ledger, LedgerError, LedgerSnapshot
from stages.prompts.prompt_sources import PassRateCurriculum, PromptOrder
from stages.staleness_gate import StalenessGate, over_sampling
from stages.topic_values import MOST_KEPT, SETTINGS, Settings, newest_settings, settings_at, write_settings
from tests.stages.prompt_rig import PromptDesk, Rows, balanced, prompting, step_done
from tests.stages.stage_rig import Rig, ended_by, idle, make_config, make_sample, make_slice, open_desk, take, until
from tests.stages.train_rig import Training


def curriculum(
    n: int = 10, *, keep: float = 0.25, seed: int = 1, rates: dict[int, float] | None = None, shuffle: bool = True
) -> PassRateCurriculum:
    data = DataConfig(
        curriculum="pass_rate", curriculum_keep=keep, rollout_seed=seed, curriculum_low=0.2, curriculum_high=0.8
    )
    return PassRateCurriculum(data, PromptOrder(n, seed, shuffle), rates)


@pytest.mark.parametrize("rate", [0.2, 0.5, 0.8])
def test_prompts_within_the_bounds_and_unknown_ones_are_always_asked(rate: float) -> None:
    one = curriculum(rates={0: rate}, keep=0.01)
    assert not any(one.skips(position) for position in range(500))


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


CURRICULUM = make_config(
    data={"curriculum": "pass_rate", "curriculum_keep": 0.01, "rollout_seed": 3, "rollout_shuffle": False}
)


async def asked(one: PromptDesk) -> list[tuple[int, int]]:
    """(group, prompt) of what came out since the last call."""
    await idle()
    stats = one.rig.hubs["generate"].stats()
    found = [await take(one.groups) for _ in range(stats.queued + stats.leased)]
    return [(group.group_id, group.prompt_index) for group in found]


def rated(step: int, *groups: tuple[int, float]) -> StepDone:
    done = step_done(step, *(group_id for group_id, _ in groups))
    return msgspec.structs.replace(done, pass_rates=dict(groups))


async def test_prompts_outside_the_bounds_are_passed_over_in_the_next_epoch() -> None:
    """A resumed run knows the pass rates, and asks the same."""
    async with prompting(batch=4, eta=0, config=CURRICULUM, prompts=Rows(n=4)) as one:
        await one.land(0)
        assert await asked(one) == [(0, 0), (1, 1), (2, 2), (3, 3)]
        filtered = Settled(3, "filtered", "too_long", pass_rate=0.5)
        await one.report(rated(1, (0, 1.0), (1, 0.5), (2, 0.0)), filtered, CheckpointReady(1, 1, "draft"))
        assert one.stage.curriculum.rates == {0: 1.0, 1: 0.5, 2: 0.0, 3: 0.5}
        await one.land(1)
        after = await asked(one)
        assert len(after) == 5, "a batch, and the place of the filtered one"
        assert {prompt for _, prompt in after} == {1, 3}, "with 1 % the solved and the hopeless one are not asked here"
        assert one.stage.ledger.skipped > 0
        assert balanced(one.stage.ledger)
        snapshot = one.hooks.commits[0][1]
    async with prompting(batch=4, eta=0, config=CURRICULUM, prompts=Rows(n=4), snapshot=snapshot) as again:
        await again.land(1)
        assert await asked(again) == after


async def test_a_curriculum_without_verdicts_is_reported_at_the_first_batch() -> None:
    with ended_by(NoVerdicts, "--curriculum pass_rate needs a grader .* no response of batch 1 has a verdict"):
        async with prompting(batch=1, eta=0, config=CURRICULUM) as one:
            await one.land(0)
            await one.report(step_done(1, 0))


async def test_leftovers_of_the_last_batch_do_not_cut_off_its_evaluation() -> None:
    async with prompting(batch=1, eta=0, total=1) as one:
        one.stage.gate = StalenessGate(1, 0, 1, extra=1)
        await one.land(0)
        assert await asked(one) == [(0, 0), (1, 1)]
        await one.report(step_done(0, pinned=True), step_done(1, 0, pinned=True), EvalDone(0, {}, True))
        assert one.rig.topic.get("drain") is None, "engines still answer the evaluation of version 1"
        await one.report(EvalDone(1, {"eval/x": 0.5}, True))
        assert [report.version for report in one.hooks.evaluations] == [0, 1]
        assert one.rig.topic.get("drain") == b"all rollout batches are trained"
        await one.report(Settled(1, "discarded", "all rollout batches are trained"))
        assert one.stage.completed.is_set()


def change(from_step: int, *, bound: int = 1, lr_scale: float = 1.0, filters: tuple[str, ...] = ()) -> Settings:
    return Settings(from_step, bound, lr_scale, filters)


async def test_for_a_batch_the_newest_change_counts_whose_step_has_come(rig: Rig) -> None:
    assert settings_at(rig.topic, 100) is None
    history = tuple(change(step, bound=step) for step in range(1, 3 * MOST_KEPT))
    rig.topic.publish(SETTINGS, write_settings((*history, change(60, bound=7))))
    assert settings_at(rig.topic, 40) == change(40, bound=40)
    assert settings_at(rig.topic, 59) == history[-1]
    assert settings_at(rig.topic, 60) == newest_settings(rig.topic) == change(60, bound=7)


async def test_the_trainer_takes_a_change_with_the_batch_that_it_names(training: Training) -> None:
    """Batch 3 (the weights are of version 2) takes a token of version 0 by the bound 2, and would not by 1."""
    async with training(batch=1, total=4, eta=1, hold=["begin"]) as one:
        await one.rig.topic.wait(0, "weights")
        changes = (change(3, bound=2, lr_scale=0.5), change(4, bound=2))
        one.rig.topic.publish(SETTINGS, write_settings(changes))
        await one.rig.topic_until(lambda: settings_at(one.rig.topic, 4) is not None)
        one.backend.begin.set()
        await one.send(*map(make_slice, range(5)))
        assert [(await one.report(StepDone)).groups for _ in range(3)] == [(0,), (1,), (2,)]
        assert (await one.report(Settled)).outcome == "stale", "for batch 4 it would be three versions old"
        await until(lambda: one.backend.scales == [1.0, 1.0, 0.5, 1.0])


async def test_admission_follows_the_bound_when_its_batch_has_come() -> None:
    async with prompting(batch=2, eta=0) as one:
        assert await one.admitted_at(0) == [0, 1]
        one.stage.bound(2, 3)
        assert await one.admitted() == []
        await one.report(step_done(0), step_done(1, 0, 1))
        assert await one.admitted_at(1) == [2, 3], "batch 2 is the last one under the old bound"
        await one.report(step_done(2, 2, 3))
        assert await one.admitted() == [4, 5, 6, 7], "version 1, two ahead and its own"
        one.stage.bound(0, 3)
        assert await one.admitted_at(2) == [], "what is out is more than the lower bound would admit"


async def test_a_paused_stage_admits_nothing_and_settles_what_is_out() -> None:
    async with prompting(batch=2, eta=0) as one:
        assert await one.admitted_at(0) == [0, 1]
        one.stage.pause(True)
        await one.report(Settled(0, "filtered", "", tokens=1))
        assert await one.admitted() == []
        assert one.stage.ledger.open == 1
        one.stage.pause(False)
        assert await one.admitted() == [2]
        one.stage.pause(True)
        one.stage.drain("enough")
        await one.report(Settled(1, "discarded"), Settled(2, "discarded"), step_done(0))
        await until(one.stage.completed.is_set)


async def test_groups_meet_the_thresholds_that_were_changed_last() -> None:
    config = Config(filter=FilterConfig(dynamic_sampling_filter=("reward:0.0_0.4",)))
    async with open_desk(config) as one:
        slices = [make_slice(i, make_sample(0, reward=0.6), make_sample(1, reward=0.4)) for i in range(2)]
        await one.send(slices[0])
        assert (await take(one.settled)).detail == "reward_high"
        one.rig.topic.publish(SETTINGS, write_settings((change(9, filters=("reward:0.0_0.5",)),)))
        await until(lambda: one.stage._names == ("reward:0.0_0.5",))
        await one.send(slices[1])
        assert (await take(one.out)).group.group_id == 1


# The ledger (I1) and the staleness gate (I2) under random schedules.


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
    ("gate", "version", "trained", "open_groups", "capacity"),
    [
        (StalenessGate(batch=32, max_staleness=2), 0, 0, 0, 96),
        (StalenessGate(batch=32, max_staleness=2), 0, 0, 96, 0),
        (StalenessGate(batch=32, max_staleness=2), 0, 32, 64, 0),
        (StalenessGate(batch=32, max_staleness=2), 1, 32, 64, 32),
        (StalenessGate(batch=32, max_staleness=2), 1, 32, 96, 0),
        (StalenessGate(batch=32, max_staleness=2), 3, 96, 10, 86),
        (StalenessGate(batch=8, max_staleness=0, total=2), 0, 0, 0, 8),
        (StalenessGate(batch=8, max_staleness=0, total=2), 0, 8, 0, 0),  # until weights land
        (StalenessGate(batch=8, max_staleness=0, total=2), 1, 8, 0, 8),
        (StalenessGate(batch=8, max_staleness=0, total=2), 2, 16, 0, 0),  # never beyond the end
    ],
)
def test_capacity_follows_the_formula(
    gate: StalenessGate, version: int, trained: int, open_groups: int, capacity: int
) -> None:
    assert gate.capacity(version=version, trained=trained, open_groups=open_groups) == capacity


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


@settings(max_examples=140, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    batch=st.integers(1, 5),
    eta=st.integers(0, 4),
    interval=st.integers(1, 3),
    extra=st.integers(0, 12),
    dropped=st.floats(0, 0.8),
    newest_first=st.booleans(),
)
def test_simulated_runs_never_train_beyond_the_bound_and_never_stall(
    seed: int, batch: int, eta: int, interval: int, extra: int, dropped: float, newest_first: bool
) -> None:
    """Groups take random times, filters drop a share, weights land late. Too old groups are refused and replaced."""
    rng, total = random.Random(seed), 8
    eta = max(eta, interval - 1)  # a smaller bound than the interval could never be met
    gate, ledger = StalenessGate(batch, eta, total=total, extra=extra), Ledger()
    landed = step = 0
    in_flight: list[tuple[int, int, int]] = []  # (ready at, group, version at start)
    ready: list[tuple[int, int]] = []
    taken: list[int] = []
    publications: list[tuple[int, int]] = []
    refused: Outcome = "discarded" if eta == 0 else "stale"
    for clock in range(6000):
        landed = max([landed, *(v for at, v in publications if at <= clock)])
        while gate.capacity(version=landed, trained=ledger.trained, open_groups=ledger.open) > 0:
            group = ledger.admit(position=ledger.cursor)
            in_flight.append((clock + rng.randint(1, 12), group.group_id, landed))
        assert ledger.open <= gate.most_open + (batch * interval if interval > 1 else 0)
        for _, group_id, version in [entry for entry in in_flight if entry[0] <= clock]:
            if rng.random() < dropped:
                ledger.settle(group_id, "filtered")
            else:
                ready.append((group_id, version))
        in_flight = [entry for entry in in_flight if entry[0] > clock]
        ready.sort(reverse=newest_first)
        while ready and len(taken) < batch:
            group_id, version = ready.pop(0)
            if gate.fresh(step=step, version=version):
                assert step - version <= eta
                taken.append(group_id)
            else:
                ledger.settle(group_id, refused)
        if len(taken) == batch:
            for group_id in taken:
                ledger.settle(group_id, "trained")
            taken, step = [], step + 1
            if step % interval == 0 or step == total:
                publications.append((clock + rng.randint(1, 6), step))
            for entry in [e for e in ready if not gate.fresh(step=step, version=e[1])]:
                ready.remove(entry)
                ledger.settle(entry[0], refused)
        if step == total:
            break
    assert step == total, "the run must not stall"
    assert ledger.trained == total * batch
    assert balanced(ledger)
