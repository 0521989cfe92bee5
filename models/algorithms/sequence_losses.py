"""Policy losses whose ratio belongs to the whole response: one ratio, clipped once, for all of its tokens.

Invariant: the statistic runs over trainable tokens; rejection acts on the token losses after it. The gradient flows
through the mean into every one of them.
"""

from __future__ import annotations

from configs.schema.algorithm import AlgorithmConfig
from models.algorithms.clipping import clipped_surrogate
from models.algorithms.policy_loss import PolicyLoss
from models.algorithms.tokens import PolicyTokens, bounded_exp, log_ratio, masked, sequence_mean


def gspo(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """PPO's clip on s = exp(mean of log theta - log old over the sequence) (arXiv:2507.18071).

    The paper's eps_clip is 3e-4, its eps_clip_high 4e-4.
    """
    change = log_ratio(tokens.log_probs, tokens.old_log_probs, tokens.mask)
    mean = masked(sequence_mean(change, tokens)[tokens.sequence], tokens.mask)
    return clipped_surrogate(bounded_exp(mean), tokens, config, dual=None)
