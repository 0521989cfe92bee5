"""Off-policy sequence masking: negative responses that drifted from their sampler teach nothing (arXiv:2512.02556).

A token is dropped from the policy term if its advantage is negative and the mean of log mu - log theta over the
trainable tokens of its sequence is above delta. Denominators stay as they are.
"""

from __future__ import annotations

from torch import Tensor

from models.algorithms.tokens import PolicyTokens, log_ratio, sequence_mean


def drifted_negatives(tokens: PolicyTokens, delta: float) -> Tensor:
    """Tokens [N] bool that are dropped; only trainable ones."""
    drift = log_ratio(tokens.rollout_log_probs, tokens.log_probs.detach(), tokens.mask)
    far = sequence_mean(drift, tokens) > delta
    return (tokens.advantages < 0) & far[tokens.sequence] & tokens.mask
