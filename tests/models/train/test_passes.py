"""How many micro-batches go through the models at one time, and how often a reference takes the policy's place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from sequences import behind, sequence

from configs.schema.algorithm import AlgorithmConfig, CorrectionConfig, DistillConfig
from configs.schema.train import TrainConfig
from models.algorithms.tokens import StepStatistics
from models.train.dp_group import DpGroup, Float32Array
from models.train.interface import TrainSequence
from models.train.model_set import Scored, UpdateResult
from models.train.spec import TrainSpec
from models.train.step.micro_batch_loss import StepTotals
from models.train.step.micro_batches import MicroBatch
from models.train.step.packing import Packing
from models.train.trainer import Trainer
from tests.models.corrections import corrected


class Recorder:
    """Models that write down what they are asked, and find 0 everywhere. One data-parallel rank."""

    critic, vocab_size = None, 1 << 20

    def __init__(self, shares: int, stages: int, *, reference: bool = False) -> None:
        self.dp_group = DpGroup()
        self.dp_group.dp_size = shares
        self.pass_micro_batches = 4 * stages if stages > 1 else 1
        self.packing = Packing(max_tokens=512)
        self.has_reference = self.reference_apart = reference
        self.trained: list[int] = []  # micro-batches of each pass
        self.scored: dict[str, list[int]] = {"policy": [], "reference": []}
        self.seen: list[tuple[int, int]] = []  # rollouts that were trained

    def log_probs(self, batches: Sequence[MicroBatch], model: Scored = "policy") -> list[Float32Array]:
        self.scored[model].append(len(batches))
        return [np.zeros(sum(len(one.chosen) for one in batch.members), np.float32) for batch in batches]

    def backward(self, batches: Sequence[MicroBatch], statistics: StepStatistics, totals: StepTotals) -> None:
        self.trained.append(len(batches))
        self.seen += [one.key for batch in batches for one in batch.members]
        totals.metrics.means["train/loss"] = torch.zeros(())

    def update(self, denominator: float, *, lr_scale: float = 1.0) -> UpdateResult:
        return UpdateResult(applied=True, grad_norm=1.0, lr=1.0)


def trained(models: Recorder, batch: Sequence[Sequence[TrainSequence]], **algorithm: Any) -> Recorder:
    """Train a batch whose groups arrive one by one; after every tenth the caller is idle."""
    distill = DistillConfig(use_opd=algorithm.pop("use_opd", False))
    spec = TrainSpec(
        TrainConfig(),
        AlgorithmConfig(**algorithm),
        correction=corrected(CorrectionConfig()),
        distill=distill,
        temperature=1.0,
        max_response_len=128,
        seed=0,
    )
    trainer = Trainer(spec, lambda _: models)  # type: ignore[arg-type, return-value]
    trainer.setup()
    trainer.begin_batch(rollouts=sum(map(len, batch)), steps=1)
    for at, group in enumerate(batch):
        trainer.accumulate(group)
        if at % 10 == 9:
            trainer.flush()
    trainer.step()
    return models


def groups(count: int) -> list[list[TrainSequence]]:
    rng = np.random.default_rng(0)
    made = []
    for group in range(count):
        prompt = rng.integers(1, 1000, 12)
        made.append(
            [
                sequence(
                    group=group,
                    rollout=8 * group + member,
                    tokens=[*prompt, *range(size)],
                    mask=[1] * size,
                    teacher_log_probs=behind(12, np.full(size, -1.0)),
                )
                for member, size in enumerate(rng.integers(8, 128, 8).tolist())
            ]
        )
    return made


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_a_schedule_of_a_pipeline_takes_four_micro_batches_for_each_stage(stages: int) -> None:
    """Of four data-parallel ranks, whose sequences come group by group from a rollout that goes on."""
    batch = groups(40 * stages)
    models, plain = trained(Recorder(4, stages), batch), trained(Recorder(4, 1), batch)
    assert len(plain.trained) > 4 * stages
    assert len(models.trained) > 1  # training begins before the batch is there
    assert min(models.trained) >= 4 * stages
    assert sum(models.trained) <= 1.05 * sum(plain.trained)


@pytest.mark.parametrize("stages", [1, 4])
def test_a_reference_takes_the_place_of_the_policy_once_for_a_batch(stages: int) -> None:
    """Old log-probs are computed meanwhile."""
    batch = groups(80)
    fields = {"use_kl_loss": True, "kl_loss_coef": 0.1, "normalize_advantages": True, "use_opd": True}
    models = trained(Recorder(1, stages, reference=True), batch, **fields)
    assert len(models.scored["reference"]) == 1
    assert len(models.scored["policy"]) > 1
    assert min(models.scored["policy"]) >= (4 * stages if stages > 1 else 1)
    assert len(models.trained) == 1
    assert sorted(models.seen) == [(one.group_id, one.rollout_id) for group in batch for one in group]


def test_a_batch_of_fewer_micro_batches_is_one_schedule() -> None:
    batch = groups(10)
    models = trained(Recorder(1, 8), batch)
    assert len(models.trained) == 1
    assert 1 < models.trained[0] < 4 * 8
    assert sorted(models.seen) == [(one.group_id, one.rollout_id) for group in batch for one in group]
