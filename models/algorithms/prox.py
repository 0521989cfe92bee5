"""Old log-probs (the centre of the trust region) that are not simply what the trainer computed at the batch's start.

Bypass takes the sampler's own. Log-linear ones lie between sampler and current policy, the nearer to the
current one the older the token, and costs no forward pass (A-3PO, arXiv:2512.06547):

    log old = log mu + alpha (log theta - log mu), without gradient; alpha from the token's staleness s

    next_version  alpha = s / (s + 1)         the current policy counts as version V + 1
    areal         alpha = (s - 1) / s, 0 at 0

Invariants: s = 0 gives log old = log mu; with the weight old / mu and the ratio theta / old, their product is
theta / mu for every alpha. They move with theta at each optimizer step, alpha stays that of the batch's start.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import Tensor

from models.algorithms.modes import Correction
from models.algorithms.tokens import PolicyTokens, log_ratio


def with_old_log_probs(tokens: PolicyTokens, correction: Correction) -> PolicyTokens:
    """The tokens with the `old_log_probs` that belong to the mode, whatever was there in bypass and
    log-linear mode."""
    if correction.policy_mode == "bypass":
        return dataclasses.replace(tokens, old_log_probs=tokens.rollout_log_probs)
    if correction.loglinear:
        return dataclasses.replace(tokens, old_log_probs=loglinear_old_log_probs(tokens, correction.prox_alpha))
    return tokens


def loglinear_old_log_probs(tokens: PolicyTokens, kind: Literal["next_version", "areal"]) -> Tensor:
    """log old [N], no gradient, 0 where masked. Without staleness every token counts as fresh."""
    change = log_ratio(tokens.log_probs.detach(), tokens.rollout_log_probs, tokens.mask)
    sampler = torch.where(tokens.mask, tokens.rollout_log_probs, torch.zeros_like(tokens.rollout_log_probs))
    if tokens.staleness is None:
        return sampler
    return sampler + alpha(tokens.staleness, kind).to(change.dtype) * change


def alpha(staleness: Tensor, kind: Literal["next_version", "areal"]) -> Tensor:
    """Weight [N] of theta in the old log-probs of tokens `staleness` [N] versions old; a negative one counts as 0."""
    age = staleness.clamp(min=0).double()
    if kind == "next_version":
        return age / (age + 1.0)
    return (age - 1.0).clamp(min=0.0) / age.clamp(min=1.0)
