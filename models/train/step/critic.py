"""The critic of PPO: a model of its own with a scalar head, that learns what the policy can expect.

V_t is read where the log-prob of token t is read: at the token before it, so that it has not seen token t.

Invariants: values are not divided by the temperature; the head is fp32; losses are numerators, divided by the step's
denominator in `update` alone; the policy and the critic share no parameter.

Source of the clipped loss: arXiv:1707.06347 (section 5 leaves it open; this is the form of the published code, without
the factor 1/2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec
import torch
from torch import Tensor

from configs.schema.algorithm import CriticConfig
from configs.schema.train import TrainConfig
from models.train.dp_group import DpGroup
from models.train.model_set import UpdateResult
from models.train.step.examples import Example
from models.train.step.micro_batch_loss import float_column, weight_column


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float) -> tuple[Tensor, Tensor]:
    """max((V - G)^2, (V_c - G)^2) with V_c = V_old + clamp(V - V_old, -clip, clip); [N] each.

    With it, where the clipped value is further from the return than the free one [N].
    """
    change = values - old_values
    free = (values - returns).square()
    held = (old_values + change.clamp(-clip, clip) - returns).square()
    # Within the range both are the same value, and one is larger by rounding alone.
    return torch.maximum(free, held), (held > free) & (change.abs() > clip)


class ValueModel(torch.nn.Module):  # type: ignore[misc]
    """A decoder and the head that reads a value from its last hidden states."""

    def __init__(self, decoder: torch.nn.Module, hidden_size: int, *, seed: int) -> None:
        super().__init__()
        self.decoder = decoder
        self.value_head = torch.nn.Linear(hidden_size, 1)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            # Small, so that the first values are near 0 whatever the scale of the hidden states.
            self.value_head.weight.normal_(0.0, 1.0 / (hidden_size + 1), generator=generator)
            self.value_head.bias.zero_()

    def forward(self, hidden: Tensor) -> Tensor:
        """Values [N] of hidden states [N, H]."""
        values: Tensor = self.value_head(hidden.float()).squeeze(-1)
        return values


class ValueNumerator:
    """The loss of the critic, whatever computed the values, and its sums over a step."""

    def __init__(self, clip: float) -> None:
        self._clip = clip
        self.begin_step()

    def begin_step(self) -> None:
        """Start new sums."""
        self._loss = self._clipped = 0.0

    def __call__(self, members: Sequence[Example], values: Tensor) -> Tensor:
        """The numerator, a scalar with a graph. `members` in the order of the rows; `values` [N], with a graph."""
        device = values.device
        old = float_column([example.values for example in members], device)
        returns = float_column([example.returns for example in members], device)
        loss, clipped = value_loss(values, old, returns, clip=self._clip)
        weights = weight_column(members, device)
        numerator = torch.dot(loss, weights)
        self._loss += numerator.detach().double()
        self._clipped += torch.dot(clipped.to(weights.dtype), weights).double()
        return numerator

    def finish_step(
        self,
        update: Callable[[float], UpdateResult],
        refuse: Callable[[], UpdateResult],
        loss_denominator: float,
        mean_denominator: float,
        dp_group: DpGroup,
    ) -> tuple[UpdateResult, dict[str, float]]:
        """Make the update, or refuse it for a loss that is not finite, and start the next step; metrics of this one.

        A maximum hides from the gradient that the other term is not a number: the loss itself is asked.
        """
        sums = dp_group.merge({"loss": float(self._loss), "clipped": float(self._clipped)})
        self.begin_step()
        result = update(loss_denominator) if math.isfinite(sums["loss"]) else refuse().for_its_loss()
        return result, {
            "train/value_loss": sums["loss"] / loss_denominator,
            "train/value_clipfrac": sums["clipped"] / mean_denominator,
            "train/critic_grad_norm": result.grad_norm,
            "train/critic_lr": result.lr,
        }


def critic_train_config(config: CriticConfig, train: TrainConfig) -> TrainConfig:
    """The optimizer's options of the critic."""
    return msgspec.structs.replace(
        train, lr=config.critic_lr, lr_warmup_iters=config.critic_lr_warmup_iters, lr_decay_style="constant"
    )
