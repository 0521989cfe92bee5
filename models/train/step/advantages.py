"""What is decided over a whole rollout batch, before its first optimizer step: advantages of tokens and returns.

Invariants: decided once, under the weights of the batch's start, by every process of a data-parallel group from the
same numbers; written into the examples, which the steps of the batch then only read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from configs.schema.algorithm import AlgorithmConfig
from models.algorithms.advantages import Episode, TokenAdvantages, batch_advantages, estimated
from models.algorithms.aggregation import averaged
from models.algorithms.returns import FloatArray, moments
from models.train.dp_group import Float32Array
from models.train.spec import BatchNeeds
from models.train.step.examples import Example, Rollout


def decide_advantages(
    rollouts: Sequence[Rollout],
    algorithm: AlgorithmConfig,
    needs: BatchNeeds,
    *,
    opd_kl_coef: float | None,
) -> dict[str, float]:
    """Set advantages (and returns) of all examples of a batch; metrics of the batch.

    The policy of KL in the reward and of distillation is that of the batch's start, or the sampler where the mode
    spends no forward pass on the former. Where sequences share tokens, each branch is an episode over all that it
    shows, and a token gets the mean of what its branches say; distillation and whitening then see it once.
    """
    examples = [example for rollout in rollouts for example in rollout.examples]
    episodes = [_episode(example, needs) for example in examples]
    found: list[TokenAdvantages] = []
    for rollout in rollouts:
        own = episodes[len(found) : len(found) + len(rollout.examples)]
        if rollout.branches:
            found += _of_branches(rollout, own, algorithm)
        else:
            found += [estimated(algorithm, episode) for episode in own]
    done = batch_advantages(algorithm, episodes, found, opd_kl_coef=opd_kl_coef)
    for example, one in zip(examples, done, strict=True):
        example.advantages = one.advantages.astype(np.float32)
        example.returns = None if one.returns is None else one.returns.astype(np.float32)
        example.logged = _logged(one)
    return _value_metrics(examples) if needs.values else {}


def _of_branches(rollout: Rollout, own: Sequence[Episode], algorithm: AlgorithmConfig) -> list[TokenAdvantages]:
    """What the branches of a rollout say of its examples' tokens, on average. `own`: the examples as episodes."""
    advantages = np.concatenate([episode.advantages for episode in own])
    student = _joined([episode.student for episode in own])
    reference = _joined([episode.reference for episode in own])
    values = _joined([episode.values for episode in own])
    found = [
        estimated(
            algorithm,
            Episode(
                mask=np.ones(len(at), dtype=np.bool_),
                advantages=advantages[at],
                reward=branch.reward,
                turn_rewards=_double(branch.turn_rewards),
                student=None if student is None else student[at],
                reference=None if reference is None else reference[at],
                values=None if values is None else values[at],
                bootstrap=0.0 if branch.own is None else branch.own.bootstrap,
            ),
        )
        for branch in rollout.branches
        for at in [branch.columns]
    ]
    columns, nothing = [branch.columns for branch in rollout.branches], [None] * len(own)
    counts = [len(example.chosen) for example in rollout.examples]
    means = averaged(columns, [one.advantages for one in found], counts)
    assert means is not None
    returns: Sequence[FloatArray | None] = averaged(columns, [one.returns for one in found], counts) or nothing
    kl: Sequence[FloatArray | None] = averaged(columns, [one.reward_kl for one in found], counts) or nothing
    return [TokenAdvantages(*of_one) for of_one in zip(means, returns, kl, strict=True)]


def _joined(parts: Sequence[FloatArray | None]) -> FloatArray | None:
    present = [part for part in parts if part is not None]
    return np.concatenate(present) if len(present) == len(parts) else None


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
        turn_rewards=_double(example.turn_rewards),
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
