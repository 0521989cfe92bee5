"""What a configuration asks of the trainer: the settings of all parts, decided, the updates that follow from them, and
what a batch needs of them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from configs.schema import Config
from configs.schema.algorithm import (
    KL_IN_REWARD,
    Aggregation,
    AlgorithmConfig,
    CriticConfig,
    DistillConfig,
    Need,
    needs,
    scores_old,
)
from configs.schema.train import FsdpConfig, LoraConfig, MegatronConfig, ParallelConfig, TrainConfig
from models.algorithms.advantages import TOKEN_ESTIMATORS
from models.algorithms.correction import Correction, correction_of
from models.algorithms.objective import GroupLossFunction, group_loss_of
from models.slime_arguments import SlimeArguments, slime_arguments

# --------------------------------------------------------------------------------------------------
# Learning rate by optimizer update: linear warm-up, then constant, linear or cosine decay to `min_lr`.
#
# Invariant: a pure function of the number of updates already made, so that resuming needs no state but that number.


def learning_rate(updates: int, train: TrainConfig, total_steps: int | None) -> float:
    """Learning rate of the next update after `updates` updates; the first update of a warm-up of W is lr / W."""
    fraction = train.lr_warmup_fraction
    warmup = train.lr_warmup_iters if fraction is None else round(fraction * (total_steps or 0))
    if updates < warmup:
        return train.lr * (updates + 1) / warmup
    if train.lr_decay_style == "constant" or total_steps is None:
        return train.lr
    span = max(total_steps - warmup, 1)
    progress = min((updates - warmup) / span, 1.0)
    remaining = 1.0 - progress if train.lr_decay_style == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return train.min_lr + (train.lr - train.min_lr) * remaining


@dataclass(frozen=True)
class UpdateResult:
    """What one attempt at an update did."""

    applied: bool
    grad_norm: float  # of the step's gradient, before clipping; not finite if the update was refused
    lr: float

    def for_its_loss(self) -> UpdateResult:
        """This refusal, of a step whose loss is not finite: no gradient of it means anything."""
        return replace(self, grad_norm=math.nan)


class Updates(ABC):
    """Updates of one model's weights from the gradients of a step, whatever framework holds the two.

    Invariants:
    - gradients arrive as sums of numerators; they are divided by the step's denominator here, once;
    - a gradient that is not finite changes neither parameters nor optimizer state, in any process;
    - the learning rate depends only on the number of updates made, and on the factor that the caller gives.
    """

    optimizer: Any

    def __init__(self, train: TrainConfig, total_steps: int | None) -> None:
        """`train`: the optimizer's options of this model."""
        self._train, self._total_steps = train, total_steps
        self.updates = 0

    @abstractmethod
    def _summed(self) -> tuple[float, list[Tensor] | None]:
        """Norm of the gradient's sum over all processes, and the sums that this process updates from; None if no
        parameter has any. Collective."""

    @abstractmethod
    def _step(self) -> None:
        """Let the optimizer change the weights."""

    @abstractmethod
    def clear(self) -> None:
        """Drop all gradients."""

    def update(self, denominator: float, *, lr_scale: float = 1.0) -> UpdateResult:
        """Sum the gradients over the processes, divide, clip, update; or refuse. Clears the gradients. Collective.

        `lr_scale`: factor of this update's learning rate.
        """
        lr = learning_rate(self.updates, self._train, self._total_steps) * lr_scale
        norm, gradients = self._summed()
        norm /= denominator
        applied = gradients is not None and math.isfinite(norm)  # the same in all processes: it is summed over them
        if applied:
            if gradients:
                torch._foreach_mul_(gradients, gradient_scale(norm, denominator, self._train.clip_grad))
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self._step()
            self.updates += 1
        self.clear()
        return UpdateResult(applied, norm, lr)

    def refuse(self) -> UpdateResult:
        """Make no update: there is nothing to learn from. Clears the gradients."""
        self.clear()
        return UpdateResult(False, 0.0, learning_rate(self.updates, self._train, self._total_steps))


def gradient_scale(norm: float, denominator: float, clip_grad: float) -> float:
    """What summed gradients are multiplied by: divided by the step's denominator, and clipped to `clip_grad` (0: not).

    `norm`: of the gradient after the division.
    """
    return (clip_grad / norm if clip_grad > 0 and norm > clip_grad else 1.0) / denominator


# --------------------------------------------------------------------------------------------------
# Everything that a trainer and its models are built from, out of the configuration of a run.


@dataclass(frozen=True)
class TrainSpec:
    """`temperature`: of the rollouts; `max_response_len`: tokens, the constant of `constant` aggregation;
    `total_steps`: optimizer steps of the run, needed by a decaying learning rate; `correction`: default: as if samples
    may be stale.
    """

    train: TrainConfig
    algorithm: AlgorithmConfig
    correction: Correction = field(default_factory=lambda: Correction("decoupled", True))
    critic: CriticConfig = field(default_factory=CriticConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    temperature: float = 1.0
    max_response_len: int = 512
    seed: int = 42
    total_steps: int | None = None
    arguments: SlimeArguments = field(default_factory=SlimeArguments)  # for functions with slime's signatures

    @property
    def supervised(self) -> bool:
        return self.train.loss_type == "sft_loss"

    @property
    def reinforced(self) -> bool:
        return self.train.loss_type == "policy_loss"

    @property
    def aggregation(self) -> Aggregation:
        """Of the loss."""
        return "token_mean" if self.supervised else self.algorithm.loss_aggregation

    @property
    def opd_kl_coef(self) -> float | None:
        """Weight of the distillation term; None if it is off."""
        wanted = self.distill.use_opd or self.algorithm.advantage_estimator == "on_policy_distillation"
        return self.distill.opd_kl_coef if wanted and self.reinforced else None

    @property
    def reward_kl(self) -> bool:
        """Whether KL to the reference is part of the reward."""
        return self.algorithm.kl_coef > 0 and self.algorithm.advantage_estimator in KL_IN_REWARD

    @property
    def uses_reference(self) -> bool:
        """Whether a reference is loaded: for KL in the loss (a loss of one's own reads it too) or in the reward."""
        in_loss = self.algorithm.use_kl_loss and self.algorithm.kl_loss_coef > 0
        return (in_loss and not self.supervised) or (self.reward_kl and self.reinforced)

    @property
    def uses_critic(self) -> bool:
        """Whether values of states are learned beside the policy."""
        return self.reinforced and self.algorithm.advantage_estimator == "ppo"

    @property
    def whole_groups(self) -> bool:
        """A loss of one's own sees each group in one micro-batch."""
        return self.train.loss_type == "custom_loss"

    @property
    def scoring_temperature(self) -> float:
        """What logits are divided by."""
        return 1.0 if self.supervised else self.temperature

    @property
    def group_loss(self) -> GroupLossFunction | None:
        """The user's own loss, imported. Raises `UnknownAlgorithm`."""
        path = self.algorithm.custom_loss_function_path
        return group_loss_of(path) if self.whole_groups and path is not None else None


def train_spec(config: Config, total_batches: int) -> TrainSpec:
    """Of a run of `total_batches` rollout batches."""
    return TrainSpec(
        train=config.train,
        algorithm=config.algorithm,
        correction=correction_of(config.correction),
        critic=config.critic,
        distill=config.distill,
        parallel=config.parallel,
        fsdp=config.fsdp,
        lora=config.lora,
        megatron=config.megatron,
        temperature=config.rollout.rollout_temperature,
        max_response_len=config.rollout.rollout_max_response_len,
        seed=config.run.seed,
        total_steps=total_batches * (config.train.num_steps_per_rollout or 1),
        arguments=slime_arguments(config),
    )


# --------------------------------------------------------------------------------------------------
# What the configuration needs of a whole rollout batch before its first backward pass.
#
# Where nothing is needed, sequences are trained as they arrive. Invariant: pure; no model.


@dataclass(frozen=True)
class BatchNeeds:
    """What must be there before the first backward pass of a batch."""

    whole_batch: bool = False
    old_log_probs: bool = False  # log-probs under the weights of the batch's start
    score_first_step: bool = False  # also those of the first step, which its own pass would find
    values: bool = False  # of a critic
    advantages: bool = False  # of tokens, decided over the whole batch
    student_is_sampler: bool = False  # KL in the reward and distillation compare with mu
    statistics: Need = "none"  # of each optimizer step


def batch_needs(spec: TrainSpec, *, steps: int, reference_apart: bool = False) -> BatchNeeds:
    """Needs of a batch of `steps` optimizer steps.

    `reference_apart`: there is a reference whose log-probs are computed once for the batch, not row by row.
    """
    algorithm, correction = spec.algorithm, spec.correction
    several = steps > 1 or reference_apart
    if spec.supervised:
        return BatchNeeds(whole_batch=several)
    old_log_probs, score_first_step = (
        scores_old(algorithm, correction, spec.distill, loss_type=spec.train.loss_type, steps=count)
        for count in (steps, 1)
    )
    if spec.whole_groups:  # its groups stay together, which only the whole batch shows
        return BatchNeeds(whole_batch=True, old_log_probs=old_log_probs, score_first_step=score_first_step)
    opd, subtracts_kl, values = spec.opd_kl_coef is not None, spec.reward_kl, spec.uses_critic
    functions = (algorithm.custom_advantage_function_path, algorithm.rollout_data_postprocess_path)
    advantages = functions != (None, None) or (
        opd or subtracts_kl or bool(algorithm.normalize_advantages) or algorithm.advantage_estimator in TOKEN_ESTIMATORS
    )
    return BatchNeeds(
        whole_batch=several or old_log_probs or advantages or values,
        old_log_probs=old_log_probs,
        score_first_step=score_first_step,
        values=values,
        advantages=advantages,
        student_is_sampler=not correction.recomputes,
        statistics=needs(algorithm, correction),
    )


def critic_only(needed: BatchNeeds, spec: TrainSpec) -> BatchNeeds:
    """The needs of a batch in which the policy is not trained."""
    student = (
        spec.reward_kl or spec.opd_kl_coef is not None or spec.algorithm.custom_advantage_function_path is not None
    )
    return replace(needed, old_log_probs=student and not needed.student_is_sampler, statistics="none")
