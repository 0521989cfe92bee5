"""What the configuration needs of a whole rollout batch before its first backward pass.

Where nothing is needed, sequences are trained as they arrive. Invariant: pure; no model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from models.algorithms.advantages import TOKEN_ESTIMATORS
from models.algorithms.step_statistics import Need, needs
from models.train.spec import TrainSpec


@dataclass(frozen=True)
class BatchNeeds:
    """What must be there before the first backward pass of a batch."""

    whole_batch: bool = False
    old_log_probs: bool = False  # log-probs under the weights of the batch's start
    values: bool = False  # of a critic
    advantages: bool = False  # of tokens, decided over the whole batch
    student_is_sampler: bool = False  # the policy that KL in the reward and distillation speak of is mu
    statistics: Need = "none"  # of each optimizer step


def batch_needs(spec: TrainSpec, *, steps: int, reference_apart: bool = False) -> BatchNeeds:
    """Needs of a batch of `steps` optimizer steps.

    `reference_apart`: there is a reference whose log-probs are computed once for the batch, not row by row.
    """
    algorithm, correction = spec.algorithm, spec.correction
    several = steps > 1 or reference_apart
    if spec.supervised:
        return BatchNeeds(whole_batch=several)
    recomputes = correction.policy_mode != "bypass" and not correction.loglinear
    if spec.whole_groups:  # its groups stay together, which only the whole batch shows
        return BatchNeeds(whole_batch=True, old_log_probs=recomputes and steps > 1)
    opd, subtracts_kl, values = spec.opd_kl_coef is not None, spec.reward_kl, spec.uses_critic
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


def critic_only(needed: BatchNeeds, spec: TrainSpec) -> BatchNeeds:
    """The needs of a batch in which the policy is not trained."""
    student = spec.reward_kl or spec.opd_kl_coef is not None
    return replace(needed, old_log_probs=student and not needed.student_is_sampler, statistics="none")
