"""Rejection of tokens and sequences on which old policy and sampler disagree too much.

Statistics of D = log old - log mu (k1 = -D, k2 = D^2 / 2, k3 = exp(D) - 1 - D) are tested per token, or as sum, mean or
maximum over a sequence's trainable tokens; a failed sequence test removes all of its tokens. The veto removes the
sequence of any token with old / mu below a bound. Several rules must all pass. With `rs_unit` rollout the sequence of a
statistic is the whole rollout: the tokens of all its rows, which only the whole step shows (`rejected_rollouts`).

Invariants: rejection acts on numerators of the policy term only; counts, baselines, KL and entropy keep the trainable
mask. Nothing is clamped but exponents. A statistic that is not a number fails no test, so that its token stays and the
step is refused for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.schema.rejection import RejectionRule
from models.algorithms.correction import log_weight_of
from models.algorithms.kl import KL_ESTIMATORS
from models.algorithms.modes import Correction
from models.algorithms.tokens import PolicyTokens, sequence_max, sequence_mean, sequence_sum

VETO = "veto"
ROLLOUT = "rollout"


@dataclass(frozen=True)
class Rejection:
    """What is left of N tokens in S sequences, and who removed what. Only trainable tokens count as removed."""

    kept: Tensor  # [N] bool
    removed: Mapping[str, Tensor]  # name of the rule -> [N] bool
    removed_sequences: Mapping[str, Tensor]  # name of a rule on whole sequences -> [S] bool
    failed_sequences: Tensor  # [S] bool, by any rule on whole sequences or the veto

    @property
    def none(self) -> bool:
        """Whether there was nothing to test."""
        return not self.removed


def rejection_of(tokens: PolicyTokens, correction: Correction, log_weight: Tensor | None = None) -> Rejection:
    """Apply all rules. `tokens.old_log_probs` are those of the mode; `log_weight` [N] is D, if known already.

    Where `rs_unit` is rollout, sequence rules and the veto were applied to the whole step before: `tokens.rejected`.
    """
    if not correction.rejects:
        nobody = torch.zeros(tokens.n_sequences, dtype=torch.bool, device=tokens.mask.device)
        return Rejection(kept=tokens.mask, removed={}, removed_sequences={}, failed_sequences=nobody)
    delta = log_weight_of(tokens, correction) if log_weight is None else log_weight
    live = sequence_sum(tokens.mask.to(delta.dtype), tokens) > 0
    removed: dict[str, Tensor] = {}
    sequences: dict[str, Tensor] = {}
    decided = tokens.rejected if correction.rs_unit == "rollout" else None
    for rule in correction.rules:
        if rule.whole_sequence and decided is not None:
            continue
        failed = fails(rule, delta, tokens)
        if rule.whole_sequence:
            sequences[rule.name] = failed & live
            failed = failed[tokens.sequence]
        removed[rule.name] = failed & tokens.mask
    if correction.rs_veto is not None and decided is None:
        wild = (delta < math.log(correction.rs_veto)) & tokens.mask
        sequences[VETO] = sequence_max(wild.to(delta.dtype), tokens) > 0
        removed[VETO] = sequences[VETO][tokens.sequence] & tokens.mask
    if decided is not None:
        sequences[ROLLOUT] = decided & live
        removed[ROLLOUT] = decided[tokens.sequence] & tokens.mask
    failed_sequences = torch.zeros_like(live)
    for lost in sequences.values():
        failed_sequences = failed_sequences | lost
    kept = tokens.mask
    for lost in removed.values():
        kept = kept & ~lost
    return Rejection(kept=kept, removed=removed, removed_sequences=sequences, failed_sequences=failed_sequences)


def fails(rule: RejectionRule, log_weight: Tensor, tokens: PolicyTokens) -> Tensor:
    """Which tokens [N] or, for a rule on whole sequences, which sequences [S] fail."""
    value = statistic(rule, log_weight, tokens)
    return (value < rule.low) | (value > rule.high)


def statistic(rule: RejectionRule, log_weight: Tensor, tokens: PolicyTokens) -> Tensor:
    """The rule's statistic of each token [N], or of each sequence [S], from D [N]."""
    values = KL_ESTIMATORS[rule.kind](-log_weight)  # of mu from old, at the sampled token
    if rule.level == "token":
        return values
    if rule.level == "seq_sum":
        return sequence_sum(values, tokens)
    if rule.level == "seq_mean":
        return sequence_mean(values, tokens)
    return sequence_max(values, tokens)
