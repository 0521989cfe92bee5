"""Saves: what they keep of the groups that wait, what a resumed trainer does with them, saves in the background."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.checkpoint import CheckpointError, draft_path
from stages.base import TrainOptions
from stages.errors import SavedBatchError
from stages.messages import CheckpointReady, Extra, Float32Array, RolloutSlice, Settled, StepDone, wire
from stages.train import checkpoints, saved_groups
from stages.train.batch import slice_sequences
from stages.train.checkpoints import Recovery, remove_superseded
from stages.train.saved_groups import (
    SavedBatches,
    load_batch,
    read_groups,
    restorable,
    save_batch,
    save_train_data,
    write_groups,
)
from tests.stages.stage_rig import ended_by, idle, make_config, make_sample, make_slice, rewrite, take, until
from tests.stages.train_rig import Training, aged
from transport.codec import Codec


async def test_a_save_in_the_background_is_reported_before_the_next_step(training: Training) -> None:
    saving = {"save_interval": 2, "async_save": True}
    async with training(batch=1, total=5, eta=9, checkpoint=saving) as one:
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
        order = [entry for entry in one.backend.log if entry in ("step", "save", "finish save")]
        assert " ".join(order) == "step step save step finish save step save step finish save save finish save"
        await one.end()
        await one.stage.close()
        assert one.backend.log[-1] == "close"


def kept(checkpoint: str) -> set[int]:
    return set(restorable(Path(checkpoint), 2))


async def test_a_save_in_the_background_keeps_the_batch_that_trains_meanwhile(training: Training) -> None:
    """Its ledger is committed before the report of the next step: those groups are open in it, not in the weights."""
    saving: dict[str, object] = {"save_interval": 1, "async_save": True}
    async with training(batch=1, total=2, eta=2, checkpoint=saving) as one:
        await one.send(make_slice(0))
        await one.report(StepDone)
        one.backend.may_step.clear()
        await one.send(make_slice(1), make_slice(2))
        await one.arrived(3)
        one.backend.may_step.set()
        assert kept((await one.report(CheckpointReady)).path) == {1, 2}
        assert (await one.report(StepDone)).groups == (1,)


async def test_a_drain_saves_what_was_collected_even_if_nothing_was_trained_since(
    training: Training, tmp_path: Path
) -> None:
    saving: dict[str, object] = {"save_interval": 1}
    async with training(batch=2, total=5, eta=2, checkpoint=saving) as one:
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
        assert one.backend.log[-2:] == ["discard", "save"]
        assert kept(str(tmp_path / "committed")) == set()
        assert kept(second.path) == {2}, "of the unfinished batch"
        left = await one.report(Settled)  # after the checkpoint, so that a resume undoes it
        assert (left.group_id, left.outcome, left.detail) == (2, "discarded", "interrupted")
        await one.send(make_slice(3))
        assert (await one.report(Settled)).group_id == 3
        await one.end()


async def test_a_drain_begins_no_further_batch_with_what_waits(training: Training) -> None:
    async with training(batch=2, total=5, eta=9, hold=["may_step"]) as one:
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


def resumed(checkpoint: Path, *groups: RolloutSlice, step: int, restored: Sequence[int]) -> TrainOptions:
    """Options of a train stage that goes on from a checkpoint with these groups."""
    checkpoint.mkdir()
    write_groups(checkpoint, groups)
    return TrainOptions(step, 1, str(checkpoint), frozenset(restored))


async def test_a_draft_that_a_killed_run_left_is_no_part_of_a_save(training: Training, tmp_path: Path) -> None:
    """And a step is reported after its batch is kept."""
    left = draft_path(tmp_path / "checkpoints", 1)
    left.mkdir(parents=True)
    (left / "shard").write_text("of other weights")
    async with training(total=1) as one:
        await one.send(make_slice(1), make_slice(0))
        report = await one.report(StepDone)
        batch = Recovery(tmp_path, tmp_path / "source").batch(1)
        assert tuple(slice_.group.group_id for slice_ in batch) == report.groups
        saved = Path((await one.report(CheckpointReady)).path)
        assert saved == left
        assert sorted(path.name for path in saved.iterdir()) == ["buffer.msgpack", "weights"]


async def test_restored_groups_are_trained_without_being_delivered(training: Training, tmp_path: Path) -> None:
    """They pass the gate again: group 3 is too old."""
    options = resumed(tmp_path / "old", aged(3, 1), aged(4, 3), aged(5, 2), aged(6, 3), step=3, restored=(3, 4, 5))
    async with training(batch=2, total=4, eta=1, options=options) as one:
        stale = await one.report(Settled)
        assert (stale.group_id, stale.outcome) == (3, "stale")
        done = await one.report(StepDone)
        assert (done.step, done.groups, done.staleness) == (4, (4, 5), {0: 8, 1: 8})
        assert one.rig.hubs["train"].stats().settled == 0, "no message of a hub was needed"
        assert kept((await one.report(CheckpointReady)).path) == set(), "group 6 was settled before the checkpoint"


async def test_a_group_that_is_promised_and_missing_ends_the_replica(training: Training, tmp_path: Path) -> None:
    """The prompt stage does not ask for it: without an error the run would wait for it for ever."""
    options = resumed(tmp_path / "old", aged(4, 3), step=3, restored=(4, 5))
    with ended_by(CheckpointError, "holds 1 of 2 groups to restore"):
        async with training(options=options):
            pass


def lost(tmp_path: Path, *batches: Sequence[int], step: int = 0, **fields: object) -> TrainOptions:
    """Options of a restarted trainer. `batches`: groups of the steps after `step`, which the lost trainer reported."""
    recovery = Recovery(tmp_path, tmp_path / "source")
    for number, groups in enumerate(batches, step + 1):
        recovery.keep(number, [make_slice(group_id) for group_id in groups])
    known = TrainOptions(start_step=step, incarnation=1, begun=True, trained=step + len(batches))
    return msgspec.structs.replace(known, **fields)


async def test_a_restarted_trainer_repeats_unsaved_steps_and_trains_nothing_twice(
    training: Training, tmp_path: Path
) -> None:
    """The ledger has groups 0 to 5 as trained, in three steps, of which the first is in a checkpoint."""
    options = lost(tmp_path, (3, 2), (4, 5), step=1, admitted=8, open=frozenset({6, 7}))
    saving, waiting = {"save_interval": 3}, [make_slice(group_id) for group_id in (0, 6, 2, 5, 7)]
    async with training(total=4, eta=9, options=options, waiting=waiting, checkpoint=saving) as one:
        await one.send(make_slice(1))  # its release was lost later than those of the others
        step, saved = await take(one.reports), await take(one.reports)
        assert (step.step, set(step.groups), saved.step) == (4, {6, 7}, 4)
        assert [list(batch) for batch in one.backend.batches] == [[3, 2], [4, 5], [6, 7]]
        assert [entry for entry in one.backend.log if entry in ("step", "save", "export")] == [
            "step", "step", "save", "export", "step", "export", "save",
        ]  # fmt: skip
        assert one.rig.announced().version == 4
        await one.end()
        assert one.rig.hubs["train"].stats().queued == one.rig.hubs["train"].stats().leased == 0


async def test_a_restarted_trainer_begins_at_its_newest_recovery_point(training: Training, tmp_path: Path) -> None:
    options = lost(tmp_path, (0,), (1,), (2,), admitted=3)
    Recovery(tmp_path, tmp_path / "source").save(2, lambda directory: directory.mkdir())
    async with training(batch=1, total=4, eta=9, options=options) as one:
        assert one.backend.log[:2] == ["setup", "load state-00000002"]
        assert one.backend.batches == [[2]]
        await one.send(make_slice(3))
        assert (await one.report(StepDone)).step == 4


async def test_a_trainer_that_is_lost_before_its_first_weights_begins_as_the_first_did(
    training: Training, tmp_path: Path
) -> None:
    options = msgspec.structs.replace(lost(tmp_path, (0, 1)), begun=False, trained=0)
    async with training(total=1, options=options) as one:
        await one.send(make_slice(0), make_slice(1))
        assert (await one.report(StepDone)).groups == (0, 1)
        assert one.backend.batches == [[0, 1]]


# Rollout batches on disk: what comes back, under which ids, and what may not be trained.


def batches(template: str, **changes: Any) -> SavedBatches:
    rollout = {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "num_rollout": 9, **changes}
    bound, debug = {"max_staleness": rollout.pop("max_staleness", 1)}, {"load_debug_rollout_data": template}
    return SavedBatches(make_config(rollout=rollout, asynchrony=bound, debug=debug))


def test_a_batch_comes_back_in_the_order_of_its_groups_under_dense_ids(tmp_path: Path) -> None:
    template = str(tmp_path / "kept" / "{rollout_id:04d}.msgpack")
    saved = [make_slice(group, make_sample(0, reward=1.0, version=1), make_sample(1, reward=0.0)) for group in (9, 4)]
    save_batch(template, 2, saved)
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["0002.msgpack"]
    assert [slice_.group.group_id for slice_ in load_batch(template, 2)] == [4, 9]
    source = batches(template, max_staleness=2)
    first, second = source.group(4), source.group(5)
    assert (first.group.group_id, second.group.group_id) == (4, 5)
    assert (first.group.prompt_index, second.group.prompt_index) == (4, 9), "the saved groups 4 and 9"
    for ours, theirs in zip(second.samples, saved[0].samples, strict=True):
        for name in ours.__struct_fields__:
            assert np.array_equal(getattr(ours, name), getattr(theirs, name)), name


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rollout_batch_size": 3}, "holds 2 groups, but --rollout-batch-size is 3; set it to 2"),
        ({"n_samples_per_prompt": 4}, "groups of 2 rollouts, but --n-samples-per-prompt is 4; set it to 2"),
    ],
)
def test_another_shape_is_refused_with_the_right_one(tmp_path: Path, changes: dict[str, int], words: str) -> None:
    template = str(tmp_path / "{rollout_id}")
    save_batch(template, 0, [make_slice(0), make_slice(1)])
    with pytest.raises(SavedBatchError, match=words):
        batches(template, **changes).group(0)


def test_no_token_is_trained_that_is_too_old(tmp_path: Path) -> None:
    template = str(tmp_path / "{rollout_id}")
    save_batch(template, 3, [make_slice(0), make_slice(1)])  # of version 0
    with pytest.raises(SavedBatchError, match=r"token of version 0, .* --max-staleness to at least 3"):
        batches(template, max_staleness=2).group(6)
    assert batches(template, max_staleness=3).group(6).group.group_id == 6


async def test_what_the_trainer_is_given_is_written_as_a_table_of_each_batch(
    training: Training, tmp_path: Path
) -> None:
    """Rewards 3 and 1 of a group: 1 above and 1 below their mean. The prompt and a tool's text have no advantage."""
    template = str(tmp_path / "dump" / "{rollout_id:02d}.parquet")
    called = make_sample(1, reward=1.0, runs=[(0, 2), (-1, 1)], mask=[1, 1, 0], log_probs=[-0.25, -0.5, 0.0])
    plain = {"disable_grpo_std_normalization": True}
    async with training(total=2, eta=2, debug={"save_debug_train_data": template}, algorithm=plain) as one:
        await one.send(make_slice(1), make_slice(0, make_sample(0, reward=3.0, status="truncated"), called))
        await one.report(StepDone)
        await one.send(make_slice(2), make_slice(3))
        await one.report(StepDone)
        await one.end()
    assert [path.name for path in sorted((tmp_path / "dump").iterdir())] == ["00.parquet", "01.parquet"]
    rows = pq.read_table(template.format(rollout_id=0)).to_pylist()
    assert [(row["group_id"], row["rollout_id"]) for row in rows] == [(0, 0), (0, 1), (1, 2), (1, 3)]
    first, second, *_ = rows
    assert (first["reward"], first["truncated"], second["truncated"]) == (3.0, True, False)
    assert first["advantages"] == [0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    assert second["tokens"] == [1, 2, 3, 10, 11, 12]
    assert second["prompt_length"] == 3
    assert second["loss_mask"] == [0, 0, 0, 1, 1, 0]
    assert second["advantages"] == [0.0, 0.0, 0.0, -1.0, -1.0, 0.0]
    assert second["versions"] == [-1, -1, -1, 0, 0, -1]
    assert second["rollout_log_probs"] == [0.0, 0.0, 0.0, -0.25, -0.5, 0.0]
    assert type(first["turn_total"]) is float, "a column has one type in all files"
    assert "teacher_log_probs" not in first, "no column for what no sequence has"
    later = pq.read_table(template.format(rollout_id=1))
    assert later.column("group_id").to_pylist() == [2, 2, 3, 3]


def test_rows_are_in_the_order_of_groups_and_rollouts_whenever_they_came(tmp_path: Path) -> None:
    came = [one for group in (5, 4) for one in reversed(slice_sequences(make_config(), make_slice(group)))]
    save_train_data(str(tmp_path / "{rollout_id}"), 3, came)
    assert pq.read_table(tmp_path / "3").column("rollout_id").to_pylist() == [8, 9, 10, 11]


def test_a_table_that_cannot_be_written_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/0\.parquet cannot be written"):
        save_train_data(str(tmp_path / "file" / "{rollout_id}.parquet"), 0, [])


def test_no_flipped_bit_of_a_batch_loads(tmp_path: Path) -> None:
    template, file = str(tmp_path / "{rollout_id}"), tmp_path / "0"
    save_batch(template, 0, groups(4, 9))
    whole = file.read_bytes()

    @settings(max_examples=300, deadline=None)
    @given(st.integers(0, 8 * len(whole) - 1))
    def check(bit: int) -> None:
        rewrite(file, whole[: bit // 8] + bytes([whole[bit // 8] ^ (1 << bit % 8)]) + whole[bit // 8 + 1 :])
        with pytest.raises(SavedBatchError, match=r"its messages are others|its checksum differs"):
            load_batch(template, 0)
        rewrite(file, whole[: bit // 8])
        with pytest.raises(SavedBatchError, match=f"{file} cannot be read as a batch"):
            load_batch(template, 0)

    check()
    with pytest.raises(SavedBatchError, match="cannot be read"):
        load_batch(template, 1)


def test_files_of_before_the_checksum_load_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    template = str(tmp_path / "{rollout_id}")
    save_batch(template, 0, groups(4, 9))
    write_groups(tmp_path, groups(4, 9))
    load_batch(template, 0)
    assert caplog.text == ""
    for file in (tmp_path / "0", tmp_path / saved_groups.BUFFER_FILE):
        file.write_bytes(saved_groups.fingerprint(RolloutSlice) + file.read_bytes()[16:-16])
    assert [slice_.group.group_id for slice_ in load_batch(template, 0)] == [4, 9]
    assert f"{tmp_path / '0'} has no checksum" in caplog.text
    assert restorable(tmp_path, 2) == {4, 9}
    assert [lease.message.group.group_id for lease in read_groups(tmp_path, {9})] == [9]


def test_the_format_names_the_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of a program with other messages is refused, not read as something else."""

    class Other(msgspec.Struct):
        group: int

    template = str(tmp_path / "{rollout_id}")
    monkeypatch.setattr(saved_groups, "_FORMAT", saved_groups.fingerprint(Other))
    save_batch(template, 0, [make_slice(0)])
    write_groups(tmp_path, groups(1))
    monkeypatch.undo()
    with pytest.raises(SavedBatchError, match="its messages are others"):
        load_batch(template, 0)
    assert restorable(tmp_path, 2) == frozenset(), "groups of a checkpoint are generated again"


# The file of groups in a checkpoint: what comes back, and what is left to be generated again.


def groups(*ids: int, n_samples: int = 2) -> list[RolloutSlice]:
    """Groups of which no two are equal, with every kind of field filled in."""
    return [
        make_slice(
            group_id,
            *(
                make_sample(
                    index,
                    runs=[(group_id, 3), (group_id + 1, index)],
                    mask=[1, 0, 1] + [1] * index,
                    reward=group_id / 7,
                    reward_parts={"form": 0.25},
                    teacher_log_probs=wire([-1.5] * (6 + index), Float32Array),
                    extras={"image": np.arange(group_id * 6, dtype="<u2").reshape(3, 2, -1).view(Extra)},
                )
                for index in range(n_samples)
            ),
            metadata='{"level": 3}',
        )
        for group_id in ids
    ]


def test_groups_come_back_as_they_were(tmp_path: Path) -> None:
    written = groups(7, 2, 9)
    write_groups(tmp_path, written)
    assert restorable(tmp_path / "elsewhere", 2) == frozenset(), "there is no such file"
    assert restorable(tmp_path, 2) == {2, 7, 9}
    assert [lease.message.group.group_id for lease in read_groups(tmp_path, {9, 7})] == [7, 9]
    found = read_groups(tmp_path, {2, 7, 9})
    same = Codec(RolloutSlice).encode
    assert [same(lease.message) for lease in found] == [same(one) for one in written]
    assert all(isinstance(s.log_probs, Float32Array) for lease in found for s in lease.message.samples)
    for lease in found:
        lease.done()


@pytest.mark.parametrize("size", [10, 40, 120])
def test_a_file_that_ends_too_early_is_an_error_and_never_a_shorter_list(tmp_path: Path, size: int) -> None:
    write_groups(tmp_path, groups(1, 2))
    with (tmp_path / saved_groups.BUFFER_FILE).open("r+b") as file:
        file.truncate(size)
    with pytest.raises(CheckpointError, match=r"buffer\.msgpack .*; use another checkpoint"):
        read_groups(tmp_path, {1, 2})


# Recovery files of the trainer: batches since the newest state, and when a recovery point is worth its time.


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def made(tmp_path: Path, clock: Clock, *, model_bytes: int = 0) -> Recovery:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"\0" * model_bytes)
    found = Recovery(tmp_path / "run", model, clock)
    found.clear()
    return found


def names(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "run" / "trainer").glob("*"))


def state(directory: Path) -> None:
    directory.mkdir()
    (directory / "weights").write_bytes(b"1234")


def test_a_recovery_point_takes_the_place_of_all_before_it(tmp_path: Path) -> None:
    kept = made(tmp_path, Clock())
    for step in (1, 2, 3):
        kept.keep(step, [make_slice(group_id) for group_id in (7, step)])
    assert [slice_.group.group_id for slice_ in kept.batch(2)] == [7, 2], "in the order of training"
    kept.save(2, state)
    assert names(tmp_path) == ["batch-00000003.msgpack", "state-00000002"]
    kept.save(3, state)
    assert names(tmp_path) == ["state-00000003"]
    assert kept.newest_state(3) == (3, tmp_path / "run" / "trainer" / "state-00000003")
    assert kept.newest_state(2) is None, "the ledger does not count its step"
    for step in (4, 5):
        kept.keep(step, [make_slice(step)])
    remove_superseded(tmp_path / "run", 4)
    assert names(tmp_path) == ["batch-00000005.msgpack"], "a committed checkpoint holds the others"
    remove_superseded(tmp_path / "run", 5)
    assert names(tmp_path) == []
    remove_superseded(tmp_path / "run", 6)


def test_a_batch_is_kept_while_those_of_a_committed_checkpoint_are_removed(tmp_path: Path) -> None:
    """The trainer writes in one process, the controller removes in another."""
    kept, group, steps = made(tmp_path, Clock()), [make_slice(1)], 500

    def keeps() -> None:
        for step in range(1, steps):
            kept.keep(step, group)
            assert kept.batch(step)
            remove_superseded(tmp_path / "run", step)

    with ThreadPoolExecutor(1) as threads:
        trainer = threads.submit(keeps)
        while not trainer.done():
            remove_superseded(tmp_path / "run", 0)
        trainer.result()
    assert names(tmp_path) == []


def due_at(kept: Recovery, clock: Clock, now: float) -> bool:
    """Whether a recovery point is due then, and was not a second before."""
    clock.now = now - 1.0
    before = kept.due()
    clock.now = now
    return kept.due() and not before


def test_recovery_points_take_at_most_a_fiftieth_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    kept = made(tmp_path, clock)
    kept.keep(1, [make_slice(0)])
    assert due_at(kept, clock, 60.0)
    kept.saved(10.0)  # a checkpoint, which took that long
    assert due_at(kept, clock, 560.0)
    # The first one of a large model waits for its size: 8000 bytes, 80 s, so every 4000 s.
    monkeypatch.setattr(checkpoints, "DISK_BYTES_PER_S", 100.0)
    (tmp_path / "large").mkdir()
    kept = made(tmp_path / "large", clock, model_bytes=1000)
    kept.keep(1, [make_slice(0)])
    assert due_at(kept, clock, 4560.0)


def test_no_recovery_point_fills_the_disk_or_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    kept = made(tmp_path, clock)
    kept.keep(1, [make_slice(0)])

    def full(directory: Path) -> None:
        directory.mkdir()
        raise CheckpointError("no space left")

    kept.save(1, full)
    assert names(tmp_path) == ["batch-00000001.msgpack"]
    clock.now = 1e6
    assert not kept.due(), "it is not tried again"

    monkeypatch.setattr(checkpoints, "STATE_FACTOR", 1 << 60)
    (tmp_path / "model" / "model.safetensors").write_bytes(b"\0" * 1000)
    monkeypatch.setattr(checkpoints, "DISK_BYTES_PER_S", 1e300)
    small = Recovery(tmp_path / "run", tmp_path / "model", clock)
    clock.now = 2e6
    assert not small.due()


def test_a_full_disk_costs_the_recovery_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recovery = Recovery(tmp_path, tmp_path)
    recovery.keep(1, [])
    files = checkpoints.write_batch

    def full(path: Path, groups: object) -> None:
        raise CheckpointError(f"no room for {path}")

    monkeypatch.setattr(checkpoints, "write_batch", full)
    recovery.keep(2, [])
    assert not recovery.home.exists(), "its room is free for the run"
    assert "step 2 could not be kept" in caplog.text
    monkeypatch.setattr(checkpoints, "write_batch", files)
    recovery.keep(3, [])
    assert not recovery.home.exists(), "without batch 2, batch 3 is of no use"
    assert not recovery.due()
    with pytest.raises(SavedBatchError, match=r"batch-00000001.msgpack cannot be read .* --resume"):
        recovery.batch(1)
