"""A trainer group of two ranks trains as one process does, and goes on after a kill as if there had been none."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from trainer_group_rig import Ranks, Tensors, by_group, small_config, small_sequences, train_batch, until, weights_of

from models.checkpoint import Manifest, commit_directory, draft_path, final_path, write_manifest
from models.errors import BackendMisuse, CheckpointUnavailable, InvalidSequence, TrainStateUnreadable
from models.train.build import build_backend
from models.train.trainer_group.backend import TrainerGroupBackend
from models.train.trainer_group.errors import TrainerGroupClosed

pytestmark = pytest.mark.slow

# What depends on how the shares were packed.
LAYOUT = {"train/micro_batches", "train/padding_frac", "train/shared_prompt_frac"}


@pytest.fixture(autouse=True)
def _paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the process that forks."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))


@pytest.fixture
def ranks(tiny: Path, tmp_path: Path) -> Iterator[Ranks]:
    with Ranks(tmp_path, small_config(tiny)) as running:
        yield running


During = Callable[[str], AbstractContextManager[None]]


def undisturbed(moment: str) -> AbstractContextManager[None]:
    return nullcontext()


def four_batches(backend: TrainerGroupBackend, root: Path, during: During = undisturbed) -> Tensors:
    """The calls of a short run. `during` is told which call comes next, and what it gives is entered around it."""
    train_batch(backend, 0)
    with during("a batch before any save"):
        train_batch(backend, 1, steps=2)
    with during("the first save"):
        backend.save(draft_path(root, 2))
    backend.begin_batch(rollouts=9, steps=1, version=2)
    groups = by_group(small_sequences(2))
    with during("a group"):
        backend.accumulate(groups[0])
    backend.accumulate(groups[1])
    backend.flush()
    backend.discard()
    with during("a batch"):
        train_batch(backend, 2)
    with during("the second save"):
        backend.save(draft_path(root, 3))
    backend.begin_batch(rollouts=9, steps=1, version=3)
    for group in by_group(small_sequences(3)):
        backend.accumulate(group)
    with during("the last step"):
        backend.step()
    with during("the export"):
        return weights_of(backend)


def commit(root: Path, step: int) -> None:
    write_manifest(draft_path(root, step), Manifest(step=step, version=step, run_generation=0))
    commit_directory(draft_path(root, step), final_path(root, step))


def equal(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_two_ranks_train_as_one_process(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    alone, trainer_group = build_backend(small_config(tiny), 4), ranks.backend()
    alone.setup()
    trainer_group.setup()
    for number, steps in ((0, 1), (1, 2)):
        wanted, found = train_batch(alone, number, steps=steps), train_batch(trainer_group, number, steps=steps)
        for want, have in zip(wanted, found, strict=True):
            assert have.keys() == want.keys()
            for key in want.keys() - LAYOUT:
                assert have[key] == pytest.approx(want[key], rel=1e-5, abs=1e-6), key
    sequences = small_sequences(5)
    for one, other in zip(trainer_group.logprobs(sequences), alone.logprobs(sequences), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)

    with pytest.raises(InvalidSequence, match="999"):
        trainer_group.accumulate([replace(sequences[0], tokens=np.full_like(sequences[0].tokens, 999))])
    trainer_group.accumulate(by_group(sequences)[0])
    with pytest.raises(BackendMisuse, match="save while 3 rollouts are being trained"):
        trainer_group.save(tmp_path / "refused")
    trainer_group.discard()
    with pytest.raises(TrainStateUnreadable, match="nowhere"):
        trainer_group.load(tmp_path / "nowhere")
    assert ranks.incarnation == 0, "an error that all ranks raise alike leaves them alive"

    before = weights_of(trainer_group)
    trainer_group.save(tmp_path / "saved")
    train_batch(trainer_group, 2)
    trainer_group.load(tmp_path / "saved")
    equal(weights_of(trainer_group), before)
    for name, tensor in weights_of(alone).items():
        torch.testing.assert_close(before[name], tensor, atol=1e-5, rtol=1e-4)
    trainer_group.close()
    trainer_group.close()
    until(lambda: ranks.incarnation == 1)  # they ended because they were told to
    with pytest.raises(TrainerGroupClosed):
        trainer_group.flush()


def test_an_export_that_nobody_finishes_holds_nobody_up(ranks: Ranks) -> None:
    trainer_group = ranks.backend()
    trainer_group.setup()
    weights = weights_of(trainer_group)
    for name, tensor in trainer_group.export_weights():
        assert torch.equal(tensor, weights[name])
        break
    left = trainer_group.export_weights()
    next(left)
    train_batch(trainer_group, 0)
    with pytest.raises(BackendMisuse, match="ended by another call"):
        for _ in left:
            pass
    trained = weights_of(trainer_group)
    assert any(not torch.equal(trained[name], weights[name]) for name in weights)
    found = {}
    for place, (name, tensor) in enumerate(trainer_group.export_weights()):
        found[name] = tensor.clone()
        if place == 3:
            ranks.kill_now(0)
    equal(found, trained)
    assert ranks.incarnation == 1
    trainer_group.close()


@pytest.fixture
def ranks_of(tiny: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Ranks of the backend that is the test's parameter."""
    with Ranks(tmp_path, small_config(tiny, train_backend=request.param)) as running:
        yield running


@pytest.mark.parametrize(
    ("ranks_of", "rank"),
    [("torch", 0), pytest.param("torch", 1, marks=pytest.mark.full), ("fsdp", 1)],
    indirect=["ranks_of"],
)
def test_a_killed_rank_changes_no_bit(ranks_of: Ranks, tmp_path: Path, rank: int) -> None:
    ranks = ranks_of
    trainer_group = ranks.backend("unbroken")
    trainer_group.setup()
    unbroken = four_batches(trainer_group, tmp_path / "unbroken-checkpoints")
    trainer_group.close()
    until(lambda: ranks.incarnation == 1)

    trainer_group, root = ranks.backend("broken", commit_wait_s=0.0), tmp_path / "checkpoints"
    trainer_group.setup()
    done: list[str] = []
    begun = ranks.incarnation  # 1, or 2 where the ranks of before had just ended when it asked

    def harm(moment: str) -> AbstractContextManager[None]:
        done.append(moment)
        match moment:
            case "a batch before any save":  # all is repeated, from the initial weights
                return ranks.killed_within(rank)
            case "the first save":  # is not interrupted
                return nullcontext()
            case "a group":  # between the save and its commit: from the draft
                ranks.kill_now(rank)
                return nullcontext()
            case "a batch":  # from the committed checkpoint
                commit(root, 2)
                return ranks.killed_within(rank)
            case "the export":  # after a save that was never whole: from the one before, and it is made again
                for state in draft_path(root, 3).rglob("state.json"):
                    state.unlink()
                ranks.kill_now(rank)
                return nullcontext()
            case _:  # a save, which is made again; and a step
                return ranks.killed_within(rank)

    equal(four_batches(trainer_group, root, harm), unbroken)
    assert len(done) == 7
    assert ranks.incarnation == begun + 6
    assert list(draft_path(root, 3).rglob("state.json"))
    assert [point.directory for point in trainer_group._journal.points] == [draft_path(root, n) for n in (2, 3)]
    trainer_group.close()


def test_a_rank_that_stands_still_ends_the_trainer_group_within_the_timeout(tiny: Path, tmp_path: Path) -> None:
    with Ranks(tmp_path, small_config(tiny, timeout_s=6.0)) as ranks:
        trainer_group = ranks.backend()
        trainer_group.setup()
        for rank in (1, 0):
            incarnation = ranks.incarnation
            ranks.signal(rank, signal.SIGSTOP)
            if rank == 1:
                train_batch(trainer_group, 0)
            else:  # nobody calls: the other one misses the signs of life
                until(lambda before=incarnation: ranks.incarnation > before)
                train_batch(trainer_group, 1)
            assert ranks.incarnation > incarnation
        trainer_group.close()


def test_a_model_that_cannot_be_loaded_is_the_users_error(tmp_path: Path) -> None:
    with Ranks(tmp_path, small_config(tmp_path / "no-model")) as ranks:
        trainer_group = ranks.backend()
        with pytest.raises(CheckpointUnavailable, match="no-model"):
            trainer_group.setup()
        ended = ranks.processes
        trainer_group.close()
        until(lambda: all(one.exitcode == 0 for one in ended))
