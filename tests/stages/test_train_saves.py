"""Saves: what they keep of the groups that wait, what a resumed trainer does with them, saves in the background."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from models.checkpoint import CheckpointError, draft_path
from stages.base import TrainOptions
from stages.messages import CheckpointReady, RolloutSlice, Settled, StepDone
from stages.prompts.ledger import LedgerSnapshot, OpenGroup
from stages.train.recovery import Recovery
from stages.train.saved_groups import restorable, write_groups
from tests.stages.prompt_rig import prompting
from tests.stages.stage_rig import idle, make_sample, make_slice, take, until
from tests.stages.train_rig import Recorder, training


async def test_a_save_in_the_background_is_reported_before_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recorder, "finish_save", lambda self: self.log.append("finish"), raising=False)
    saving = {"save_interval": 2, "async_save": True}
    async with training(tmp_path, monkeypatch, batch=1, total=5, eta=9, checkpoint=saving) as one:
        await one.send(*(make_slice(group_id) for group_id in range(5)))
        found = [await take(one.reports) for _ in range(8)]
        assert [(type(report).__name__, report.step) for report in found] == [
            ("StepDone", 1),
            ("StepDone", 2),
            ("CheckpointReady", 2),
            ("StepDone", 3),
            ("StepDone", 4),
            ("CheckpointReady", 4),
            ("StepDone", 5),
            ("CheckpointReady", 5),
        ]
        order = [entry for entry in one.backend.log if entry in ("step", "save", "finish")]
        assert order == ["step", "step", "save", "step", "finish", "step", "save", "step", "finish", "save", "finish"]


async def test_a_drain_waits_for_the_save_that_was_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorder, "finish_save", lambda self: self.log.append("finish"), raising=False)
    saving = {"save_interval": 1, "async_save": True}
    async with training(tmp_path, monkeypatch, batch=1, total=5, checkpoint=saving) as one:
        await one.send(make_slice(0))
        assert (await take(one.reports)).step == 1
        one.rig.topic.publish("drain", b"interrupted")
        saved = await take(one.reports)
        assert (type(saved).__name__, saved.step) == ("CheckpointReady", 1)
        assert [entry for entry in one.backend.log if entry in ("save", "finish")] == ["save", "finish"]
        await one.end()


async def test_a_backend_is_told_of_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorder, "close", lambda self: self.log.append("close"), raising=False)
    async with training(tmp_path, monkeypatch, batch=1, total=1) as one:
        await one.send(make_slice(0))
        await take(one.reports)
        await take(one.reports)
        await one.end()
        await one.stage.close()
        assert one.backend.log[-1] == "close"


def kept(checkpoint: str) -> set[int]:
    return set(restorable(Path(checkpoint), 2))


async def test_a_checkpoint_keeps_the_groups_that_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saving: dict[str, object] = {"save_interval": 1}
    async with training(tmp_path, monkeypatch, batch=2, total=3, eta=2, hold=["may_step"], checkpoint=saving) as one:
        await one.send(*(make_slice(group_id) for group_id in range(3)))
        await one.arrived(3)
        one.backend.may_step.set()
        assert (await one.report(StepDone)).groups == (0, 1)
        assert kept((await one.report(CheckpointReady)).path) == {2}
        await one.send(make_slice(3))
        assert (await one.report(StepDone)).groups == (2, 3)
        assert kept((await one.report(CheckpointReady)).path) == set(), "what is trained is in the weights"


async def test_what_was_refused_before_a_checkpoint_is_not_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving: dict[str, object] = {"save_interval": 1}
    async with training(tmp_path, monkeypatch, batch=1, total=3, eta=0, hold=["may_step"], checkpoint=saving) as one:
        await one.send(make_slice(0), make_slice(1))
        await one.arrived(2)
        one.backend.may_step.set()
        assert (await one.report(StepDone)).groups == (0,)
        assert (await one.report(Settled)).group_id == 1
        assert kept((await one.report(CheckpointReady)).path) == set()


async def test_a_save_in_the_background_keeps_the_batch_that_trains_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ledger is committed before the report of the next step: those groups are open in it, not in the weights."""
    saving: dict[str, object] = {"save_interval": 1, "async_save": True}
    async with training(tmp_path, monkeypatch, batch=1, total=2, eta=2, checkpoint=saving) as one:
        await one.send(make_slice(0))
        await one.report(StepDone)
        one.backend.may_step.clear()
        await one.send(make_slice(1), make_slice(2))
        await one.arrived(3)
        one.backend.may_step.set()
        assert kept((await one.report(CheckpointReady)).path) == {1, 2}
        assert (await one.report(StepDone)).groups == (1,)


async def test_a_drain_saves_what_was_collected_even_if_nothing_was_trained_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving: dict[str, object] = {"save_interval": 1}
    async with training(tmp_path, monkeypatch, batch=2, total=5, eta=2, checkpoint=saving) as one:
        await one.send(make_slice(0), make_slice(1))
        await one.report(StepDone)
        first = await one.report(CheckpointReady)
        assert kept(first.path) == set()
        await one.send(make_slice(2))
        await one.arrived(3)
        one.rig.topic.publish("drain", b"interrupted")
        await idle()
        assert one.backend.log.count("save") == 1, "the controller still reads the first draft"
        Path(first.path).rename(tmp_path / "committed")
        second = await one.report(CheckpointReady)
        assert (second.step, second.path) == (first.step, first.path)
        assert kept(str(tmp_path / "committed")) == set()
        assert kept(second.path) == {2}, "of the unfinished batch"
        assert (await one.report(Settled)).group_id == 2, "after the checkpoint, so that a resume undoes it"
        await one.end()


async def test_a_drain_begins_no_further_batch_with_what_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with training(tmp_path, monkeypatch, batch=2, total=5, eta=9, hold=["may_step"]) as one:
        await one.send(*(make_slice(group_id) for group_id in range(7)))
        await one.arrived(7)
        await until(lambda: "step" in one.backend.log)
        one.rig.topic.publish("drain", b"interrupted")
        await until(lambda: one.stage.groups.drained is not None)
        one.backend.may_step.set()
        assert (await one.report(StepDone)).groups == (0, 1), "it was being computed"
        saved = await one.report(CheckpointReady)
        assert (saved.step, kept(saved.path)) == (1, {2, 3, 4, 5, 6})
        assert [(await one.report(Settled)).outcome for _ in range(5)] == ["discarded"] * 5
        await one.end()


async def test_a_drain_after_the_last_batch_saves_nothing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with training(tmp_path, monkeypatch, batch=1, total=1, eta=2) as one:
        await one.send(make_slice(0))
        await one.report(StepDone)
        await one.report(CheckpointReady)
        await one.send(make_slice(1))
        await one.report(Settled)
        one.rig.topic.publish("drain", b"all rollout batches are trained")
        await one.end()
        assert one.backend.log.count("save") == 1


def resumed(checkpoint: Path, *groups: RolloutSlice, step: int, restored: Sequence[int]) -> TrainOptions:
    """Options of a train stage that goes on from a checkpoint with these groups."""
    checkpoint.mkdir()
    write_groups(checkpoint, groups)
    return TrainOptions(step, 1, str(checkpoint), frozenset(restored))


async def test_a_draft_that_a_killed_run_left_is_no_part_of_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = draft_path(tmp_path / "checkpoints", 1)
    left.mkdir(parents=True)
    (left / "shard").write_text("of other weights")
    async with training(tmp_path, monkeypatch, batch=1, total=1) as one:
        await one.send(make_slice(0))
        await one.report(StepDone)
        saved = Path((await one.report(CheckpointReady)).path)
        assert saved == left
        assert sorted(path.name for path in saved.iterdir()) == ["buffer.msgpack", "weights"]


def aged(group_id: int, version: int) -> RolloutSlice:
    return make_slice(group_id, *(make_sample(i, version=version, reward=float(i)) for i in range(2)))


async def test_restored_groups_are_trained_without_being_delivered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = resumed(tmp_path / "old", aged(4, 3), aged(5, 2), aged(6, 3), step=3, restored=(4, 5))
    async with training(tmp_path, monkeypatch, batch=2, total=4, eta=1, options=options) as one:
        done = await one.report(StepDone)
        assert (done.step, done.groups, done.staleness) == (4, (4, 5), {0: 8, 1: 8})
        assert one.rig.hubs["train"].stats().settled == 0, "no message of a hub was needed"
        assert kept((await one.report(CheckpointReady)).path) == set(), "group 6 was settled before the checkpoint"


async def test_restored_groups_pass_the_gate_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = resumed(tmp_path / "old", aged(4, 1), aged(5, 2), step=3, restored=(4, 5))
    async with training(tmp_path, monkeypatch, batch=2, total=4, eta=1, options=options) as one:
        stale = await one.report(Settled)
        assert (stale.group_id, stale.outcome) == (4, "stale")
        await one.send(aged(7, 3))
        assert (await one.report(StepDone)).groups == (5, 7)


async def test_a_drained_restored_group_is_discarded_and_stays_in_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = resumed(tmp_path / "old", aged(4, 3), step=3, restored=(4,))
    async with training(tmp_path, monkeypatch, batch=2, total=9, eta=1, options=options) as one:
        one.rig.topic.publish("drain", b"interrupted")
        assert (await one.report(Settled)).group_id == 4
        await one.end()
        assert "save" not in one.backend.log, "the checkpoint that it came from holds all of this"
        assert kept(str(tmp_path / "old")) == {4}


async def test_a_group_that_is_promised_and_missing_ends_the_replica(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt stage does not ask for it: without an error the run would wait for it for ever."""
    options = resumed(tmp_path / "old", aged(4, 3), step=3, restored=(4, 5))

    async def train() -> None:
        async with training(tmp_path, monkeypatch, options=options):
            pass

    with pytest.raises(ExceptionGroup) as caught:
        await train()
    assert caught.group_contains(CheckpointError, match="holds 1 of the 2 groups that are to be restored")


async def test_nothing_that_a_checkpoint_holds_complete_is_generated_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the trainer's draft to the resumed prompt stage, which asks for exactly the rest."""
    async with training(tmp_path, monkeypatch, batch=2, total=9, eta=2) as one:
        await one.send(*(make_slice(group_id) for group_id in (0, 1, 3)))
        await one.report(StepDone)
        await one.arrived(3)
        one.rig.topic.publish("drain", b"interrupted")
        saved = await one.report(CheckpointReady)
        await one.report(Settled)
        await one.end()
    ledger = LedgerSnapshot(6, 6, {"trained": 2}, tuple(OpenGroup(g, g) for g in (2, 3, 4, 5)))
    restored = kept(saved.path) & {group.group_id for group in ledger.open}
    assert restored == {3}
    async with prompting(batch=2, eta=2, total=9, snapshot=ledger, restored=restored) as two:
        await two.land(1)
        assert await two.admitted() == [2, 4, 5, 6, 7], "requests for group 3: none"


def lost(tmp_path: Path, *batches: Sequence[int], step: int = 0, **fields: object) -> TrainOptions:
    """Options of a restarted trainer. `batches`: groups of the steps after `step`, which the lost trainer reported."""
    recovery = Recovery(tmp_path, tmp_path / "source")
    for number, groups in enumerate(batches, step + 1):
        recovery.keep(number, [make_slice(group_id) for group_id in groups])
    known = TrainOptions(start_step=step, incarnation=1, begun=True, trained=step + len(batches))
    return msgspec.structs.replace(known, **fields)


async def test_a_restarted_trainer_repeats_unsaved_steps_and_trains_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger has groups 0 to 5 as trained, in three steps, of which the first is in a checkpoint."""
    options = lost(tmp_path, (3, 2), (4, 5), step=1, admitted=8, open=frozenset({6, 7}))
    saving, waiting = {"save_interval": 3}, [make_slice(group_id) for group_id in (0, 6, 2, 5, 7)]
    async with training(
        tmp_path, monkeypatch, total=4, eta=9, options=options, waiting=waiting, checkpoint=saving
    ) as one:
        await one.send(make_slice(1))  # its release was lost later than those of the others
        step, saved = await take(one.reports), await take(one.reports)
        assert (step.step, set(step.groups), saved.step) == (4, {6, 7}, 4)
        assert [list(batch) for batch in one.backend.batches] == [[3, 2], [4, 5], [6, 7]]
        assert [entry for entry in one.backend.log if entry in ("step", "save", "export")] == [
            "step", "step", "save", "export", "step", "export", "save",
        ]  # fmt: skip
        announced = one.rig.announced()
        assert announced is not None
        assert announced.version == 4
        await one.end()
        assert one.rig.hubs["train"].stats().queued == one.rig.hubs["train"].stats().leased == 0


async def test_a_restarted_trainer_begins_at_its_newest_recovery_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = lost(tmp_path, (0,), (1,), (2,), admitted=3)
    Recovery(tmp_path, tmp_path / "source").save(2, lambda directory: directory.mkdir())
    async with training(tmp_path, monkeypatch, batch=1, total=4, eta=9, options=options) as one:
        assert one.backend.log[:2] == ["setup", "load state-00000002"]
        assert one.backend.batches == [[2]]
        await one.send(make_slice(3))
        assert (await one.report(StepDone)).step == 4


async def test_a_trainer_that_is_lost_before_its_first_weights_begins_as_the_first_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = msgspec.structs.replace(lost(tmp_path, (0, 1)), begun=False, trained=0)
    async with training(tmp_path, monkeypatch, total=1, options=options) as one:
        await one.send(make_slice(0), make_slice(1))
        assert (await one.report(StepDone)).groups == (0, 1)
        assert one.backend.batches == [[0, 1]]


async def test_a_step_is_reported_after_its_batch_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with training(tmp_path, monkeypatch, total=2) as one:
        await one.send(make_slice(1), make_slice(0))
        report = await one.report(StepDone)
        kept_batch = Recovery(tmp_path, tmp_path / "source").batch(1)
        assert tuple(slice_.group.group_id for slice_ in kept_batch) == report.groups
