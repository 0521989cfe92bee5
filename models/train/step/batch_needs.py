"""What the configuration needs of a whole rollout batch before its first backward pass.

Where nothing is needed, sequences are trained as they arrive. Invariant: pure; no torch, no model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from configs.schema.algorithm import KL_IN_REWARD, AlgorithmConfig
from configs.schema.distill import DistillConfig
from models.algorithms.modes import Correction
from models.algorithms.step_statistics import Need, needs

# Estimators whose advantages of tokens are decided here; the stages know those of whole rollouts.
TOKEN_ESTIMATORS = frozenset(("ppo", "reinforce_plus_plus", "on_policy_distillation"))


@dataclass(frozen=True)
class BatchNeeds:
    """What must be there before the first backward pass of a batch."""

    whole_batch: bool = False
    old_log_probs: bool = False  # log-probs under the weights of the batch's start
    values: bool = False  # of a critic
    advantages: bool = False  # of tokens, decided over the whole batch
    student_is_sampler: bool = False  # the policy that KL in the reward and distillation speak of is mu
    statistics: Need = "none"  # of each optimizer step


def uses_reference(algorithm: AlgorithmConfig, loss_type: str) -> bool:
    """Whether a reference policy is loaded: for KL in the loss (a loss of one's own reads it too) or in the reward."""
    in_loss = algorithm.use_kl_loss and algorithm.kl_loss_coef > 0
    return (in_loss and loss_type != "sft_loss") or (reward_kl(algorithm) and loss_type == "policy_loss")


def uses_critic(algorithm: AlgorithmConfig, loss_type: str) -> bool:
    """Whether values of states are learned beside the policy."""
    return loss_type == "policy_loss" and algorithm.advantage_estimator == "ppo"


def reward_kl(algorithm: AlgorithmConfig) -> bool:
    """Whether KL to the reference is part of the reward."""
    return algorithm.kl_coef > 0 and algorithm.advantage_estimator in KL_IN_REWARD


def opd_coefficient(algorithm: AlgorithmConfig, distill: DistillConfig) -> float | None:
    """Weight of the distillation term; None if it is off."""
    wanted = distill.use_opd or algorithm.advantage_estimator == "on_policy_distillation"
    return distill.opd_kl_coef if wanted else None


def batch_needs(
    algorithm: AlgorithmConfig,
    correction: Correction,
    distill: DistillConfig,
    *,
    loss_type: str,
    steps: int,
    reference_apart: bool = False,
) -> BatchNeeds:
    """Needs of a batch of `steps` optimizer steps.

    `reference_apart`: there is a reference whose log-probs are computed once for the batch, not row by row.
    """
    several = steps > 1 or reference_apart
    if loss_type == "sft_loss":
        return BatchNeeds(whole_batch=several)
    recomputes = correction.policy_mode != "bypass" and not correction.loglinear
    if loss_type == "custom_loss":  # its groups stay together, which only the whole batch shows
        return BatchNeeds(whole_batch=True, old_log_probs=recomputes and steps > 1)
    opd = opd_coefficient(algorithm, distill) is not None
    subtracts_kl = reward_kl(algorithm)
    values = algorithm.advantage_estimator == "ppo"
    advantages = (
        opd or subtracts_kl or bool(algorithm.normalize_advantages) or algorithm.advantage_estimator in TOKEN_ESTIMATORS
    )
    statistics = needs(algorithm, correction)
    old_log_probs = statistics != "none" or (recomputes and (steps > 1 or opd or subtracts_kl))
    return BatchNeeds(
        whole_batch=several or old_log_probs or advantages or values,
        old_log_probs=old_log_probs,
        values=values,
        advantages=advantages,
        student_is_sampler=not recomputes,
        statistics=statistics,
    )


def critic_only(needed: BatchNeeds, algorithm: AlgorithmConfig, distill: DistillConfig) -> BatchNeeds:
    """The needs of a batch in which the policy is not trained."""
    student = reward_kl(algorithm) or opd_coefficient(algorithm, distill) is not None
    return replace(needed, old_log_probs=student and not needed.student_is_sampler, statistics="none")
