"""The whole loss of a token, put together from its parts: policy term, correction, KL and entropy; or supervised.

    L = kept * w * policy_loss + beta * kl - c * entropy        (policy_loss)
    L = -log theta                                              (sft_loss)

In order: the old log-probs that belong to the mode; the policy loss, clipped; the importance weight w of the sampler;
off-policy sequence masking; rejection. Losses over whole groups are in `group_loss.py`.

Invariants: pure; weights and masks touch the policy term only, and only its numerator; masked tokens are exactly 0 in
value and gradient; if everything is rejected the policy term is 0 with a graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.schema.algorithm import AlgorithmConfig
from models.algorithms.correction import ImportanceWeights, importance_weights, log_weight_of, mismatch_of
from models.algorithms.errors import MissingColumn
from models.algorithms.kl import kl_to_reference, sampling_ratio
from models.algorithms.losses import sft
from models.algorithms.modes import Correction
from models.algorithms.opsm import without_drifted
from models.algorithms.policy_loss import PolicyLossFunction
from models.algorithms.prox import with_old_log_probs
from models.algorithms.rejection import rejection_of
from models.algorithms.token_metrics import (
    TokenMetrics,
    advantage_sums,
    clip_metrics,
    drift_metrics,
    joined,
    mismatch_metrics,
    rejection_metrics,
    staleness_sums,
)
from models.algorithms.tokens import PolicyTokens, masked


@dataclass(frozen=True)
class Objective:
    """Loss of each token, with gradient, and what is to be logged of them."""

    loss: Tensor  # [N]
    metrics: TokenMetrics
    kept: Tensor  # [N] bool, trainable tokens that no rejection rule removed from the policy term


def policy_objective(
    tokens: PolicyTokens, config: AlgorithmConfig, correction: Correction, policy_loss: PolicyLossFunction
) -> Objective:
    """Loss [N] of a policy update. `tokens.old_log_probs` is read in decoupled (recompute) and onpolicy mode only.

    Raises `MissingColumn` if the KL or the entropy term is on and its input is missing.
    """
    tokens = with_old_log_probs(tokens, correction)
    policy = policy_loss(tokens, config)
    delta = log_weight_of(tokens, correction)
    weights = importance_weights(tokens, correction, delta) if correction.use_tis else None
    rejection = rejection_of(tokens, correction, delta)
    means = {**clip_metrics(policy), **drift_metrics(tokens)}
    pg_loss = policy.loss
    if weights is not None:
        # A mean of 1 divides nothing: statistics of a step are only there if they were asked for.
        pg_loss = pg_loss * (weights.weight / tokens.statistics.weight_mean)
    if correction.use_opsm:
        pg_loss, dropped = without_drifted(pg_loss, tokens, correction.opsm_delta)
        means["train/opsm_fraction"] = dropped.to(pg_loss.dtype)
    if not rejection.none:
        # What is not a number passes no test and fails none: it goes on, for the step to be refused.
        pg_loss = torch.where(delta.isnan(), delta, masked(pg_loss, rejection.kept))
        if correction.renormalize_after_rejection and tokens.kept_scale is not None:
            pg_loss = pg_loss * tokens.kept_scale[tokens.sequence].to(pg_loss.dtype)
    means["train/pg_loss"] = pg_loss
    loss, terms = _with_regularisers(pg_loss, tokens, config, correction, weights)
    mismatch = mismatch_of(tokens, correction)
    metrics = joined(
        TokenMetrics({**means, **terms, "train/loss": loss}, advantage_sums(tokens)),
        mismatch_metrics(tokens, mismatch, weights),
        rejection_metrics(rejection, tokens),
        staleness_sums(tokens, mismatch, policy),
    )
    return Objective(loss=loss, metrics=metrics, kept=rejection.kept)


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


def sft_objective(tokens: PolicyTokens) -> Objective:
    """Loss [N] of supervised training; advantages and the sampler's log-probs are ignored."""
    loss = sft(tokens)
    means = {"train/loss": loss}
    if tokens.entropy is not None:
        means["train/entropy_loss"] = masked(tokens.entropy, tokens.mask)
    return Objective(loss=loss, metrics=TokenMetrics(means), kept=tokens.mask)
