"""Direct preference optimisation within groups, as an example of a loss of one's own (arXiv:2305.18290).

    --loss-type custom_loss --custom-loss-function-path models.algorithms.dpo:dpo --use-kl-loss --kl-loss-coef 0.1

In each group the rollout with the best reward is preferred to the one with the worst:

    L = -log sigmoid(beta [(log theta - log ref)(best) - (log theta - log ref)(worst)])

with log-probs summed over the rollout's trainable tokens, and beta = kl_loss_coef, which is what beta weighs in DPO:
the divergence from the reference. A group whose rewards are all equal has loss 0, margin 0 and accuracy 0.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from configs.schema.algorithm import AlgorithmConfig
from models.algorithms.errors import MissingColumn
from models.algorithms.group_loss import GroupColumns, GroupLoss
from models.algorithms.tokens import PolicyTokens, log_ratio, sequence_sum


def dpo(tokens: PolicyTokens, groups: GroupColumns, config: AlgorithmConfig) -> GroupLoss:
    """Loss [S], zero outside the two rollouts of each pair.

    It is scaled so that the mean over all rollouts of the step is the mean over groups of the pairs' loss. Equal best
    or worst rewards: the first rollout is taken. Raises `MissingColumn` without a reference policy or without beta.
    """
    if tokens.ref_log_probs is None or config.kl_loss_coef <= 0:
        raise MissingColumn("dpo needs a reference policy and beta: add --use-kl-loss and --kl-loss-coef above 0")
    log_ratios = log_ratio(tokens.log_probs, tokens.ref_log_probs, tokens.mask)
    per_sequence = sequence_sum(log_ratios, tokens)
    per_rollout = torch.zeros(groups.n_rollouts, dtype=per_sequence.dtype, device=per_sequence.device)
    per_rollout = per_rollout.index_add(0, groups.rollout, per_sequence)
    reward = torch.zeros(groups.n_rollouts, dtype=groups.reward.dtype, device=per_sequence.device)
    reward = reward.index_put((groups.rollout,), groups.reward)
    owner = torch.zeros(groups.n_rollouts, dtype=torch.int64, device=per_sequence.device)
    owner = owner.index_put((groups.rollout,), groups.group)

    loss = torch.zeros_like(per_rollout)
    right, margin = torch.zeros_like(per_rollout), torch.zeros_like(per_rollout)
    for members in _members(owner, groups.n_groups):
        best, worst = members[reward[members].argmax()], members[reward[members].argmin()]
        if not bool(reward[best] > reward[worst]):
            continue
        advance = config.kl_loss_coef * (per_rollout[best] - per_rollout[worst])
        pair = torch.stack([best, worst])
        share = len(members) / 2.0
        loss = loss.index_add(0, pair, (-logsigmoid(advance) * share).expand(2))
        margin[members] = advance.detach()
        right[members] = (advance.detach() > 0).to(right.dtype)
    spread = groups.rollout
    return GroupLoss(
        loss=loss[spread] + 0.0 * per_sequence,  # a group without a pair keeps a graph
        metrics={"custom/margin": margin[spread], "custom/accuracy": right[spread]},
    )


def _members(owner: Tensor, n_groups: int) -> list[Tensor]:
    """Rollouts of each group that has any, in order."""
    found = [torch.nonzero(owner == group).squeeze(-1) for group in range(n_groups)]
    return [members for members in found if len(members)]
