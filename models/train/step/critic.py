"""Advantages and returns of a rollout batch, and the critic of PPO whose values they may use.

V_t is read where the log-prob of token t is read: at the token before it, so that it has not seen token t.

Invariants of the critic: values are not divided by the temperature; the head is fp32; losses are numerators, divided by
the step's denominator in `update` alone; the policy and the critic share no parameter.

Invariants of advantages: decided once, before the first optimizer step, under the weights of the batch's start, by
every process of a data-parallel group from the same numbers; written into the examples, which the steps only read.

Source of the clipped loss: arXiv:1707.06347 (section 5 leaves it open; this is the form of the published code, without
the factor 1/2).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from configs.schema.algorithm import AlgorithmConfig, CriticConfig
from configs.schema.train import TrainConfig
from models.algorithms.advantages import Episode, TokenAdvantages, batch_advantages, estimated
from models.algorithms.aggregation import averaged
from models.algorithms.returns import FloatArray, moments
from models.train.dp_group import DpGroup, Float32Array
from models.train.spec import BatchNeeds, TrainSpec, UpdateResult, Updates
from models.train.step.examples import Example, Rollout
from models.train.step.micro_batch_loss import float_column, weight_column
from models.train.step.micro_batches import MicroBatch
from models.train.step.rollout_data import custom_advantages, post_process, rollout_data


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float) -> tuple[Tensor, Tensor]:
    """max((V - G)^2, (V_c - G)^2) with V_c = V_old + clamp(V - V_old, -clip, clip); [N] each.

    With it, where the clipped value is further from the return than the free one [N].
    """
    change = values - old_values
    free = (values - returns).square()
    held = (old_values + change.clamp(-clip, clip) - returns).square()
    # Within the range both are the same value, and one is larger by rounding alone.
    return torch.maximum(free, held), (held > free) & (change.abs() > clip)


class ValueHead(torch.nn.Linear):  # type: ignore[misc]
    """Reads values from last hidden states, in fp32."""

    def __init__(self, hidden_size: int, *, seed: int) -> None:
        super().__init__(hidden_size, 1)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            # Small, so that the first values are near 0 whatever the scale of the hidden states.
            self.weight.normal_(0.0, 1.0 / (hidden_size + 1), generator=generator)
            self.bias.zero_()

    def forward(self, hidden: Tensor) -> Tensor:
        """Values [N, 1] of hidden states [N, H]; no view, which sharding would warn of."""
        return super().forward(hidden.float())


class CriticModel(ABC):
    """The value model of PPO, whatever computes its values, with the sums of its loss over a step."""

    def __init__(self, clip: float, updater: Updates) -> None:
        self._clip, self.updater = clip, updater
        self._begin_step()

    @abstractmethod
    def values(self, batches: Sequence[MicroBatch]) -> list[Float32Array]:
        """V before each chosen token, one array [N] per micro-batch; empty without `is_mp_src_rank`."""

    @abstractmethod
    def backward(self, batches: Sequence[MicroBatch]) -> None:
        """Add the gradient of the micro-batches' numerators, and their sums. Members have `values` and `returns`."""

    def _begin_step(self) -> None:
        self._loss = self._clipped = 0.0

    def _numerator(self, members: Sequence[Example], values: Tensor) -> Tensor:
        """The numerator, a scalar with a graph. `members` in the order of the rows; `values` [N], with a graph."""
        device = values.device
        old = float_column([example.values for example in members], device)
        returns = float_column([example.returns for example in members], device)
        loss, clipped = value_loss(values, old, returns, clip=self._clip)
        weights = weight_column(members, device)
        numerator = torch.dot(loss, weights)
        self._loss += numerator.detach().double()
        self._clipped += torch.dot(clipped.to(weights.dtype), weights).double()
        return numerator

    def update(
        self, loss_denominator: float, mean_denominator: float, dp_group: DpGroup
    ) -> tuple[UpdateResult, dict[str, float]]:
        """Make the update, or refuse it for a loss that is not finite, and start the next step; metrics of this one.

        A maximum hides from the gradient that the other term is not a number, so the loss itself is tested.
        """
        sums = dp_group.merge({"loss": float(self._loss), "clipped": float(self._clipped)})
        self._begin_step()
        if math.isfinite(sums["loss"]):
            result = self.updater.update(loss_denominator)
        else:
            result = self.updater.refuse().for_its_loss()
        return result, {
            "train/value_loss": sums["loss"] / loss_denominator,
            "train/value_clipfrac": sums["clipped"] / mean_denominator,
            "train/critic_grad_norm": result.grad_norm,
            "train/critic_lr": result.lr,
        }

    def discard(self) -> None:
        """Forget the gradients and sums of the running step."""
        self.updater.clear()
        self._begin_step()


def critic_train_config(config: CriticConfig, train: TrainConfig) -> TrainConfig:
    """The optimizer's options of the critic."""
    return msgspec.structs.replace(
        train,
        lr=config.critic_lr,
        lr_warmup_iters=config.critic_lr_warmup_iters,
        lr_warmup_fraction=None,
        lr_decay_style="constant",
    )


def decide_advantages(
    rollouts: Sequence[Rollout], spec: TrainSpec, needs: BatchNeeds, index: int = 0
) -> dict[str, float]:
    """Set advantages (and returns) of all examples of a batch; metrics of the batch. `index`: of the batch.

    The policy of KL in the reward and of distillation is that of the batch's start, or the sampler where the mode
    spends no forward pass on the former. Where sequences share tokens, each branch is an episode over all that it
    shows, and a token gets the mean of what its branches say; distillation and whitening then see it once. A function
    of the user's takes the estimator's place; it sees each token once.
    """
    algorithm, path = spec.algorithm, spec.algorithm.custom_advantage_function_path
    examples = [example for rollout in rollouts for example in rollout.examples]
    episodes = [_episode(example, needs) for example in examples]
    found: list[TokenAdvantages] = []
    data, post = dict[str, Any](), algorithm.rollout_data_postprocess_path
    if path is not None or post is not None:
        student = "rollout_log_probs" if needs.student_is_sampler else "old_log_probs"
        data = rollout_data(examples, student=student, kl_coef=algorithm.kl_coef)
    if path is not None:
        found = custom_advantages(path, spec.arguments, data, examples)
    for rollout in rollouts if path is None else ():
        own = episodes[len(found) : len(found) + len(rollout.examples)]
        if rollout.branches:
            found += _of_branches(rollout, own, algorithm)
        else:
            found += [estimated(algorithm, episode) for episode in own]
    done = batch_advantages(algorithm, episodes, found, opd_kl_coef=spec.opd_kl_coef)
    for example, one in zip(examples, done, strict=True):
        example.advantages = one.advantages.astype(np.float32)
        example.returns = None if one.returns is None else one.returns.astype(np.float32)
        example.logged = _logged(one)
    if post is not None:
        post_process(post, spec.arguments, index, data, examples)
    return _value_metrics(examples) if needs.values else {}


def _of_branches(rollout: Rollout, own: Sequence[Episode], algorithm: AlgorithmConfig) -> list[TokenAdvantages]:
    """What the branches of a rollout say of its examples' tokens, on average. `own`: the examples as episodes."""
    advantages = np.concatenate([episode.advantages for episode in own])
    scores = {name: _joined([getattr(one, name) for one in own]) for name in ("student", "reference", "values")}
    found = [
        estimated(
            algorithm,
            Episode(
                mask=np.ones(len(at), dtype=np.bool_),
                advantages=advantages[at],
                reward=branch.reward,
                turn_rewards=_double(branch.turn_rewards),
                bootstrap=0.0 if branch.own is None else branch.own.bootstrap,
                **{name: None if every is None else every[at] for name, every in scores.items()},
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
    noted = {"train/reward_kl": one.reward_kl, "train/opd_reverse_kl": one.reverse_kl}
    return {name: float(values.sum()) for name, values in noted.items() if values is not None}


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
