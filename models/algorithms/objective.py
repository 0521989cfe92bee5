"""The whole loss of a token, put together from its parts: policy term, correction, KL and entropy; or supervised.

    L = w * policy_loss + beta * kl - c * entropy        (policy_loss)
    L = -log theta                                       (sft_loss)

Invariants: pure; the weight w touches the policy term only; masked tokens are exactly 0 in value and gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from configs.schema.algorithm import AlgorithmConfig
from models.algorithms.correction import token_tis
from models.algorithms.errors import AlgorithmError
from models.algorithms.kl import kl_to_reference
from models.algorithms.losses import PolicyLossFunction, sft
from models.algorithms.metrics import TokenMetrics, advantage_sums, drift_metrics, mismatch_metrics
from models.algorithms.modes import Correction
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
    """Loss [N] of a policy update. `tokens.old_log_probs` is the anchor that belongs to the mode.

    Raises `AlgorithmError` if the KL or the entropy term is on and its input is missing.
    """
    policy = policy_loss(tokens, config)
    # In bypass mode the anchor is mu itself; the mismatch worth logging is then that of the current weights.
    against = tokens.log_probs if correction.mode == "bypass" else tokens.old_log_probs
    weights = token_tis(against, tokens.rollout_log_probs, tokens.mask, low=correction.low, high=correction.high)
    pg_loss = weights.weight * policy.loss if correction.use_tis else policy.loss
    loss = pg_loss
    clipped = (policy.clipped_high | policy.clipped_low).to(pg_loss.dtype)
    means = {
        "train/pg_loss": pg_loss,
        "train/pg_clipfrac": clipped,
        "train/pg_clipfrac_high": policy.clipped_high.to(pg_loss.dtype),
        "train/pg_clipfrac_low": policy.clipped_low.to(pg_loss.dtype),
        **drift_metrics(tokens),
    }
    if config.use_kl_loss and config.kl_loss_coef > 0:
        if tokens.ref_log_probs is None:
            raise AlgorithmError("use_kl_loss needs log-probs of the reference policy, and none were given")
        kl = kl_to_reference(config.kl_loss_type, tokens.log_probs, tokens.ref_log_probs, tokens.mask)
        loss = loss + config.kl_loss_coef * kl
        means["train/kl_loss"] = kl
    if tokens.entropy is not None:
        entropy = masked(tokens.entropy, tokens.mask)
        means["train/entropy_loss"] = entropy
        if config.entropy_coef > 0:
            loss = loss - config.entropy_coef * entropy
    elif config.entropy_coef > 0:
        raise AlgorithmError(f"entropy_coef={config.entropy_coef} needs entropies with a graph, and none were given")
    means["train/loss"] = loss
    mismatch = mismatch_metrics(tokens, weights, use_tis=correction.use_tis)
    return Objective(
        loss=loss,
        metrics=TokenMetrics(
            means={**means, **mismatch.means},
            sums={**mismatch.sums, **advantage_sums(tokens)},
            maxima=mismatch.maxima,
        ),
    )


def sft_objective(tokens: PolicyTokens) -> Objective:
    """Loss [N] of supervised training; advantages and the sampler's log-probs are ignored."""
    loss = sft(tokens)
    means = {"train/loss": loss}
    if tokens.entropy is not None:
        means["train/entropy_loss"] = masked(tokens.entropy, tokens.mask)
    return Objective(loss=loss, metrics=TokenMetrics(means=means, sums={}, maxima={}))
