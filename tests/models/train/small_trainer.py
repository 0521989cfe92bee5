"""A backend small enough for a test, sequences of uneven lengths with tool tokens, and a look at a step's gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from configs.schema.algorithm import AlgorithmConfig, CorrectionConfig, CriticConfig, DistillConfig
from configs.schema.train import ParallelConfig, TrainConfig
from models.algorithms.correction import Correction
from models.train.dp_group import DpGroup
from models.train.huggingface.models import TorchModels
from models.train.interface import TrainSequence
from models.train.spec import TrainSpec
from models.train.trainer import Trainer
from tests.models.corrections import corrected
from tests.models.train.sequences import behind, sequence

VOCABULARY = 32
Tensors = dict[str, torch.Tensor]
Trained = tuple[dict[str, float], Tensors, Tensors]


def make_sequences(
    seed: int = 0,
    *,
    groups: int = 4,
    per_group: int = 3,
    fan_out: bool = True,
    dark: bool = True,
    rewards: bool = False,
) -> list[TrainSequence]:
    """Uneven lengths; some tokens masked; the first rollout of each group fans out; some sequences fully masked.

    `rewards`: with rewards, truncated responses and a teacher, for what reads them.
    """
    rng = np.random.default_rng(seed)
    out = []
    for group in range(groups):
        prompt = rng.integers(1, VOCABULARY, int(rng.integers(1, 9)))
        for index in range(per_group):
            for part in range(2 if fan_out and index == 0 else 1):
                response = int(rng.integers(1, 14))
                mask = (rng.random(response) > 0.25).astype(np.uint8)
                if dark and index == 1 and group == 0:
                    mask[:] = 0
                out.append(
                    sequence(
                        group=seed * 1000 + group,
                        rollout=(seed * 1000 + group) * 10 + index,
                        tokens=np.concatenate([prompt, rng.integers(1, VOCABULARY, response)]),
                        mask=mask,
                        rollout_log_probs=np.where(mask, rng.normal(-3.4, 0.4, response), 0.0),
                        advantage=rng.normal(),
                        version=part,
                    )
                )
    return with_rewards(out, seed) if rewards else out


def with_rewards(sequences: list[TrainSequence], seed: int = 0) -> list[TrainSequence]:
    """Rewards and ends by rollout, log-probs of a teacher by token."""
    rng = np.random.default_rng(seed + 1)
    reward = {s.rollout_id: float(rng.integers(0, 4)) for s in sequences}
    return [
        dataclasses.replace(
            s,
            reward=reward[s.rollout_id],
            truncated=bool(s.rollout_id % 2),
            teacher_log_probs=behind(s.prompt_length, rng.normal(-3.0, 0.5, s.response_length)),
        )
        for s in sequences
    ]


def make_backend(
    checkpoint: Path,
    *,
    staleness: int = 1,
    temperature: float = 0.9,
    total_steps: int | None = None,
    correction: Correction | None = None,
    dp_group: DpGroup | None = None,
    **fields: Any,
) -> Trainer:
    """A backend that is set up; `fields` may be of any of the trainer's configurations."""

    def take(kind: Any) -> dict[str, Any]:
        return {name: fields.pop(name) for name in list(fields) if name in kind.__struct_fields__}

    defaults = {"hf_checkpoint": str(checkpoint), "lr": 1e-3, "adam_eps": 1e-4, "train_device": "cpu"}
    train = TrainConfig(**{**defaults, **take(TrainConfig)})
    off_policy, critic = (
        CorrectionConfig(**take(CorrectionConfig)),
        CriticConfig(**{"critic_lr": 1e-5, **take(CriticConfig)}),
    )
    distill, parallel = DistillConfig(**take(DistillConfig)), ParallelConfig(**take(ParallelConfig))
    algorithm = AlgorithmConfig(**fields)
    resolved = corrected(off_policy, max_staleness=staleness, policy_loss=algorithm.policy_loss)
    spec = TrainSpec(
        train,
        algorithm,
        temperature=temperature,
        max_response_len=16,
        seed=0,
        total_steps=total_steps,
        correction=correction or resolved,
        critic=critic,
        distill=distill,
        parallel=parallel,
    )
    made = Trainer(spec, lambda found: TorchModels(found, dp_group))
    made.setup()
    return made


def train_step(backend: Trainer, calls: Sequence[Sequence[TrainSequence]], *, flush: bool = False) -> Trained:
    """Train one step: metrics, gradient (divided by the denominator) and the weights afterwards."""
    gradient: dict[str, torch.Tensor] = {}
    updater = backend._models.updater
    apply = updater.apply

    def spy(denominator: float, **factors: float) -> Any:
        for name, parameter in updater.named_parameters:
            if parameter.grad is not None:
                gradient[name] = parameter.grad.clone() / denominator
        return apply(denominator, **factors)

    updater.apply = spy  # type: ignore[method-assign]
    for call in calls:
        backend.accumulate(call)
        if flush:
            backend.flush()
    metrics = backend.step()
    updater.apply = apply  # type: ignore[method-assign]
    return metrics, gradient, weights_of(backend)


def state_of(backend: Trainer, part: str) -> Tensors:
    """What a checkpoint would hold of a part; live tensors."""
    models: Any = backend._models
    return {name: one for name, one in models.parts().tensors().items() if name.startswith(f"{part}/")}


def weights_of(backend: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in backend.export_weights()}
