"""Runs that are saved in one parallel layout and resumed in others, in one process of a trainer group.

Its parent may import this: Megatron itself is imported only where a run is made.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from models.errors import TrainStateUnreadable
from models.families.source import CheckpointTensors
from models.train.trainer import Trainer
from tests.models.train import rig
from tests.models.train.megatron.megatron_rig import make_sequences
from tests.models.train.rig import joined, weights_of

AFTER = range(2, 5)  # batches behind the save

TP: dict[str, Any] = {"tensor_model_parallel_size": 2}
PP: dict[str, Any] = {"pipeline_model_parallel_size": 2}
EP: dict[str, Any] = {"expert_model_parallel_size": 2}
DP: dict[str, Any] = {}
# Several buckets, whose ends are not multiples of 128.
BUCKETS: dict[str, Any] = {"overlap_grad_reduce": True, "megatron_args": {"bucket_size": 1500}}
LATE: dict[str, Any] = {**BUCKETS, "overlap_param_gather": True}
PLAIN: dict[str, Any] = {"use_distributed_optimizer": False}
BF16: dict[str, Any] = {"train_dtype": "bfloat16"}


@dataclass(frozen=True)
class Run:
    """Train `batches`, and save under `saves` on the way; or load what is saved under `loads` first."""

    name: str
    layout: dict[str, Any]
    batches: range = AFTER
    model: str = "untied"
    saves: str = ""
    loads: str = ""
    asynchronous: bool = False
    spoilt: bool = False  # by one tensor that counts the steps of all parameters
    fields: dict[str, Any] = field(default_factory=dict)


def unbroken(name: str, layout: dict[str, Any], **others: Any) -> list[Run]:
    """A run that is saved on its way and goes on."""
    return [Run(name, layout, range(AFTER.stop), saves=name, **others)]


def resumed(saved: str, name: str, layout: dict[str, Any], **others: Any) -> Run:
    return Run(f"{saved}_at_{name}", layout, AFTER, loads=saved, **others)


MOE: dict[str, Any] = {"model": "experts"}
TIED: dict[str, Any] = {"model": "tied"}
_RENEWED: dict[str, Any] = {"use_kl_loss": True, "kl_loss_coef": 0.1, "ref_update_interval": 2}
CRITIC: dict[str, Any] = {"model": "tied", "fields": rig.PPO | _RENEWED}
# By the number of processes. A run whose name holds "_at_" is compared with the one that it goes on from.
FEW: dict[int, list[Run]] = {
    2: [
        *unbroken("tensor", TP),
        resumed("tensor", "pipeline", PP),
        resumed("tensor", "tensor", TP),
        *unbroken("plain", {**PLAIN, "weight_decay": 0.1}),
        *unbroken("buckets", LATE, **TIED),
        *unbroken("pipeline", {**PP, **PLAIN}, **TIED, asynchronous=True),
        resumed("pipeline", "buckets", BUCKETS, **TIED),
        *unbroken("experts", EP, **MOE),
        resumed("experts", "data", {**DP, **PLAIN}, **MOE),
        *unbroken("critic", DP, **CRITIC),
        resumed("critic", "tensor", TP, **CRITIC),
        *unbroken("half", {**DP, **BF16}),
    ],
    1: [resumed("tensor", "one", DP), resumed("tensor", "spoilt", DP, spoilt=True)],
}
MORE: dict[int, list[Run]] = {  # behind those
    2: [
        resumed("tensor", "data", DP),
        resumed("tensor", "plain", PLAIN),
        resumed("plain", "tensor", {**TP, "weight_decay": 0.1}),
        resumed("buckets", "pipeline", PP, **TIED),
        resumed("experts", "pipeline", PP, **MOE),
        *unbroken("stages", PP, model="deepseek"),  # the first stage has no experts, and no optimizer for them
        resumed("stages", "experts", EP, model="deepseek"),
        resumed("half", "plain", {**PLAIN, **BF16}),
    ],
    1: [resumed("experts", "one", DP, **MOE), resumed("critic", "one", PLAIN, **CRITIC)],
}


def make_trainer(run: Run, models: Path) -> Trainer:
    from models.train.megatron.models import MegatronModels

    # The warm-up ends behind the save: the count of updates is part of the state.
    fields = {"max_tokens_per_gpu": 64, "lr_warmup_iters": 3, **run.layout, **run.fields}
    trainer = Trainer(rig.make_spec(models / run.model, **fields), MegatronModels)
    trainer.setup()
    return trainer


def train_batch(trainer: Trainer, batch: int) -> dict[str, float]:
    return rig.train_batch(trainer, make_sequences(batch, per_group=2))[0]


def save(trainer: Trainer, directory: Path, *, asynchronous: bool) -> None:
    """An asynchronous one is held up until the next batches are trained."""
    if not asynchronous:
        trainer.save(directory)
        return
    from models.train.megatron.checkpoint_files import Plan

    write, trained, before = Plan.write, threading.Event(), state_of(trainer)

    def held_up(*args: Any) -> None:
        assert trained.wait(120)
        write(*args)

    Plan.write = held_up  # type: ignore[method-assign]
    trainer._models.checkpoints.asynchronous = True
    trainer.save(directory)
    trainer._models.checkpoints.asynchronous = False
    Plan.write = write  # type: ignore[method-assign]
    for batch in (7, 8):
        train_batch(trainer, batch)
    assert not trainer._models.checkpoints.saving.pending.done()
    assert not (directory / "megatron/state.json").exists()
    trained.set()
    trainer.load(directory)  # waits for it
    assert all(torch.equal(old, new) for old, new in zip(before, state_of(trainer), strict=True))
    assert (directory / "megatron/state.json").exists()
    assert trainer._models.checkpoints.saving.pending is None


def spoil(trainer: Trainer) -> None:
    """What Megatron-core 0.16.1 does when it loads."""
    inner = trainer._models.policy.optimizer.chained_optimizers[0].optimizer
    shared = next(iter(inner.state.values()))["step"]
    for state in inner.state.values():
        state["step"] = shared


def make(run: Run, models: Path, states: Path, out: Path) -> None:
    """Make a run, and write what came of it."""
    rank = torch.distributed.get_rank()
    trainer = make_trainer(run, models)
    if run.loads:
        trainer.load(states / run.loads)
    if run.spoilt:
        spoil(trainer)
    metrics = {}
    for batch in run.batches:
        if run.saves and batch == AFTER.start:
            save(trainer, states / run.saves, asynchronous=run.asynchronous)
        metrics[batch] = train_batch(trainer, batch)
    weights = weights_of(trainer)
    if rank == 0:
        rig.write(out, run.name, metrics, weights)


def state_of(trainer: Trainer) -> list[torch.Tensor]:
    """All that training changes."""
    inner = trainer._models.policy.optimizer.chained_optimizers[0].optimizer
    states = [tensor.clone() for state in inner.state.values() for tensor in state.values()]
    return [*weights_of(trainer).values(), *states, torch.get_rng_state()]


def meet_faults(models: Path, states: Path, out: Path) -> None:
    """Load what cannot be loaded: the messages, and whether anything was changed."""
    trainer = make_trainer(Run("faults", DP), models)
    train_batch(trainer, 0)
    before = state_of(trainer)
    found: dict[str, str] = {}
    for name in sorted(path.name for path in (states / "faults").iterdir()):
        try:
            trainer.load(states / "faults" / name)
        except TrainStateUnreadable as error:
            found[name] = str(error)
        after = state_of(trainer)
        assert len(before) == len(after)
        assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True)), name
    critic = make_trainer(Run("critic", DP, **CRITIC), models)
    try:
        critic.load(states / "buckets")
    except TrainStateUnreadable as error:
        found["critic"] = str(error)
    (out / "faults.json").write_text(json.dumps(found))


def meet_random(models: Path, states: Path) -> None:
    """Saving and loading in one layout restores random streams, and a state that was never trained."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    from models.train.megatron.checkpoint_files import Plan

    trainer = make_trainer(Run("random", DP), models)
    before = {name: state.clone() for name, state in get_cuda_rng_tracker().get_states().items()}
    trainer.save(states / "random")
    drawn = torch.rand(3)
    with get_cuda_rng_tracker().fork():
        torch.rand(3)
    train_batch(trainer, 0)
    trainer.save(states / "random-later")  # an older state stays beside it
    trainer.load(states / "random")
    assert torch.equal(torch.rand(3), drawn)
    for name, state in get_cuda_rng_tracker().get_states().items():
        assert torch.equal(state, before[name]), name
    inner = trainer._models.policy.optimizer.chained_optimizers[0].optimizer
    assert {float(state["step"]) for state in inner.state.values()} == {0.0}
    assert all(not state["exp_avg"].any() for state in inner.state.values())
    write = Plan.write

    def late(*args: Any) -> None:
        while torch.distributed.is_initialized():
            time.sleep(0.01)
        write(*args)

    Plan.write = late  # type: ignore[method-assign]
    trainer._models.checkpoints.asynchronous = True
    trainer.save(states / "last")  # the process ends


def meet_full_disk(models: Path, states: Path) -> None:
    """What one process cannot write fails in all of them, leaves no state behind, and does not hinder the next."""
    from models.train.huggingface import hf_files
    from models.train.megatron.checkpoint_files import Plan

    trainer = make_trainer(Run("full", TP), models)
    write_bucket, write_tensors = Plan._write_bucket, hf_files.write_tensors
    last = torch.distributed.get_rank() == 1

    def full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(28, "No space left on device")

    def fails(words: str) -> None:
        with pytest.raises(OSError, match=words):
            trainer.save(states / "full")
        assert not (states / "full/megatron/state.json").exists()

    if last:
        Plan._write_bucket = full  # type: ignore[method-assign]
    fails("No space left on device")
    Plan._write_bucket = write_bucket  # type: ignore[method-assign]
    if not last:
        hf_files.write_tensors = full
    fails("in Hugging Face format" if last else "No space left on device")
    hf_files.write_tensors = write_tensors
    trainer.save(states / "full")
    trainer.load(states / "full")


def meet_others(states: Path) -> None:
    """Megatron's own loader finds the whole tensors."""
    from megatron.core import dist_checkpointing

    tensors = dist_checkpointing.load_plain_tensors(str(states / "experts" / "megatron"))
    with CheckpointTensors(states / "experts" / "hf") as stored:
        hf = {name: stored.whole(name) for name in stored.files}
    assert torch.equal(tensors["decoder.final_layernorm.weight"], hf["model.norm.weight"])
    assert tensors["optimizer.state.exp_avg.decoder.final_layernorm.weight"].abs().max() > 0


def damage(states: Path) -> None:
    """Copies of a state that cannot be loaded, by what is wrong with them."""

    def copy(name: str, change: Callable[[Path], None]) -> None:
        target = states / "faults" / name
        shutil.copytree(states / "plain", target)
        change(target)

    def edit(path: Path, **fields: object) -> None:
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        for at in range(1000, len(content), 997):
            content[at] ^= 0xFF
        path.write_bytes(content)

    (states / "faults").mkdir()
    (states / "faults/nothing").mkdir()
    (states / "faults/torch/trainer").mkdir(parents=True)
    copy("unfinished", lambda at: (at / "megatron/state.json").unlink())
    copy("cut", lambda at: os.truncate(at / "megatron/__1_0.distcp", 1000))
    copy("missing", lambda at: (at / "megatron/__0_0.distcp").unlink())
    copy("flipped", lambda at: flip(at / "megatron/__1_0.distcp"))
    copy("no_index", lambda at: (at / "megatron/index.json").write_bytes(b"{"))
    copy("newer", lambda at: edit(at / "megatron/state.json", format_version=99))
    shutil.copytree(states / "tensor", states / "faults/half")
    shutil.rmtree(states / "faults/half/megatron")
    shutil.copytree(states / "half/megatron", states / "faults/half/megatron")
    shutil.copytree(states / "experts", states / "faults/experts")


def work(models: str, states: str, out: str, more: str, rank: int, world: int, rendezvous: str) -> None:
    """Entry point of a spawned process: all runs of this number of processes; alone those of MORE if `more` is set."""
    if world == 1 and not more:
        damage(Path(states))
    with joined(rank, world, rendezvous, 120):
        for run in (MORE if more else FEW)[world]:
            make(run, Path(models), Path(states), Path(out))
        if more:
            return
        if world == 2:
            meet_full_disk(Path(models), Path(states))
        if world == 1:
            meet_faults(Path(models), Path(states), Path(out))
            meet_random(Path(models), Path(states))
            meet_others(Path(states))
