"""Statistics of one optimizer step, written into its examples. Nothing here runs a model.

Invariant: every process computes the statistics of all sequences of the step, from the same numbers in the same
order, so that no decision differs between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from configs.schema.algorithm import AlgorithmConfig
from models.algorithms.aggregation import Aggregation
from models.algorithms.correction import Correction
from models.algorithms.step_statistics import kept_scale, rejected_rollouts, step_statistics
from models.algorithms.tokens import PolicyTokens, StepStatistics
from models.train.step.columns import float_column, policy_tokens, rollout_numbers
from models.train.step.examples import Example


def write_step_statistics(
    examples: Sequence[Example],
    algorithm: AlgorithmConfig,
    correction: Correction,
    aggregation: Aggregation,
) -> StepStatistics:
    """Facts of the step that `examples` are; sets `rejected` and `kept_scale` of each.

    The examples hold `current_log_probs` (under the weights of the step's start) and, unless the mode has no such
    `old_log_probs`.
    """
    tokens, (rollout, _) = _tokens_of_step(examples, correction), rollout_numbers(examples)
    if correction.rejects and correction.rs_unit == "rollout":
        rejected = rejected_rollouts(tokens, rollout, correction)
        tokens = replace(tokens, rejected=rejected)
        for example, value in zip(examples, rejected.tolist(), strict=True):
            example.rejected = value
    if correction.rejects and correction.renormalize_after_rejection:
        scale = kept_scale(tokens, rollout, aggregation, correction)
        for example, factor in zip(examples, scale.tolist(), strict=True):
            example.kept_scale = factor
    return step_statistics(tokens, algorithm, correction)


def _tokens_of_step(examples: Sequence[Example], correction: Correction) -> PolicyTokens:
    """All tokens of the step, with the log-probs of its start; the sampler's where none were needed."""
    device = torch.device("cpu")
    current = [e.rollout_log_probs if e.current_log_probs is None else e.current_log_probs for e in examples]
    bypass, log_probs = correction.policy_mode == "bypass", float_column(current, device)
    return policy_tokens(examples, log_probs, bypass=bypass, device=device, statistics=StepStatistics())
