"""Numbers that a loss needs to know of the whole optimizer step before the first backward pass.

    normalised weights    their mean over the step
    m2po                  the bound of (log theta - log mu)^2, from all tokens of the step
    rs_unit rollout       which rollouts fail, tested over the tokens of all their rows
    renormalize           how many tokens of each rollout are left after rejection

Everything here takes one `PolicyTokens` that holds the step's trainable tokens (advantages are not read), computed
without gradient, and gives what is then handed to each micro-batch: `StepStatistics` for `PolicyTokens.statistics`, and
columns [S] for `PolicyTokens.rejected` and `PolicyTokens.kept_scale`, of which a micro-batch takes its own sequences.

Invariant: the result does not depend on the order of the tokens, nor on how the step is cut into micro-batches.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from configs.schema.algorithm import AlgorithmConfig
from models.algorithms.aggregation import Aggregation
from models.algorithms.correction import Correction, importance_weights, log_weight_of, rejection_of, with_old_log_probs
from models.algorithms.tokens import PolicyTokens, StepStatistics, sequence_sum

Need = Literal["none", "old", "current"]


def needs(algorithm: AlgorithmConfig, correction: Correction) -> Need:
    """Which log-probs of the whole step must be known before its first backward pass.

    "old": `old_log_probs`, `log_probs` may hold anything; "current": `log_probs` under the weights of this very
    step, too.
    """
    if algorithm.policy_loss == "m2po":
        return "current"
    normalises = correction.use_tis and correction.tis_batch_normalize
    counts = correction.rejects and (correction.renormalize_after_rejection or correction.rs_unit == "rollout")
    if not (normalises or counts):
        return "none"
    # A function of the user's own may read any column.
    theta = (
        correction.against_current
        or correction.loglinear
        or (normalises and correction.custom_tis_function_path is not None)
    )
    return "current" if theta else "old"


def step_statistics(tokens: PolicyTokens, algorithm: AlgorithmConfig, correction: Correction) -> StepStatistics:
    """Facts of the step that consists of `tokens`."""
    with torch.no_grad():
        bound, mean = math.inf, 1.0
        if algorithm.policy_loss == "m2po":
            bound = m2po_bound(tokens.log_rho.detach().square()[tokens.mask], algorithm.m2po_threshold)
        if correction.use_tis and correction.tis_batch_normalize:
            mean = _weight_mean(with_old_log_probs(tokens, correction), correction)
    return StepStatistics(weight_mean=mean, m2po_bound=bound)


def rejected_rollouts(tokens: PolicyTokens, rollout: Tensor, correction: Correction) -> Tensor:
    """[S] bool: whether the rollout of each sequence fails a sequence rule or the veto, with rs_unit rollout.

    The statistic is pooled: sum, mean or maximum over the trainable tokens of all rows of the rollout. `rollout` [S]
    int64: the rollout of each sequence, any numbers.
    """
    with torch.no_grad():
        names, index = rollout.unique(return_inverse=True)
        pooled = replace(
            with_old_log_probs(tokens, correction),
            sequence=index[tokens.sequence],
            n_sequences=len(names),
            rejected=None,
        )
        return rejection_of(pooled, correction).failed_sequences[index]


def kept_scale(tokens: PolicyTokens, rollout: Tensor, aggregation: Aggregation, correction: Correction) -> Tensor:
    """[S] factor of the policy term that replaces the token counts in its divisor by those after rejection.

    Tokens before / after rejection: of the rollout (rollout_mean), of the sequence (seq_mean) or of the step
    (token_mean); 1 for `constant`, which divides by no count, and where nothing is left. With rs_unit
    rollout `tokens.rejected` must hold `rejected_rollouts` already.
    """
    with torch.no_grad():
        rejection = rejection_of(with_old_log_probs(tokens, correction), correction)
        before = sequence_sum(tokens.mask.double(), tokens)
        after = sequence_sum(rejection.kept.double(), tokens)
        if aggregation == "constant":
            return torch.ones_like(before)
        if aggregation == "token_mean":
            before, after = before.sum().expand_as(before), after.sum().expand_as(after)
        elif aggregation == "rollout_mean":
            before, after = _over_rollout(before, rollout), _over_rollout(after, rollout)
        return torch.where(after > 0, before / after.clamp(min=1.0), 1.0)


def m2po_bound(squares: Tensor, threshold: float) -> float:
    """Largest square that is kept so that the mean of the kept ones is at most `threshold` (arXiv:2510.01161).

    Equal squares are kept or dropped together; the smallest are always kept. The bound lies between the last square
    kept and the first one dropped, so that rounding in another forward pass does not move a token across it.
    """
    if squares.numel() == 0:
        return math.inf
    values, counts = squares.double().unique(return_counts=True)  # ascending
    means = (values * counts).cumsum(0) / counts.cumsum(0)
    kept = max(int((means <= threshold).sum()), 1)
    if kept == len(values):
        return math.inf
    last, first = values[kept - 1], values[kept]
    middle = ((last + first) / 2).to(squares.dtype).double()  # as it will be compared
    return float(middle if bool(middle < first) else last)


def _weight_mean(tokens: PolicyTokens, correction: Correction) -> float:
    """Mean of the bounded weights over trainable tokens, or over sequences that have any."""
    weight = importance_weights(tokens, correction, log_weight_of(tokens, correction)).weight.double()
    counts = sequence_sum(torch.ones_like(weight), tokens)
    live = counts > 0
    if not bool(live.any()):
        return 1.0
    if correction.tis_level == "token":
        mean = float(weight[tokens.mask].mean())
    else:
        mean = float((sequence_sum(weight, tokens)[live] / counts[live]).mean())
    # All weights 0: there is nothing to normalise. A mean that is not finite is kept, for the step to be refused.
    return 1.0 if mean == 0.0 else mean


def _over_rollout(values: Tensor, rollout: Tensor) -> Tensor:
    """Sum of values [S] over the sequences of each rollout, given back to each of them."""
    names, index = rollout.unique(return_inverse=True)
    totals = torch.zeros(len(names), dtype=values.dtype, device=values.device).index_add(0, index, values)
    return totals[index]
