"""The whole loss of a token, put together from its parts: policy term, correction, KL and entropy; or supervised.

    L = kept * w * policy_loss + beta * kl - c * entropy        (policy_loss)
    L = -log theta                                              (sft_loss)

In order: the old log-probs that belong to the mode; the policy loss, clipped; the importance weight w of the sampler;
off-policy sequence masking; rejection. Losses over whole groups follow at the end of the file.

Invariants: no I/O, no state; weights and masks touch the policy term only, and only its numerator; masked tokens are
exactly 0 in value and gradient; if everything is rejected the policy term is 0 with a graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

import torch
from torch import Tensor

from configs.schema.algorithm import AlgorithmConfig
from models.algorithms.correction import (
    VETO,
    Correction,
    ImportanceWeights,
    Rejection,
    importance_weights,
    log_weight_of,
    rejection_of,
    with_old_log_probs,
    without_drifted,
)
from models.algorithms.losses import PolicyLoss, PolicyLossFunction, kl_to_reference, sft
from models.algorithms.metrics import STALENESS_BUCKETS, STALENESS_SUMS, TokenMetrics
from models.algorithms.slime_hooks import Hooks
from models.algorithms.tokens import PolicyTokens, bounded_exp, log_ratio, masked, sequence_sum
from models.errors import AlgorithmError, MissingColumn, UnknownAlgorithm
from models.import_path import has_args, pick


@dataclass(frozen=True)
class Objective:
    """Loss of each token, with gradient, and its metrics."""

    loss: Tensor  # [N]
    metrics: TokenMetrics
    kept: Tensor  # [N] bool, trainable tokens that no rejection rule removed from the policy term


def policy_objective(
    tokens: PolicyTokens,
    config: AlgorithmConfig,
    correction: Correction,
    policy_loss: PolicyLossFunction,
    hooks: Hooks = Hooks(),  # noqa: B008 - frozen, and none
) -> Objective:
    """Loss [N] of a policy update. `tokens.old_log_probs` is read in decoupled (recompute) and onpolicy mode only.

    `hooks`: functions with slime's signatures. Raises `MissingColumn` if the KL or the entropy term is on and its input
    is missing, `AlgorithmError` for an answer of such a function with another shape.
    """
    tokens = with_old_log_probs(tokens, correction)
    policy = policy_loss(tokens, config)
    delta = log_weight_of(tokens, correction)
    weights = importance_weights(tokens, correction, delta) if correction.use_tis and hooks.tis is None else None
    rejection = rejection_of(tokens, correction, delta)
    change = log_ratio(tokens.log_probs.detach(), tokens.old_log_probs, tokens.mask)  # of theta from old
    means = {"train/ppo_kl": -change, "train/kl_old_theta_k3": bounded_exp(change) - 1.0 - change}
    means |= clip_metrics(policy)
    pg_loss, left = policy.loss, rejection.kept.to(delta.dtype)
    if hooks.tis is not None:
        numerator = tokens.log_probs if correction.against_current else tokens.old_log_probs
        pg_loss, kept, found = hooks.weighted(pg_loss, tokens, numerator)
        left, means = left * kept, means | found
    if weights is not None:
        # A mean of 1 divides nothing: statistics of a step exist only if the loss needs them.
        pg_loss = pg_loss * (weights.weight / tokens.statistics.weight_mean)
    if correction.use_opsm:
        pg_loss, dropped = without_drifted(pg_loss, tokens, correction.opsm_delta)
        means["train/opsm_fraction"] = dropped.to(pg_loss.dtype)
    if not rejection.none:
        # NaN passes no test and fails none: it stays in the loss, so that the trainer refuses the step.
        pg_loss = torch.where(delta.isnan(), delta, masked(pg_loss, rejection.kept))
        if correction.renormalize_after_rejection and tokens.kept_scale is not None:
            pg_loss = pg_loss * tokens.kept_scale[tokens.sequence].to(pg_loss.dtype)
    if hooks.reducer is not None:
        pg_loss = hooks.reduced(pg_loss, left)
    means["train/pg_loss"] = pg_loss
    loss, terms = _with_regularisers(pg_loss, tokens, config, correction, weights)
    values = masked(tokens.advantages, tokens.mask).double()
    sums = {"advantage": values.sum(), "advantage2": values.square().sum(), "advantage/n": tokens.mask.sum()}
    mismatch = log_weight_of(tokens, correction, measured=True)
    metrics = joined(
        TokenMetrics({**means, **terms, "train/loss": loss}, sums),
        mismatch_metrics(tokens, mismatch, weights),
        rejection_metrics(rejection, tokens),
        staleness_sums(tokens, mismatch, policy),
    )
    return Objective(loss=loss, metrics=metrics, kept=left > 0)


def _with_regularisers(
    pg_loss: Tensor,
    tokens: PolicyTokens,
    config: AlgorithmConfig,
    correction: Correction,
    weights: ImportanceWeights | None,
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Policy term plus KL and entropy, which no mask but the trainable one touches; and their values [N]."""
    loss, terms = pg_loss, dict[str, Tensor]()
    if config.use_kl_loss and config.kl_loss_coef > 0:
        if tokens.ref_log_probs is None:
            raise MissingColumn("use_kl_loss needs log-probs of the reference policy, and none were given")
        ratio = None
        if config.use_unbiased_kl:
            weight = torch.ones_like(pg_loss) if weights is None else weights.weight
            ratio = sampling_ratio(tokens, correction, weight)
        kl = kl_to_reference(config.kl_loss_type, tokens.log_probs, tokens.ref_log_probs, tokens.mask, ratio)
        loss = loss + config.kl_loss_coef * kl
        terms["train/kl_loss"] = kl
    if tokens.entropy is not None:
        entropy = masked(tokens.entropy, tokens.mask)
        terms["train/entropy_loss"] = entropy
        if config.entropy_coef > 0:
            loss = loss - config.entropy_coef * entropy
    elif config.entropy_coef > 0:
        raise MissingColumn(f"entropy_coef={config.entropy_coef} needs entropies with a graph, and none were given")
    return loss, terms


def sampling_ratio(tokens: PolicyTokens, correction: Correction, weight: Tensor) -> Tensor:
    """Ratio [N] of theta to the policy that sampled, with gradient: what makes the KL term unbiased off-policy.

    onpolicy: theta / old. decoupled: theta / old times the detached importance `weight` [N]. bypass: theta / mu, at
    most the upper bound of the weights. `tokens.old_log_probs` are those of the mode.
    """
    ratio = bounded_exp(log_ratio(tokens.log_probs, tokens.old_log_probs, tokens.mask))
    if correction.policy_mode == "bypass":
        return ratio.clamp(max=correction.tis_clip)
    return ratio * weight if correction.policy_mode == "decoupled" else ratio


def sft_objective(tokens: PolicyTokens) -> Objective:
    """Loss [N] of supervised training; advantages and the sampler's log-probs are ignored."""
    return _alone(tokens, sft(tokens), {})


def _alone(tokens: PolicyTokens, loss: Tensor, means: Mapping[str, Tensor]) -> Objective:
    """A loss [N] without correction, KL or entropy; `means` [N]: further metrics."""
    entropy = {} if tokens.entropy is None else {"train/entropy_loss": masked(tokens.entropy.detach(), tokens.mask)}
    return Objective(loss, TokenMetrics({**means, "train/loss": loss, **entropy}), kept=tokens.mask)


# --------------------------------------------------------------------------------------------------
# Figures of a micro-batch, for `metrics.MetricTotals`. Mismatch is measured over trainable tokens before
# rejection and truncation.


BUCKET_STARTS: Final = (1, 2, 3, 5)  # of `STALENESS_BUCKETS`, from the second on


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
    bucket = torch.stack([tokens.staleness >= start for start in BUCKET_STARTS]).sum(0)
    raw = bounded_exp(delta)
    clipped = (policy.clipped_high | policy.clipped_low).to(raw.dtype)
    values = torch.stack([torch.ones_like(raw), raw, raw.square(), clipped, delta.abs()])
    values = torch.where(tokens.mask, values, torch.zeros_like(values)).double()
    table = torch.zeros(len(STALENESS_SUMS), len(STALENESS_BUCKETS), dtype=values.dtype, device=values.device)
    numbers = table.index_add(1, bucket, values).flatten().unbind()
    names = [f"staleness/{sum_}/{where}" for sum_ in STALENESS_SUMS for where in STALENESS_BUCKETS]
    return TokenMetrics(sums=dict(zip(names, numbers, strict=True)))


# --------------------------------------------------------------------------------------------------
# Custom losses over whole groups: the seam behind `--loss-type custom_loss`.
#
# A group loss sees every sequence of a group at once (the trainer never splits a group over micro-batches), with the
# group index, the rollout index and the reward of each, and returns the loss of each sequence or of each token.
#
# How it becomes one number: the loss of a sequence is the loss of each of its trainable tokens, which the reducer of
# `--loss-aggregation` then averages as it does any other loss. With rollout_mean that is the mean over rollouts.
#
# Invariants: no I/O, no state; masked tokens are exactly 0 in value and gradient; the policy's mask, weights and KL do
# not act here. `models/algorithms/dpo.py` is a worked example.


@dataclass(frozen=True)
class GroupColumns:
    """What belongs to the S sequences of `PolicyTokens`; whole groups only."""

    group: Tensor  # [S] int64, 0 .. G - 1
    rollout: Tensor  # [S] int64, 0 .. R - 1 over all groups; sequences of one rollout share it
    reward: Tensor  # [S] float, of the sequence's rollout
    n_groups: int  # G
    n_rollouts: int  # R


@dataclass(frozen=True)
class GroupLoss:
    """Loss and, if wanted, metrics of a group loss."""

    loss: Tensor  # [S] per sequence, or [N] per token; with gradient
    metrics: Mapping[str, Tensor] = field(default_factory=dict)  # [S] or [N] each, logged under their names


class GroupLossFunction(Protocol):
    """Loss over whole groups. A bare tensor means a loss without metrics."""

    def __call__(self, tokens: PolicyTokens, groups: GroupColumns, config: AlgorithmConfig) -> Tensor | GroupLoss: ...


def group_loss_of(path: str) -> GroupLossFunction:
    """The function at `package.module:function`. Raises `UnknownAlgorithm`."""
    function = pick("group_loss", path, dict[str, GroupLossFunction]())
    if has_args(function):
        raise UnknownAlgorithm(
            f"group_loss {path!r} has slime's signature (args, batch, logits, ...), but the logits of a micro-batch "
            "never exist at once here; take (tokens, groups, config) with tokens.log_probs and tokens.entropy"
        )
    return function


def group_objective(
    tokens: PolicyTokens, groups: GroupColumns, config: AlgorithmConfig, function: GroupLossFunction
) -> Objective:
    """Loss [N] and metrics of a custom loss. Raises `AlgorithmError` if its shape is neither [S] nor [N]."""
    result = function(tokens, groups, config)
    if isinstance(result, Tensor):
        result = GroupLoss(result)
    loss = _per_token("loss", result.loss, tokens)
    means = {name: _per_token(f"metric {name}", values.detach(), tokens) for name, values in result.metrics.items()}
    return _alone(tokens, loss, means)


def _per_token(what: str, values: Tensor, tokens: PolicyTokens) -> Tensor:
    """[N], 0 where masked. A tensor that could be either is read as one value per sequence."""
    if values.shape == (tokens.n_sequences,):
        return masked(values[tokens.sequence], tokens.mask)
    if values.shape == tokens.mask.shape:
        return masked(values, tokens.mask)
    raise AlgorithmError(
        f"{what} of the custom loss has shape {list(values.shape)}: return one value per sequence "
        f"[{tokens.n_sequences}] or per token [{len(tokens.mask)}]"
    )
