"""Losses of one's own over whole groups: the seam behind `--loss-type custom_loss`.

A group loss sees every sequence of a group at once (the trainer never splits a group over micro-batches), with the
group index, the rollout index and the reward of each, and returns the loss of each sequence or of each token.

How it becomes one number: the loss of a sequence is the loss of each of its trainable tokens, which the reducer of
`--loss-aggregation` then averages as it does any other loss. With rollout_mean that is the mean over rollouts.

Invariants: pure; masked tokens are exactly 0 in value and gradient; the policy's mask, weights and KL do not act here.
`models/algorithms/dpo.py` is a worked example.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from torch import Tensor

from configs.schema.algorithm import AlgorithmConfig
from models.algorithms.errors import AlgorithmError
from models.algorithms.objective import Objective
from models.algorithms.select import pick
from models.algorithms.token_metrics import TokenMetrics
from models.algorithms.tokens import PolicyTokens, masked


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


GROUP_LOSSES: Final[Mapping[str, GroupLossFunction]] = {}


def group_loss_of(path: str) -> GroupLossFunction:
    """The function at `package.module:function`. Raises `UnknownAlgorithm`."""
    return pick("group_loss", path, GROUP_LOSSES)


def group_objective(
    tokens: PolicyTokens, groups: GroupColumns, config: AlgorithmConfig, function: GroupLossFunction
) -> Objective:
    """Loss [N] and metrics of a loss of one's own. Raises `AlgorithmError` if its shape is neither [S] nor [N]."""
    result = function(tokens, groups, config)
    if isinstance(result, Tensor):
        result = GroupLoss(result)
    loss = _per_token("loss", result.loss, tokens)
    means = {name: _per_token(f"metric {name}", values.detach(), tokens) for name, values in result.metrics.items()}
    means["train/loss"] = loss
    if tokens.entropy is not None:
        means["train/entropy_loss"] = masked(tokens.entropy.detach(), tokens.mask)
    return Objective(loss=loss, metrics=TokenMetrics(means), kept=tokens.mask)


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
