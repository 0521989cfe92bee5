"""What a process of a trainer group runs: the framework that was asked for, with the options that it needs."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import replace

from configs.resolve import resolve
from configs.schema import CheckpointConfig, Config, RunConfig, TrainConfig
from models.train.build import build_backend, build_member
from models.train.dp_group import DpGroup


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize(("backend", "name"), [("fsdp", "FsdpModels"), ("megatron", "MegatronModels")])
def test_background_saves_are_asked_for_and_waited_for(
    backend: str, name: str, async_save: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the flag to the models, and from the trainer's `finish_save` to theirs."""
    asked: list[object] = []

    class Models:
        critic, has_reference, reference_apart, pass_micro_batches = None, False, False, 1

        def __init__(self, spec: object, *, async_save: bool) -> None:
            asked.append(async_save)

        def finish_save(self) -> None:
            asked.append("finished")

    monkeypatch.setitem(sys.modules, f"models.train.{backend}.models", SimpleNamespace(**{name: Models}))
    config = resolve(Config(train=TrainConfig(train_backend=backend)))  # type: ignore[arg-type]
    trainer = build_member(replace(config, checkpoint=CheckpointConfig(async_save=async_save)), 1, DpGroup())
    trainer.setup()
    trainer.finish_save()
    assert asked == [async_save, "finished"]


@pytest.mark.parametrize("member", [False, True])
def test_what_a_loss_of_the_user_draws_begins_with_the_seed_of_the_run(member: bool) -> None:
    def drawn(seed: int) -> float:
        config = resolve(Config(run=RunConfig(seed=seed)))
        _ = build_member(config, 1, DpGroup()) if member else build_backend(config, 1)
        return float(torch.rand(()))

    with torch.random.fork_rng(devices=[]):
        assert drawn(7) == drawn(7) != drawn(8)
