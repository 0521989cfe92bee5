"""What one micro-batch contributes to the metrics of a policy step.

Invariants: every mean and every fraction over tokens uses the reducer of the loss (coefficient c per token, denominator
D of the step), so that it does not depend on the split into micro-batches; mismatch is measured over trainable tokens
before rejection and before truncation; tensors that are logged are never changed in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from models.algorithms.correction import ImportanceWeights
from models.algorithms.policy_loss import PolicyLoss
from models.algorithms.rejection import VETO, Rejection
from models.algorithms.tokens import PolicyTokens, bounded_exp, log_ratio, masked, sequence_sum

STALENESS_BUCKETS: Final = ("0", "1", "2", "3-4", "5+")
BUCKET_STARTS: Final = (1, 2, 3, 5)
STALENESS_SUMS: Final = ("n", "w", "ww", "clipped", "distance")


@dataclass(frozen=True)
class TokenMetrics:
    """Ingredients from one micro-batch. What is logged of them carries no gradient."""

    means: Mapping[str, Tensor] = field(default_factory=dict)  # [N] each: become sum of c m v / D
    sums: Mapping[str, Tensor] = field(default_factory=dict)  # scalars: added over the step
    maxima: Mapping[str, Tensor] = field(default_factory=dict)  # scalars: largest over the step


def joined(*parts: TokenMetrics) -> TokenMetrics:
    """All of them as one."""
    return TokenMetrics(
        means={name: value for part in parts for name, value in part.means.items()},
        sums={name: value for part in parts for name, value in part.sums.items()},
        maxima={name: value for part in parts for name, value in part.maxima.items()},
    )


def clip_metrics(policy: PolicyLoss) -> dict[str, Tensor]:
    """Shares of the tokens that the policy loss held back: [N] each."""
    dtype = policy.loss.dtype
    means = {
        "train/pg_clipfrac": (policy.clipped_high | policy.clipped_low).to(dtype),
        "train/pg_clipfrac_high": policy.clipped_high.to(dtype),
        "train/pg_clipfrac_low": policy.clipped_low.to(dtype),
    }
    if policy.dual_clipped is not None:
        means["train/dual_clipfrac"] = policy.dual_clipped.to(dtype)
    return means


def drift_metrics(tokens: PolicyTokens) -> dict[str, Tensor]:
    """Distance of theta from old: [N] each."""
    change = log_ratio(tokens.log_probs.detach(), tokens.old_log_probs, tokens.mask)
    return {"train/ppo_kl": -change, "train/kl_old_theta_k3": bounded_exp(change) - 1.0 - change}


def mismatch_metrics(tokens: PolicyTokens, delta: Tensor, weights: ImportanceWeights | None) -> TokenMetrics:
    """Distance of old from mu, the sampler (different kernels, staleness), by `delta` = log old - log mu [N]."""
    raw, distance = bounded_exp(delta), delta.abs()
    means = {
        "train/train_rollout_logprob_abs_diff": distance,
        "train/kl_mu_old_k1": -delta,
        "train/kl_mu_old_k3": raw - 1.0 - delta,
        "train/chi2_token": bounded_exp(2.0 * delta) - 1.0,
    }
    live = (sequence_sum(torch.ones_like(delta), tokens) > 0).to(delta.dtype)
    of_weights = {
        "ess": masked(raw, tokens.mask),
        "ess_theta": masked(bounded_exp(tokens.log_rho.detach()), tokens.mask),
        "ess_sequence": bounded_exp(sequence_sum(delta, tokens)) * live,
    }
    if weights is not None:
        means["train/tis"] = weights.raw
        means["train/tis_clipfrac"] = weights.truncated.to(delta.dtype)
        means["train/tis_abs"] = (weights.raw - 1.0).abs()
        of_weights["ess_truncated"] = masked(weights.weight, tokens.mask)
    sums = {"n": tokens.mask.sum(), "n_sequences": live.sum()}
    for name, weight in of_weights.items():
        sums[f"{name}/w"] = weight.sum()
        sums[f"{name}/ww"] = weight.square().sum()
    maxima = {"train/train_rollout_logprob_abs_diff_max": distance.max() if distance.numel() else distance.sum()}
    return TokenMetrics(means=means, sums=sums, maxima=maxima)


def rejection_metrics(rejection: Rejection, tokens: PolicyTokens) -> TokenMetrics:
    """What each rule removes by itself, of tokens and of whole sequences; nothing if there is no rule."""
    dtype = tokens.log_probs.dtype
    means = {
        "train/veto_fraction" if rule == VETO else f"train/mask_fraction/{rule}": lost.to(dtype)
        for rule, lost in rejection.removed.items()
    }
    sums = {f"rejected_sequences/{rule}": lost.sum() for rule, lost in rejection.removed_sequences.items()}
    if not rejection.none:
        means["train/mask_fraction"] = (tokens.mask & ~rejection.kept).to(dtype)
        sums["kept"] = rejection.kept.sum()
    return TokenMetrics(means, sums)


def staleness_sums(tokens: PolicyTokens, delta: Tensor, policy: PolicyLoss) -> TokenMetrics:
    """By how many versions old the tokens are, `staleness/<sum>/<bucket>`: the sums of `STALENESS_SUMS`."""
    if tokens.staleness is None:
        return TokenMetrics()
    starts = torch.tensor(BUCKET_STARTS, device=tokens.staleness.device)
    bucket = torch.bucketize(tokens.staleness, starts, right=True)
    raw = bounded_exp(delta)
    clipped = (policy.clipped_high | policy.clipped_low).to(raw.dtype)
    values = torch.stack([torch.ones_like(raw), raw, raw.square(), clipped, delta.abs()])
    values = torch.where(tokens.mask, values, torch.zeros_like(values)).double()
    table = torch.zeros(len(STALENESS_SUMS), len(STALENESS_BUCKETS), dtype=values.dtype, device=values.device)
    numbers = table.index_add(1, bucket, values).flatten().unbind()
    names = [f"staleness/{sum_}/{where}" for sum_ in STALENESS_SUMS for where in STALENESS_BUCKETS]
    return TokenMetrics(sums=dict(zip(names, numbers, strict=True)))


def advantage_sums(tokens: PolicyTokens) -> dict[str, Tensor]:
    """Sums for mean and standard deviation of the advantages over trainable tokens."""
    values = masked(tokens.advantages, tokens.mask).double()
    return {"advantage": values.sum(), "advantage2": values.square().sum(), "advantage/n": tokens.mask.sum()}
