"""The train stage: what is trained, in which order, what is published when, and how the rest is settled."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from models.errors import SlotSpaceError
from models.weights.shared_memory_reader import SlotReader
from stages.base import TrainOptions
from stages.messages import Settled, StepDone
from stages.train.schedule import Schedule
from tests.stages.stage_rig import ended_by, idle, make_config, make_sample, make_slice, until
from tests.stages.train_rig import Training, aged, open_training


async def test_the_oldest_groups_here_are_trained_first(training: Training) -> None:
    async with training(total=2, hold=["begin"]) as one:
        await one.begin_with(*map(make_slice, (5, 3, 4, 1)))
        assert (await one.report(StepDone)).groups == (1, 3)
        assert (await one.report(StepDone)).groups == (4, 5)
        assert (one.backend.batches, one.backend.calls) == ([[1, 3], [4, 5]], 2), "what is there goes in one call"


async def test_a_quarter_of_a_batch_is_computed_while_the_rest_is_on_its_way(training: Training) -> None:
    """And what is here goes to the backend at once, which may fill a micro-batch with it."""
    async with training(batch=8) as one:
        log = one.backend.log
        for group in range(2):
            await one.send(make_slice(group))
            await until(lambda group=group: f"group {group}" in log)
        await until(lambda: "flush" in log)
        assert log.index("flush") > log.index("group 1"), "one of eight waits"
        await one.send(*map(make_slice, range(2, 8)))
        assert (await one.report(StepDone)).groups == tuple(range(8))


async def test_a_group_is_trained_once_however_often_it_is_delivered(training: Training) -> None:
    async with training(batch=1, total=2, hold=["begin"]) as one:
        await one.begin_with(make_slice(0), make_slice(0))
        assert (await one.report(StepDone)).groups == (0,)
        await one.send(make_slice(0), make_slice(1))
        assert (await one.report(StepDone)).groups == (1,)
        await one.rig.hubs["train"].wait_empty()
        assert one.backend.batches == [[0], [1]]


async def test_a_group_is_refused_exactly_beyond_the_bound(training: Training) -> None:
    async with training(batch=3, total=6, eta=2, hold=["begin"], options=TrainOptions(start_step=5)) as one:
        mixed = [make_sample(i, runs=[(2, 1), (5, 3)], reward=float(i)) for i in range(2)]
        uneven = [make_sample(0, version=5, reward=1.0), make_sample(1, version=2, reward=0.0)]
        untrained = [make_sample(i, runs=[(0, 2), (5, 2)], mask=[0, 0, 1, 1]) for i in range(2)]
        removed = [make_sample(0, version=1, reward=1.0, remove_sample=True), make_sample(1, version=5, reward=0.0)]
        future = [make_sample(0, runs=[(5, 2), (6, 1)]), make_sample(1, version=5)]
        refused = [aged(0, 2), make_slice(1, *mixed), make_slice(2, *uneven), make_slice(3, *future)]
        await one.begin_with(*refused, aged(4, 3), make_slice(5, *untrained), make_slice(6, *removed))
        for group_id in (0, 1, 2):
            stale = await one.report(Settled)
            assert (stale.group_id, stale.outcome) == (group_id, "stale")
            assert stale.detail == "oldest token has version 2, batch 5, bound 2"
            assert stale.tokens == 8
        unheard = await one.report(Settled)
        assert (unheard.group_id, unheard.outcome) == (3, "failed"), "the trainer alone knows which weights there are"
        assert "a token has version 6, but the newest weights are version 5" in unheard.detail
        done = await one.report(StepDone)
        assert (done.step, done.groups, done.tokens) == (6, (4, 5, 6), 16)
        assert done.staleness == {2: 8, 0: 8}, "only tokens that were trained count"
        assert max(done.staleness) <= 2
        await one.rig.hubs["train"].wait_empty()


async def test_a_group_that_waited_too_long_is_trained_without_its_stale_tokens(training: Training) -> None:
    masks = {"async_unused_samples_handler": "train_masked"}
    async with training(total=8, eta=2, hold=["begin"], options=TrainOptions(start_step=5), asynchrony=masks) as one:
        mixed = [make_sample(i, runs=[(2, 1), (3, 2), (5, 1)], reward=float(i)) for i in range(2)]
        # The two that are wholly too old are settled; the last waits for the second batch, where version 3 is too old.
        await one.begin_with(aged(0, 5), aged(1, 2), aged(2, 2), aged(3, 4), make_slice(4, *mixed))
        for group_id in (1, 2):
            stale = await one.report(Settled)
            assert (stale.group_id, stale.outcome) == (group_id, "stale")
            assert stale.detail == "newest token has version 2, batch 5, bound 2"
        done = await one.report(StepDone)
        assert (done.groups, "rollout/masked_stale_tokens" in done.metrics) == ((0, 3), False)
        await one.send(aged(5, 6))
        done = await one.report(StepDone)
        assert (done.step, done.groups) == (7, (4, 5))
        assert done.staleness == {1: 2, 0: 8}, "of each member of group 4 one token is left"
        assert done.metrics["rollout/masked_stale_tokens"] == 6
        trained = [s for s in one.backend.sequences if s.group_id == 4]
        assert [s.loss_mask[s.prompt_length :].tolist() for s in trained] == [[0, 0, 0, 1]] * 2


async def test_groups_that_are_written_down_are_scored_with_the_weights_that_the_batch_begins_with(
    training: Training, tmp_path: Path
) -> None:
    every = {"samples_interval": 2, "samples_groups": 2}
    async with training(total=4, eta=4, observe=every, run={"deterministic": True}) as one:
        for group_id in range(0, 8, 2):
            await one.send(make_slice(group_id), make_slice(group_id + 1))
            await one.report(StepDone)
        await until(lambda: '"step":4' in (tmp_path / "samples.jsonl").read_text())
    runs = [(entry[0] // 2, *entry[1:]) for entry in one.backend.scored if entry[0] >= 0]
    assert runs == [(0, 0, 0), (1, 4, 1), (3, 12, 3)], "one call, before any of the batch is handed over"
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert {row["step"] for row in rows} == {1, 2, 4}
    assert all(row["train_log_probs"] == row["log_probs"] == [None] * 3 + [-0.5] * 4 for row in rows)


async def test_a_trainer_that_is_killed_in_a_step_gives_its_groups_back(training: Training) -> None:
    async with training(total=1, hold=["may_step"]) as one:
        await one.send(make_slice(0), make_slice(1))
        await until(lambda: "step" in one.backend.log)
        one.task.cancel()
        one.rig.hubs["train"].peer_lost("stage-0")
        await idle()
        stats = one.rig.hubs["train"].stats()
        assert (stats.queued + stats.leased, stats.settled) == (2, 0)
        one.backend.may_step.set()


async def test_a_version_is_announced_only_when_its_slot_is_complete(training: Training) -> None:
    async with training(batch=1, total=2) as one:
        await one.rig.topic_until(lambda: one.rig.announced() is not None)
        first = one.rig.announced()
        assert first is not None
        assert (first.version, first.label, first.pinned) == (0, "0.0", False)
        SlotReader(first)
        one.backend.may_export.clear()
        await one.send(make_slice(0))
        await one.report(StepDone)
        await until(lambda: one.backend.log.count("export") == 2)
        await idle()
        assert one.rig.announced() == first, "half of version 1 is written"
        one.backend.may_export.set()
        await one.rig.topic_until(lambda: one.rig.announced() != first)
        second = one.rig.announced()
        assert second is not None
        assert (second.version, second.path != first.path) == (1, True)
        SlotReader(second)
        SlotReader(first)  # the version before is still whole


async def test_weights_of_an_evaluation_for_which_there_is_no_room_end_the_run_in_a_sentence(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slots have their room from the start; the copy for engines that evaluate alone is made later."""
    held = {"eval_interval": 1, "eval_prompt_data": ("held=x.jsonl",), "skip_eval_before_train": True}
    evaluation = {**held, "eval_engines": 1}
    words = r"evaluated-1: the weights of an evaluation .* there \(.*No space left.*\); free space .*--eval-engines$"
    with ended_by(SlotSpaceError, words):
        async with open_training(small_disk, monkeypatch, batch=1, total=3, eval=evaluation) as one:
            await one.rig.topic_until(lambda: one.rig.announced("weights") is not None)
            (small_disk / "ballast").write_bytes(b"x" * shutil.disk_usage(small_disk).free)
            await one.send(aged(0, 0))
            await one.task


@pytest.mark.parametrize("skipped", [False, True])
async def test_nothing_newer_is_announced_before_a_pinned_version_has_landed(training: Training, skipped: bool) -> None:
    """Leaving out the first evaluation leaves out no other."""
    evaluation = {"eval_interval": 1, "eval_prompt_data": ("held=x.jsonl",), "skip_eval_before_train": skipped}
    async with training(batch=1, total=2, eval=evaluation) as one:
        one.rig.applied(0)
        one.rig.applied(0, engine=1)
        await one.send(make_slice(0))
        assert (await one.report(StepDone)).pinned
        assert (one.rig.announced("weights/pinned/0") is None) is skipped
        await one.rig.topic_until(lambda: getattr(one.rig.announced("weights/pinned/1"), "version", -1) == 1)
        one.rig.applied(1)
        await one.send(make_slice(1))
        assert (await one.report(StepDone)).step == 2
        await idle()
        assert one.backend.log.count("export") == 2, "engine-1 still needs version 1"
        one.rig.applied(1, engine=1)
        await one.rig.topic_until(lambda: getattr(one.rig.announced(), "version", -1) == 2)


@pytest.mark.parametrize("dies", [False, True])
async def test_the_slot_that_an_engine_is_reading_is_not_overwritten(
    training: Training, dies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it reads the other one, or is dead. Versions 0, 2 and 4 are published."""
    monkeypatch.setattr("stages.train.weights.LANDING_TIMEOUT_S", 1e6)
    async with training(batch=1, total=5, eta=9, asynchrony={"update_weights_interval": 2}) as one:
        one.rig.applied(-1, fetching=0)
        await one.send(*map(make_slice, range(4)))
        for _ in range(4):
            await one.report(StepDone)
        await idle()
        assert getattr(one.rig.announced(), "version", -1) == 2
        assert one.backend.log.count("export") == 2, "version 4 goes into the slot of version 0"
        if dies:
            one.rig.lose_engine(0)
        else:
            one.rig.applied(0, fetching=2)
        await one.rig.topic_until(lambda: getattr(one.rig.announced(), "version", -1) == 4)


async def test_a_resumed_trainer_goes_on_from_its_step(training: Training) -> None:
    options = TrainOptions(start_step=3, run_generation=1, resume_from="checkpoints/step-3")
    async with training(batch=1, total=4, options=options) as one:
        assert one.backend.log[:2] == ["setup", "load step-3"]
        await one.rig.topic_until(lambda: one.rig.announced() is not None)
        assert one.rig.announced().label == "1.3", "labels of the run before are not used again"
        await one.send(aged(7, 3))
        assert (await one.report(StepDone)).step == 4


async def test_deterministic_mode_trains_in_the_order_of_the_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = []
    for order in ([2, 0, 1], [1, 2, 0]):
        (tmp_path / str(order)).mkdir()
        async with open_training(
            tmp_path / str(order), monkeypatch, batch=3, total=1, run={"deterministic": True}
        ) as one:
            for group_id in order[:2]:
                await one.send(make_slice(group_id))
            await one.arrived(2)
            await idle()
            assert not any(entry.startswith("group") for entry in one.backend.log)
            await one.send(make_slice(order[2]))
            done = await one.report(StepDone)
            assert one.backend.batches == [[0, 1, 2]]
            hashes.append(done.token_hash)
    assert hashes[0] == hashes[1]


async def test_sequences_carry_tokens_versions_and_group_relative_advantages(training: Training) -> None:
    async with training(batch=1, total=2, algorithm={"disable_grpo_std_normalization": True}) as one:
        await one.send(make_slice(3))
        await one.report(StepDone)
        good = make_sample(
            0, runs=[(0, 3), (1, 2)], prompt=[8, 9], mask=[1, 1, 0, 1, 1], reward=1.0, reward_parts={"form": 0.5}
        )
        await one.send(make_slice(4, good, make_sample(1, reward=0.0, status="truncated")))
        done = await one.report(StepDone)
        first, second = one.backend.sequences[-2:]
        assert first.tokens.tolist() == [8, 9, 0, 1, 2, 3, 4]
        assert (first.response_length, first.rollout_id, second.rollout_id) == (5, 8, 9)
        assert first.versions.tolist() == [-1, -1, 0, 0, 0, 1, 1]
        assert first.advantages.tolist() == [0.0, 0.0, 0.5, 0.5, 0.0, 0.5, 0.5]
        assert second.advantages.tolist() == [0.0] * 3 + [-0.5] * 4
        assert done.tokens == 8
        assert done.staleness == {1: 6, 0: 2}
        assert done.metrics["train/loss"] == 0.5
        assert done.metrics["reward/form"] == 0.5
        assert done.metrics["rollout/truncated_ratio"] == 0.5
        assert done.metrics["rollout/mixed_version_ratio"] == 0.5


async def test_supervised_training_publishes_no_weights_and_knows_no_staleness(training: Training) -> None:
    async with training(
        batch=1, total=2, eta=0, train={"loss_type": "sft_loss"}, options=TrainOptions(start_step=1)
    ) as one:
        await one.send(make_slice(0, make_sample(0, version=0, reward=0.0)))
        done = await one.report(StepDone)
        assert done.groups == (0,)
        assert one.backend.sequences[0].advantages.tolist() == [0.0] * 3 + [1.0] * 4
        assert "export" not in one.backend.log
        assert one.rig.announced() is None


async def test_an_error_of_the_backend_ends_the_replica_with_its_words(training: Training) -> None:
    def broken() -> dict[str, float]:
        raise RuntimeError("out of memory on the device")

    with ended_by(RuntimeError, "out of memory on the device"):
        async with training(batch=1, total=1) as one:
            one.backend.step = broken  # type: ignore[method-assign]
            await one.send(make_slice(0))
            await one.task


# What is due after each step.


def steps(schedule: Schedule, field: str) -> list[int]:
    return [step for step in range(schedule.total + 1) if getattr(schedule.due(step), field)]


@pytest.mark.parametrize(("initial", "versions"), [(True, [0, 6]), (False, [6])])
def test_only_published_versions_are_evaluated(initial: bool, versions: list[int]) -> None:
    evaluation = {"eval_interval": 3, "eval_prompt_data": ["held", "held.jsonl"], "skip_eval_before_train": not initial}
    config = make_config(rollout={"num_rollout": 6}, asynchrony={"update_weights_interval": 2}, eval=evaluation)
    assert steps(Schedule(config, first=0), "evaluate") == versions
