"""Off-policy correction: the old policy of the ratio, and the treatment of tokens that another policy sampled.

Three policies: mu sampled the token (the engine's log-probs); old is the centre of the trust region (fixed while a
rollout batch is trained); theta is being trained.

    mode        old log-probs                    weight of the policy term
    decoupled   trainer, weights of the start    truncated importance weight of exp(log old - log mu)
                (prox loglinear: between mu and theta, no forward pass)
    bypass      mu                               1 (the clipped ratio is theta / mu)
    onpolicy    trainer, weights of the start    1 (only with max staleness 0)

Sources: arXiv:2110.00641, arXiv:2505.24298, arXiv:2512.06547.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from msgspec.structs import asdict
from torch import Tensor

from configs.schema.algorithm import CorrectionConfig
from configs.schema.rejection_rules import RejectionRule, parse_rules
from models.algorithms.losses import KL_ESTIMATORS
from models.algorithms.tokens import (
    PolicyTokens,
    bounded_exp,
    log_ratio,
    masked,
    sequence_max,
    sequence_mean,
    sequence_sum,
)
from models.errors import AlgorithmError
from models.import_path import has_args, pick

WeightLevel = Literal["token", "sequence", "geometric"]


class Correction(CorrectionConfig, frozen=True):
    """The settings of off-policy correction, decided: nothing is `auto` any more. Raises `InvalidRule`."""

    policy_mode: Literal["decoupled", "bypass", "onpolicy"]
    use_tis: bool

    def __post_init__(self) -> None:
        parse_rules(self.rollout_rs)

    @property
    def rules(self) -> tuple[RejectionRule, ...]:
        """All must pass."""
        return parse_rules(self.rollout_rs)


def correction_of(config: CorrectionConfig) -> Correction:
    """Of a resolved configuration. Raises `AlgorithmError` if it is not, `InvalidRule`."""
    if config.policy_mode == "auto" or config.use_tis is None:
        raise AlgorithmError(
            f"policy_mode={config.policy_mode} and use_tis={config.use_tis} are not decided; resolve the configuration "
            "first (configs.resolve)"
        )
    return Correction(**asdict(config))


# --------------------------------------------------------------------------------------------------
# Importance weights of tokens against the policy that sampled them.
#
# Order, always: mask -> sum or mean over the sequence -> clamp to +-20 -> exp -> bound -> detach. The weight multiplies
# the whole policy term after its clipping, never the entropy or the KL term.
#
#     level      exponent of the weight, D = log old - log mu
#     token      D of the token
#     sequence   sum of D over the trainable tokens of the sequence, the same for all of them
#     geometric  mean of D over them
#
#     mode      outside the bounds
#     clip      moved to the bound (truncated importance sampling)
#     icepop    0; inside it stays as it is (arXiv:2510.18855)
#     seq_mask  moved to the bound, and 0 for sequences whose geometric mean lies outside bounds of its own
#
# Invariants: no gradient flows through a weight; a weight that is not a number stays one, for the step to be refused.
# Sources: arXiv:2110.00641, arXiv:2505.24298.


class WeightFunction(Protocol):
    """Weights [N] from log old - log mu [N] (0 where masked); a gradient through them is cut off."""

    def __call__(self, log_weight: Tensor, tokens: PolicyTokens) -> Tensor: ...


@dataclass(frozen=True)
class ImportanceWeights:
    """Weights of N tokens, without gradient; 1 where masked."""

    raw: Tensor  # [N] before the bounds
    weight: Tensor  # [N] within the bounds
    truncated: Tensor  # [N] bool, the bounds changed the weight


def log_weight_of(tokens: PolicyTokens, correction: Correction, *, measured: bool = False) -> Tensor:
    """D = log old - log mu [N], or log theta - log mu where the correction is against the current policy.

    0 where masked, no gradient. `tokens.old_log_probs` are those of the mode. `measured`: for metrics of how far the
    trainer's policy is from the sampler, where it is that of the current policy also if the old log-probs are made
    from the sampler's, and would hide that kernels differ.
    """
    current = correction.against_current or (measured and correction.loglinear)
    numerator = tokens.log_probs if current else tokens.old_log_probs
    return log_ratio(numerator.detach(), tokens.rollout_log_probs.detach(), tokens.mask)


def importance_weights(tokens: PolicyTokens, correction: Correction, log_weight: Tensor) -> ImportanceWeights:
    """Bounded weights [N] from D [N]. Raises `UnknownAlgorithm` or `AlgorithmError` for a wrong custom function."""
    raw = bounded_exp(spread(log_weight, tokens, correction.tis_level))
    if correction.custom_tis_function_path is not None:
        weight = custom_weights(correction.custom_tis_function_path, log_weight, tokens)
    else:
        weight = _bounded(raw, log_weight, tokens, correction)
    weight = torch.where(tokens.mask, weight, torch.ones_like(weight))
    return ImportanceWeights(raw=raw, weight=weight, truncated=(raw != weight) & tokens.mask)


def spread(log_weight: Tensor, tokens: PolicyTokens, level: WeightLevel) -> Tensor:
    """The exponent of each token's weight [N], 0 where masked. Nothing is clamped before it is summed."""
    if level == "token":
        return log_weight
    statistic = sequence_sum if level == "sequence" else sequence_mean
    return masked(statistic(log_weight, tokens)[tokens.sequence], tokens.mask)


def upper_bound(tokens: PolicyTokens, correction: Correction) -> Tensor:
    """1 + (high - 1) decay^s of each token s versions old, [N] or a scalar."""
    like = tokens.rollout_log_probs
    if correction.tis_clip_decay == 1.0 or tokens.staleness is None or correction.tis_level != "token":
        return torch.full((), correction.tis_clip, dtype=like.dtype, device=like.device)
    decay = torch.full((), correction.tis_clip_decay, dtype=like.dtype, device=like.device)
    return 1.0 + (correction.tis_clip - 1.0) * decay ** tokens.staleness.clamp(min=0).to(like.dtype)


def _bounded(raw: Tensor, log_weight: Tensor, tokens: PolicyTokens, correction: Correction) -> Tensor:
    high = upper_bound(tokens, correction)
    if correction.tis_mode == "icepop":
        return torch.where((raw < correction.tis_clip_low) | (raw > high), torch.zeros_like(raw), raw)
    weight = torch.minimum(raw.clamp(min=correction.tis_clip_low), high)
    if correction.tis_mode == "seq_mask":
        geometric = bounded_exp(spread(log_weight, tokens, "geometric"))
        outside = (geometric < correction.tis_seq_low) | (geometric > correction.tis_seq_high)
        weight = torch.where(outside, torch.zeros_like(weight), weight)
    return weight


def custom_weights(path: str, log_weight: Tensor, tokens: PolicyTokens) -> Tensor:
    """Weights [N] of the user's function. Raises `AlgorithmError` for another shape."""
    function = pick("importance_weights", path, dict[str, WeightFunction]())
    if has_args(function):
        words = "has slime's signature and normalises its own weights; leave --tis-batch-normalize out"
        raise AlgorithmError(f"custom_tis_function_path {path!r} {words}")
    weight = function(log_weight, tokens)
    if not isinstance(weight, Tensor) or weight.shape != log_weight.shape:
        shape = list(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
        raise AlgorithmError(
            f"custom_tis_function_path {path!r} returned {shape}: return one weight for each of the "
            f"{len(log_weight)} tokens"
        )
    return weight.detach().to(log_weight.dtype)


# --------------------------------------------------------------------------------------------------
# Old log-probs (the centre of the trust region) that are not simply what the trainer computed at the batch's start.
#
# Bypass takes the sampler's own. Log-linear ones lie between sampler and current policy, the nearer to the
# current one the older the token, and costs no forward pass (A-3PO, arXiv:2512.06547):
#
#     log old = log mu + alpha (log theta - log mu), without gradient; alpha from the token's staleness s
#
#     next_version  alpha = s / (s + 1)         the current policy counts as version V + 1
#     areal         alpha = (s - 1) / s, 0 at 0
#
# Invariants: s = 0 gives log old = log mu; with the weight old / mu and the ratio theta / old, their product is
# theta / mu for every alpha. They move with theta at each optimizer step, alpha stays that of the batch's start.


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
    return sampler if tokens.staleness is None else sampler + alpha(tokens.staleness, kind).to(change.dtype) * change


def alpha(staleness: Tensor, kind: Literal["next_version", "areal"]) -> Tensor:
    """Weight [N] of theta in the old log-probs of tokens `staleness` [N] versions old; a negative one counts as 0."""
    age = staleness.clamp(min=0).double()
    return age / (age + 1.0) if kind == "next_version" else (age - 1.0).clamp(min=0.0) / age.clamp(min=1.0)


# --------------------------------------------------------------------------------------------------
# Rejection of tokens and sequences on which old policy and sampler disagree too much.
#
# Statistics of D = log old - log mu (k1 = -D, k2 = D^2 / 2, k3 = exp(D) - 1 - D) are tested per token, or as sum, mean
# or maximum over a sequence's trainable tokens; a failed sequence test removes all of its tokens. The veto removes the
# sequence of any token with old / mu below a bound. Several rules must all pass. With `rs_unit` rollout the sequence of
# a statistic is the whole rollout: the tokens of all its rows, which only the whole step shows (`rejected_rollouts`).
#
# Invariants: rejection acts on numerators of the policy term only; counts, baselines, KL and entropy keep the trainable
# mask. Nothing is clamped but exponents. A statistic that is not a number fails no test, so that its token stays and
# the step is refused for it.


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
        none = torch.zeros(tokens.n_sequences, dtype=torch.bool, device=tokens.mask.device)
        return Rejection(kept=tokens.mask, removed={}, removed_sequences={}, failed_sequences=none)
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
    over = {"seq_sum": sequence_sum, "seq_mean": sequence_mean, "seq_max": sequence_max}
    return values if rule.level == "token" else over[rule.level](values, tokens)


# --------------------------------------------------------------------------------------------------
# Off-policy sequence masking: negative responses that drifted from their sampler teach nothing (arXiv:2512.02556).
#
# A token is dropped from the policy term if its advantage is negative and the mean of log mu - log theta over the
# trainable tokens of its sequence is above delta. Denominators stay as they are.


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
