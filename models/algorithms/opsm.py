"""Off-policy sequence masking: negative responses that drifted from their sampler teach nothing (arXiv:2512.02556).

A token is dropped from the policy term if its advantage is negative and the mean of log mu - log theta over the
trainable tokens of its sequence is above delta. Denominators stay as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.algorithms.tokens import PolicyTokens, log_ratio, masked, sequence_mean


def without_drifted(pg_loss: Tensor, tokens: PolicyTokens, delta: float) -> tuple[Tensor, Tensor]:
    """The policy term [N] without the tokens that are dropped, and which those are [N] bool; only trainable ones.

    A drift that is not a number decides nothing: the terms that hang on it become NaN, for the step to be refused.
    """
    log_ratios = log_ratio(tokens.rollout_log_probs, tokens.log_probs.detach(), tokens.mask)
    drift = sequence_mean(log_ratios, tokens)[tokens.sequence]
    negative = (tokens.advantages < 0) & tokens.mask
    dropped = negative & (drift > delta)
    kept = masked(pg_loss, ~dropped)
    return torch.where(negative & drift.isnan(), drift.to(kept.dtype), kept), dropped
