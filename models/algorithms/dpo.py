"""Direct preference optimisation within groups, as an example of a custom loss (arXiv:2305.18290).

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
from models.algorithms.objective import GroupColumns, GroupLoss
from models.algorithms.tokens import PolicyTokens, log_ratio, sequence_sum
from models.errors import MissingColumn


def dpo(tokens: PolicyTokens, groups: GroupColumns, config: AlgorithmConfig) -> GroupLoss:
    """Loss [S], zero outside the two rollouts of each pair.

    It is scaled so that the mean over all rollouts of the step is the mean over groups of the pairs' loss. Equal best
    or worst rewards: the first rollout is taken. Raises `MissingColumn` without a reference policy or without beta.
    """
    if tokens.ref_log_probs is None or config.kl_loss_coef <= 0:
        raise MissingColumn("dpo needs a reference policy and beta: add --use-kl-loss and --kl-loss-coef above 0")
    per_sequence = sequence_sum(log_ratio(tokens.log_probs, tokens.ref_log_probs, tokens.mask), tokens)
    per_rollout = torch.zeros(groups.n_rollouts, dtype=per_sequence.dtype, device=per_sequence.device)
    per_rollout = per_rollout.index_add(0, groups.rollout, per_sequence)
    reward = groups.reward.new_zeros(groups.n_rollouts).index_put((groups.rollout,), groups.reward)
    owner = groups.group.new_zeros(groups.n_rollouts).index_put((groups.rollout,), groups.group)

    best, worst = _largest(reward, owner, groups.n_groups), _largest(-reward, owner, groups.n_groups)
    paired = reward[best] > reward[worst]  # [G]
    advance = torch.where(paired, config.kl_loss_coef * (per_rollout[best] - per_rollout[worst]), 0.0)
    members = torch.zeros_like(advance).index_add(0, owner, torch.ones_like(per_rollout))
    pair_loss = torch.where(paired, -logsigmoid(advance) * members / 2.0, 0.0)
    loss = torch.zeros_like(per_rollout).index_add(0, best, pair_loss).index_add(0, worst, pair_loss)
    margin = advance.detach()[owner]
    spread = groups.rollout
    return GroupLoss(
        loss=loss[spread] + 0.0 * per_sequence,  # a group without a pair keeps a graph
        metrics={"custom/margin": margin[spread], "custom/accuracy": (margin > 0).to(margin.dtype)[spread]},
    )


def _largest(values: Tensor, owner: Tensor, n_groups: int) -> Tensor:
    """The first rollout [G] of each group with the largest of `values` [R]; all on the device, which nothing waits for.

    A group without rollouts gets any one.
    """
    largest = values.new_full((n_groups,), -torch.inf).scatter_reduce(0, owner, values, reduce="amax")
    number = torch.arange(len(values), device=values.device)
    candidates = torch.where(values == largest[owner], number, len(values))
    first = number.new_full((n_groups,), len(values) - 1)
    return first.scatter_reduce(0, owner, candidates, reduce="amin")
