"""Batches of the trainer: sequences and metrics against golden numbers, and the order of waiting groups."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.errors import UnknownAlgorithm
from models.import_path import ImportPathError
from models.train.interface import TrainSequence
from stages.errors import BufferOrderError, UntrainableGroup
from stages.messages import RolloutSlice, Sample, Settled, StepDone, TurnReward
from stages.train.batch import Batch, slice_sequences
from stages.train.batch_metrics import length_bucket, quantile
from stages.train.held_groups import GroupBuffer
from tests.stages.stage_rig import Held, make_config, make_graded, make_sample, make_slice
from tests.stages.train_rig import Training

PARTS = "tests.stages.custom_parts"


def sequences(slice_: RolloutSlice, **sections: Any) -> list[TrainSequence]:
    return slice_sequences(make_config(**sections), slice_)


def advantage(found: TrainSequence) -> float:
    """The one advantage of its trained tokens."""
    (value,) = set(found.advantages[found.loss_mask > 0].tolist())
    return float(value)


def fanned(n: int = 3) -> list[Sample]:
    """Rewards 1, 0, 0; the first rollout has `n` sequences."""
    parts = [make_sample(0, n=2 + k, reward=1.0, sequence=k, sequences=n) for k in range(n)]
    return [*parts, make_sample(1, reward=0.0), make_sample(2, reward=0.0)]


def test_a_rollout_enters_the_baseline_once_however_many_sequences_it_has() -> None:
    found = sequences(make_slice(4, *fanned(), n_samples=3))
    assert [advantage(s) for s in found] == pytest.approx([1.154699] * 3 + [-0.577349] * 2, abs=1e-5)
    assert [s.rollout_id for s in found] == [12, 12, 12, 13, 14]
    assert [s.response_length for s in found] == [2, 3, 4, 4, 4]


def test_what_was_drawn_at_another_temperature_says_so() -> None:
    members = [make_sample(0, reward=1.0), make_sample(1, reward=0.0)]

    def drawn(at: float | None, **sections: Any) -> list[float | None]:
        slice_ = make_slice(0, *members, temperature=at)
        return [s.temperature for s in sequences(slice_, rollout={"rollout_temperature": 0.7}, **sections)]

    assert drawn(0.4) == [0.4, 0.4]
    assert drawn(0.7) == drawn(None) == [None, None]
    assert drawn(0.4, train={"loss_type": "sft_loss"}) == [None, None], "what is learnt by heart was not drawn"


def test_a_removed_sample_counts_in_the_baseline_and_is_not_trained() -> None:
    members = [make_sample(0, reward=1.0, remove_sample=True), make_sample(1, reward=0.0), make_sample(2, reward=0.0)]
    removed, *others = sequences(make_slice(0, *members))
    assert removed.loss_mask.sum() == 0
    assert not removed.advantages.any()
    assert [advantage(s) for s in others] == pytest.approx([-0.577349] * 2, abs=1e-5)


def test_rewards_as_they_are() -> None:
    found = sequences(
        make_slice(0, make_sample(0, reward=2.0), make_sample(1, reward=1.0)),
        algorithm={"disable_rewards_normalization": True},
    )
    assert [advantage(s) for s in found] == [2.0, 1.0]


def test_components_of_a_reward_are_normalised_one_by_one() -> None:
    """gdpo: a is 1, 0, 0, 0 and b is 1, 1, 0, 0 with weights 1 and 0.5. a has deviation 0.5 around 1/4, b has 0.577350
    around 1/2, hence 1.5 + 0.5 x 0.866025, -0.5 + 0.5 x 0.866025, -0.5 - 0.5 x 0.866025. Deviation 1e-6 larger."""

    def graded(index: int, a: float, b: float, **more: float) -> Sample:
        return make_sample(index, reward=a + 0.5 * b, reward_parts={"a": a, "b": b, **more})

    options: dict[str, Any] = {
        "algorithm": {"advantage_estimator": "gdpo"},
        "reward": {"reward_component": ["a=exact@1", "b=random:0.5@0.5"]},
    }
    members = [graded(0, 1, 1), graded(1, 0, 1), graded(2, 0, 0), graded(3, 0, 0)]
    found = sequences(make_slice(4, *members, n_samples=4), **options)
    wanted = [1.933013, -0.066987, -0.933013, -0.933013]
    assert [advantage(s) for s in found] == pytest.approx(wanted, abs=1e-5)
    # A penalty for length is one more component: 0, 0, 0, -1 has deviation 0.5 around -1/4.
    members = [graded(0, 1, 1, overlong_penalty=0), graded(1, 0, 1, overlong_penalty=0)]
    members += [graded(2, 0, 0, overlong_penalty=0), graded(3, 0, 0, overlong_penalty=-1)]
    found = sequences(make_slice(4, *members, n_samples=4), **options)
    assert [advantage(s) for s in found] == pytest.approx([2.433013, 0.433013, -0.433013, -2.433013], abs=1e-5)
    # And so are rewards of turns, here of the last rollout alone.
    members = [graded(0, 1, 1), graded(1, 0, 1), graded(2, 0, 0), graded(3, 0, 0)]
    members[3] = msgspec.structs.replace(members[3], turn_rewards=(TurnReward(members[3].length, 0.5),))
    found = sequences(make_slice(4, *members, n_samples=4), **options)
    wanted = [1.433013, -0.566987, -1.433013, 0.566987]  # 1, 2 and 3 lose 0.5, and the last gains 1.5
    assert [advantage(s) for s in found] == pytest.approx(wanted, abs=1e-4)
    bare = [make_sample(index, reward=1.0, reward_parts={"a": 1.0}) for index in range(2)]
    with pytest.raises(UntrainableGroup, match=r"gdpo: a reward has no component 'b'; choose grpo where"):
        sequences(make_slice(4, *bare, n_samples=2), **options)


def test_a_function_of_the_users_own_replaces_the_normalisation() -> None:
    members = [make_sample(0, n=2, reward=3.0, sequence=k, sequences=2) for k in range(2)]
    members += [make_sample(1, reward=1.0), make_sample(2, reward=2.0)]
    found = sequences(
        make_slice(0, *members, n_samples=3), reward={"custom_reward_post_process_path": f"{PARTS}:ranks"}
    )
    assert [advantage(s) for s in found] == [2.0, 2.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("members", "setting", "function", "error", "words"),
    [
        (2, "custom_reward_post_process_path", "one_number", UntrainableGroup, r"gave \[1.0\] for 2 rollouts"),
        (2, "custom_reward_post_process_path", "divide", UntrainableGroup, "raised TypeError"),
        (2, "advantage_estimator", "divide", UntrainableGroup, "raised TypeError"),
        (2, "advantage_estimator", "no_numbers", UntrainableGroup, "is not finite"),
        (2, "advantage_estimator", "nowhere", UnknownAlgorithm, "nowhere"),  # no fault of a group
        (1, "advantage_estimator", "", UntrainableGroup, "at least 2"),  # nothing to compare
    ],
)
def test_a_function_that_fails_ends_its_group_and_not_the_run(
    members: int, setting: str, function: str, error: type[Exception], words: str
) -> None:
    section = "reward" if setting.startswith("custom") else "algorithm"
    sections = {section: {setting: f"{PARTS}:{function}"}} if function else {}
    with pytest.raises(error, match=words):
        sequences(make_slice(0, *(make_sample(i, reward=1.0 - i) for i in range(members))), **sections)


def batch_of(*slices: RolloutSlice, step: int = 6, **sections: Any) -> Batch:
    batch = Batch(make_config(**sections), step)
    for slice_ in slices:
        batch.add(slice_, [])
    return batch


def test_staleness_golden() -> None:
    """V = 6; versions 5 5 - 6 6 and 4 4 4, as in the fixture of the corrections."""
    first = make_sample(0, runs=[(5, 3), (6, 2)], mask=[1, 1, 0, 1, 1], reward=1.0)
    second = make_sample(1, runs=[(4, 3)], reward=0.0)
    batch = batch_of(make_slice(0, first, second), train={"num_steps_per_rollout": 4})
    metrics = batch.metrics()
    assert batch.staleness == {0: 2, 1: 2, 2: 3}
    assert metrics["staleness/mean"] == pytest.approx(1.142857, abs=1e-6)
    assert [metrics[f"staleness/{name}"] for name in ("max", "p99", "sample_max")] == [2, 2, 1.5]
    assert metrics["staleness/opt_steps"] == pytest.approx(4 * 1.142857 + 1.5, abs=1e-5)
    assert {k: v for k, v in metrics.items() if "token_hist" in k} == {
        "staleness/token_hist/0": 2,
        "staleness/token_hist/1": 2,
        "staleness/token_hist/2": 3,
    }


def test_removed_tokens_are_not_counted_as_trained() -> None:
    batch = batch_of(
        make_slice(0, make_sample(0, version=2, reward=1.0, remove_sample=True), make_sample(1, version=6))
    )
    assert (batch.trained_tokens, batch.staleness) == (4, {0: 4})
    metrics = batch.metrics()
    assert metrics["staleness/sample_max"] == 0
    assert metrics["rollout/effective_response_len/min"] == 0
    assert metrics["rollout/response_len/min"] == 4


def test_the_unit_of_rollout_metrics_is_the_rollout() -> None:
    metrics = batch_of(make_slice(0, *fanned(), n_samples=4), make_slice(1, make_sample(0, n=9, reward=1.0))).metrics()
    assert metrics["train/rollouts"] == 4
    assert metrics["train/reward_mean"] == 0.5
    assert metrics["rollout/response_len/max"] == 9
    assert metrics["rollout/response_len/median"] == np.median([9, 4, 4, 9])
    assert metrics["rollout/segments/mean"] == 1.5
    assert metrics["rollout/failed_ratio"] == pytest.approx(1 - 4 / 5)
    assert metrics["rollout/zero_std_frac"] == 0.5, "the second group has one member"


def test_pass_rates_and_sources() -> None:
    def judged(group_id: int, source: str | None, *correct: bool) -> RolloutSlice:
        members = [make_sample(i, reward=float(c), is_correct=c) for i, c in enumerate(correct)]
        return make_slice(group_id, *members, metadata=f'{{"source_name": "{source}"}}' if source else "{}")

    batch = batch_of(
        judged(0, "math", True, False, False, False),
        judged(1, "code", True, True, True, True),
        judged(2, None, False, False, False, False),
    )
    metrics = batch.metrics()
    assert batch.pass_rates == {0: 0.25, 1: 1.0, 2: 0.0}
    assert metrics["passrate/pass@1"] == pytest.approx(1.25 / 3)
    assert metrics["passrate/pass@2"] == pytest.approx(1.5 / 3)
    assert metrics["passrate/mean@4"] == pytest.approx(1.25 / 3)
    assert (metrics["reward/by_source/math"], metrics["reward/by_source/code"]) == (0.25, 1.0)
    assert metrics["rollout/group_len/4"] == 3


def test_supervised_batches_have_no_pass_rates() -> None:
    metrics = batch_of(make_slice(0, make_sample(0, reward=0.0)), train={"loss_type": "sft_loss"}).metrics()
    assert not any(name.startswith("passrate/") for name in metrics)


@pytest.mark.parametrize(("tokens", "bucket"), [(0, 1), (1, 1), (2, 2), (2.5, 4), (4, 4), (5, 8), (1000, 1024)])
def test_length_buckets_are_upper_bounds(tokens: float, bucket: int) -> None:
    assert length_bucket(tokens) == bucket


def test_quantile_of_a_histogram() -> None:
    assert quantile({}, 0.99) == 0
    assert quantile({0: 98, 5: 2}, 0.99) == 5
    assert quantile({0: 99, 5: 1}, 0.99) == 0


def held(group_id: int, *rewards: float, **fields: Any) -> Held:
    return Held(make_graded(group_id, *(rewards or (float(group_id), 0.0)), **fields))


def buffer(order: str = "oldest_first", *, eta: int = 2, fallback: bool = False, **sections: Any) -> GroupBuffer:
    filters = {"dynamic_sampling_filter": ("nonzero_std_fallback",) if fallback else ()}
    asynchrony = {"buffer_order": order, "max_staleness": eta}
    return GroupBuffer(make_config(asynchrony=asynchrony, filter=filters, **sections))


def popped(one: GroupBuffer, step: int = 0, missing: int = 1) -> list[int]:
    found = []
    while (lease := one.pop(step, missing)) is not None:
        found.append(lease.message.group.group_id)
    return found


def test_priority_takes_first_what_the_next_batch_could_no_longer_take() -> None:
    """Bound 2: at step 4 a token of version 2 has its last chance, one of version 3 has not."""
    one = buffer("priority", eta=2)
    one.push(held(0, 1.0, 0.0, version=3))
    one.push(held(7, 0.1, 0.0, version=2))
    one.push(held(6, 0.1, 0.0, version=2))
    one.push(held(8, 0.0, 0.0, version=0, mask=[0, 0, 0, 0]))  # nothing trained: no age, no signal
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
            one.push(held(group_id, signal, 0.0, version=eta - min(age, eta)))
        lost, step = 0, eta
        while len(one):
            for missing in range(batch, 0, -1):
                one.pop(step, missing)
            step += 1
            lost += len(one.take_old(step))
        return lost

    assert stale("priority") == stale("oldest_first")


def test_a_spare_group_waits_for_better_ones() -> None:
    one = buffer(fallback=True)
    one.push(held(0, 1.0, 1.0))
    assert len(one) == 1
    assert not one.ready(2), "one spare does not fill a batch that lacks two"
    assert one.pop(0, 2) is None
    one.push(held(9, 1.0, 0.0))
    assert one.ready(2)
    assert popped(one, missing=1) == [9, 0], "the better one first, then the spare that fills the batch"


@pytest.mark.parametrize(
    ("order", "words"),
    [
        (f"{PARTS}:beyond_the_end", r"returned 1; it must return the index of one of the 1 waiting groups"),
        (f"{PARTS}:divide", r"raised TypeError: .*; it must return the index of one of the 1"),
    ],
)
def test_a_function_that_gives_no_index_is_named(order: str, words: str) -> None:
    one = buffer(order)
    one.push(held(0))
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
            one.push(held(next_id, 1.0, 1.0 if flag else 0.0, version=number))
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


# Which groups the train stage takes: buffer orders, leftovers of over-sampling, fallbacks, groups it cannot train.


OVER: dict[str, object] = {"dynamic_sampling_filter": ("nonzero_std",), "over_sampling_batch_size": 4}
FALLBACK: dict[str, object] = {"dynamic_sampling_filter": ("nonzero_std_fallback",)}


async def test_what_over_sampling_leaves_of_a_synchronous_batch_is_discarded(training: Training) -> None:
    async with training(total=2, eta=0, hold=["begin"], filter=OVER) as one:
        await one.begin_with(*(make_graded(i) for i in range(3)))
        assert (await one.report(StepDone)).groups == (0, 1)
        left = await one.report(Settled)
        assert (left.group_id, left.outcome) == (2, "discarded")
        assert left.detail == "over-sampled: oldest token has version 0, batch 1, bound 0"
        await one.send(make_graded(3), make_graded(4, version=1), make_graded(5, version=1))
        late = await one.report(Settled)
        assert (late.group_id, late.outcome) == (3, "discarded"), "it was still in flight when the batch was full"
        assert (await one.report(StepDone)).groups == (4, 5)
        await one.rig.hubs["train"].wait_empty()


async def test_leftovers_of_an_asynchronous_batch_go_into_the_next_or_become_stale(training: Training) -> None:
    async with training(total=3, eta=1, hold=["begin"], filter=OVER) as one:
        await one.begin_with(*(make_graded(i) for i in range(5)))
        assert (await one.report(StepDone)).groups == (0, 1)
        assert (await one.report(StepDone)).groups == (2, 3)
        left = await one.report(Settled)
        assert (left.group_id, left.outcome) == (4, "stale")


async def test_a_fallback_that_was_not_needed_is_filtered_when_its_batch_is_full(training: Training) -> None:
    async with training(batch=1, total=2, eta=1, hold=["begin"], filter=FALLBACK) as one:
        await one.begin_with(make_graded(0, 1.0, 1.0), make_graded(1))
        done = await one.report(StepDone)
        assert done.groups == (1,)
        assert done.metrics["rollout/zero_std_frac"] == 0.0
        left = await one.report(Settled)
        assert (left.group_id, left.outcome, left.detail) == (0, "filtered", "zero_std_1.0")
        await one.rig.hubs["train"].wait_empty()


@pytest.mark.parametrize("deterministic", [False, True])
async def test_a_group_whose_rewards_become_no_advantages_is_settled_as_failed(
    training: Training, deterministic: bool
) -> None:
    async with training(
        batch=2,
        total=1,
        reward={"custom_reward_post_process_path": f"{PARTS}:one_number"},
        run={"deterministic": deterministic},
    ) as one:
        await one.send(make_graded(0))
        failed = await one.report(Settled)
        assert (failed.group_id, failed.outcome) == (0, "failed")
        assert "one_number gave [1.0] for 2 rollouts" in failed.detail
        await one.send(make_slice(1, make_sample(0, reward=1.0)), make_slice(2, make_sample(0, reward=0.0)))
        assert (await one.report(StepDone)).groups == (1, 2)
        assert [s.advantages.tolist() for s in one.backend.sequences] == [[0.0] * 3 + [1.0] * 4] * 2
