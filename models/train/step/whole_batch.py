"""What is decided over a whole rollout batch, before its first optimizer step: advantages of tokens and returns.

Invariants: decided once, under the weights of the batch's start, by every process of a data-parallel group from the
same numbers; written into the examples, which the steps of the batch then only read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from configs.schema.algorithm import AlgorithmConfig
from models.algorithms.token_advantages import Episode, FloatArray, TokenAdvantages, batch_advantages, moments
from models.train.step.batch_needs import BatchNeeds
from models.train.step.examples import Example, Float32Array


def decide_advantages(
    examples: Sequence[Example],
    algorithm: AlgorithmConfig,
    needs: BatchNeeds,
    *,
    opd_kl_coef: float | None,
) -> dict[str, float]:
    """Set advantages (and returns) of all examples of a batch; metrics of the batch.

    The policy of KL in the reward and of distillation is that of the batch's start, or the sampler where the mode
    spends no forward pass on the former.
    """
    found = batch_advantages(
        algorithm,
        [_episode(example, needs) for example in examples],
        opd_kl_coef=opd_kl_coef,
    )
    for example, one in zip(examples, found, strict=True):
        example.advantages = one.advantages.astype(np.float32)
        example.returns = None if one.returns is None else one.returns.astype(np.float32)
        example.logged = _logged(one)
    return _value_metrics(examples) if needs.values else {}


def logged_means(examples: Iterable[Example], denominator: float) -> dict[str, float]:
    """Means over a step of what was noted for the batch, with the aggregation of the loss."""
    sums: dict[str, float] = {}
    for example in examples:
        for name, value in example.logged.items():
            sums[name] = sums.get(name, 0.0) + example.coefficient * value
    return {name: value / denominator for name, value in sums.items()}


def _episode(example: Example, needs: BatchNeeds) -> Episode:
    student = example.rollout_log_probs if needs.student_is_sampler else example.old_log_probs
    return Episode(
        mask=np.ones(len(example.chosen), dtype=np.bool_),
        advantages=example.advantages.astype(np.float64),
        reward=example.reward,
        student=_double(student),
        reference=_double(example.ref_log_probs),
        teacher=_double(example.teacher_log_probs),
        values=_double(example.values),
        bootstrap=example.bootstrap,
    )


def _double(values: Float32Array | None) -> FloatArray | None:
    return None if values is None else values.astype(np.float64)


def _logged(one: TokenAdvantages) -> dict[str, float]:
    out: dict[str, float] = {}
    if one.reward_kl is not None:
        out["train/reward_kl"] = float(one.reward_kl.sum())
    if one.reverse_kl is not None:
        out["train/opd_reverse_kl"] = float(one.reverse_kl.sum())
    return out


def _value_metrics(examples: Sequence[Example]) -> dict[str, float]:
    """Share of the variance of the returns that the critic's values explain: 1 is perfect, 0 no better than a mean."""
    pairs = [(_double(e.returns), _double(e.values)) for e in examples]
    returns = [g for g, _ in pairs if g is not None]
    errors = [g - v for g, v in pairs if g is not None and v is not None]
    mean, variance, _ = moments(returns)
    _, unexplained, _ = moments(errors)
    return {
        "train/return_mean": mean,
        "train/explained_variance": 1.0 - unexplained / variance if variance > 0 else 0.0,
    }
