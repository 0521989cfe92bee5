"""Which groups the train stage takes: buffer orders, leftovers of over-sampling, fallbacks, groups it cannot train."""

from __future__ import annotations

from pathlib import Path

import pytest

from stages.base import TrainOptions
from stages.messages import RolloutSlice, Settled, StepDone
from tests.stages.stage_rig import idle, make_sample, make_slice, until
from tests.stages.train_rig import training

PARTS = "tests.stages.custom_parts"
OVER: dict[str, object] = {"dynamic_sampling_filter": ("nonzero_std",), "over_sampling_batch_size": 4}
FALLBACK: dict[str, object] = {"dynamic_sampling_filter": ("nonzero_std_fallback",)}


def group(group_id: int, *rewards: float, version: int = 0) -> RolloutSlice:
    members = [make_sample(i, version=version, reward=r) for i, r in enumerate(rewards or (1.0, 0.0))]
    return make_slice(group_id, *members)


@pytest.mark.parametrize(
    ("order", "batches"),
    [
        ("oldest_first", [(1, 3), (4, 5)]),
        ("ready_first", [(5, 3), (4, 1)]),
        ("priority", [(3, 5), (4, 1)]),
        (f"{PARTS}:newest_first", [(5, 4), (3, 1)]),
    ],
)
async def test_the_buffer_order_decides_what_is_trained_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str, batches: list[tuple[int, ...]]
) -> None:
    async with training(
        tmp_path, monkeypatch, total=2, eta=5, hold=["begin"], asynchrony={"buffer_order": order}
    ) as one:
        await one.send(group(5, 0.9, 0.0), group(3, 1.0, 0.0), group(4, 0.5, 0.0), group(1, 0.1, 0.0))
        await one.arrived(4)
        one.backend.begin.set()
        for expected in batches:
            assert (await one.report(StepDone)).groups == expected


async def test_no_order_trains_what_is_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = TrainOptions(start_step=4)
    async with training(
        tmp_path,
        monkeypatch,
        batch=1,
        total=5,
        eta=1,
        hold=["begin"],
        options=options,
        asynchrony={"buffer_order": "ready_first"},
    ) as one:
        await one.send(group(0, version=2), group(1, version=3))
        await one.arrived(2)
        one.backend.begin.set()
        assert (await one.report(Settled)).detail == "oldest token has version 2, batch 4, bound 1"
        assert (await one.report(StepDone)).groups == (1,)


async def test_what_over_sampling_leaves_of_a_synchronous_batch_is_discarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with training(tmp_path, monkeypatch, total=2, eta=0, hold=["begin"], filter=OVER) as one:
        await one.send(*(group(i) for i in range(3)))
        await one.arrived(3)
        one.backend.begin.set()
        assert (await one.report(StepDone)).groups == (0, 1)
        left = await one.report(Settled)
        assert (left.group_id, left.outcome) == (2, "discarded")
        assert left.detail == "over-sampled: oldest token has version 0, batch 1, bound 0"
        await one.send(group(3), group(4, version=1), group(5, version=1))
        late = await one.report(Settled)
        assert (late.group_id, late.outcome) == (3, "discarded"), "it was still in flight when the batch was full"
        assert (await one.report(StepDone)).groups == (4, 5)
        await one.rig.hubs["train"].wait_empty()


async def test_leftovers_of_an_asynchronous_batch_go_into_the_next_or_become_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with training(tmp_path, monkeypatch, total=3, eta=1, hold=["begin"], filter=OVER) as one:
        await one.send(*(group(i) for i in range(5)))
        await one.arrived(5)
        one.backend.begin.set()
        assert (await one.report(StepDone)).groups == (0, 1)
        assert (await one.report(StepDone)).groups == (2, 3)
        left = await one.report(Settled)
        assert (left.group_id, left.outcome) == (4, "stale")


async def test_a_fallback_fills_the_batch_only_when_nothing_better_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with training(tmp_path, monkeypatch, batch=2, total=2, eta=1, filter=FALLBACK) as one:
        await one.send(group(0, 1.0, 1.0))
        await one.arrived(1)
        await idle()
        assert not one.backend.sequences, "one fallback does not fill a batch of two"
        await one.send(group(1))
        assert (await one.report(StepDone)).groups == (1, 0)
        await one.send(group(2, 0.0, 0.0))
        await one.arrived(3)
        await one.send(group(3), group(4))
        done = await one.report(StepDone, passing=(Settled,))  # 2 is filtered, if the batch is full without it
        assert set(done.groups) in ({3, 4}, {2, 3}), "what has come by then"


async def test_a_fallback_that_was_not_needed_is_filtered_when_its_batch_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with training(tmp_path, monkeypatch, batch=1, total=2, eta=1, hold=["begin"], filter=FALLBACK) as one:
        await one.send(group(0, 1.0, 1.0), group(1))
        await one.arrived(2)
        one.backend.begin.set()
        done = await one.report(StepDone)
        assert done.groups == (1,)
        assert done.metrics["rollout/zero_std_frac"] == 0.0
        left = await one.report(Settled)
        assert (left.group_id, left.outcome, left.detail) == (0, "filtered", "zero_std_1.0")
        await one.rig.hubs["train"].wait_empty()


@pytest.mark.parametrize("deterministic", [False, True])
async def test_a_group_whose_rewards_become_no_advantages_is_settled_as_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    async with training(
        tmp_path,
        monkeypatch,
        batch=2,
        total=1,
        reward={"custom_reward_post_process_path": f"{PARTS}:one_number"},
        run={"deterministic": deterministic},
    ) as one:
        await one.send(group(0))
        failed = await one.report(Settled)
        assert (failed.group_id, failed.outcome) == (0, "failed")
        assert "one_number gave [1.0] for 2 rollouts" in failed.detail
        await one.send(make_slice(1, make_sample(0, reward=1.0)), make_slice(2, make_sample(0, reward=0.0)))
        assert (await one.report(StepDone)).groups == (1, 2)
        assert [s.advantages.tolist() for s in one.backend.sequences] == [[0.0] * 3 + [1.0] * 4] * 2


async def test_a_removed_sample_makes_its_group_no_older(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with training(tmp_path, monkeypatch, batch=1, total=6, eta=0, options=TrainOptions(start_step=5)) as one:
        members = [make_sample(0, version=1, reward=1.0, remove_sample=True), make_sample(1, version=5, reward=0.0)]
        await one.send(make_slice(0, *members))
        done = await one.report(StepDone)
        assert (done.groups, done.staleness, done.tokens) == ((0,), {0: 4}, 4)


async def test_pass_rates_are_reported_with_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with training(tmp_path, monkeypatch, batch=2, total=1) as one:
        judged = [make_sample(i, reward=float(i), is_correct=bool(i)) for i in range(2)]
        await one.send(make_slice(3, *judged), group(4))
        done = await one.report(StepDone)
        assert done.pass_rates == {3: 0.5}, "the other grader gives no verdict"
        assert done.metrics["passrate/pass@2"] == 1.0


async def test_arrivals_while_the_rest_is_settled_are_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with training(tmp_path, monkeypatch, batch=1, total=1) as one:
        await one.send(*(group(i) for i in range(20)))
        await one.report(StepDone)
        await until(lambda: one.rig.hubs["settle"].stats().accepted >= 10)
        await one.send(*(group(i) for i in range(20, 40)))
        await one.end()
        assert one.rig.hubs["train"].stats().settled == 40
