"""Learning rate by optimizer update: linear warm-up, then constant, linear or cosine decay to `min_lr`.

Invariant: a pure function of the number of updates already made, so that resuming needs no state but that number.
"""

from __future__ import annotations

import math

from configs.schema.train import TrainConfig
from models.errors import TrainConfigInvalid


def check_schedule(train: TrainConfig, total_steps: int | None) -> None:
    """Raise `TrainConfigInvalid` if the decay has no known end or does not fall."""
    if train.lr_decay_style == "constant":
        return
    if total_steps is None:
        raise TrainConfigInvalid(
            f"lr_decay_style={train.lr_decay_style} needs the number of optimizer steps, which is unknown; "
            "set --num-rollout or use --lr-decay-style constant"
        )
    if train.min_lr > train.lr:
        raise TrainConfigInvalid(
            f"min_lr={train.min_lr} is above lr={train.lr}: a decay cannot rise; set --min-lr below --lr"
        )


def learning_rate(updates: int, train: TrainConfig, total_steps: int | None) -> float:
    """Learning rate of the next update after `updates` updates; the first update of a warm-up of W is lr / W."""
    if updates < train.lr_warmup_iters:
        return train.lr * (updates + 1) / train.lr_warmup_iters
    if train.lr_decay_style == "constant" or total_steps is None:
        return train.lr
    span = max(total_steps - train.lr_warmup_iters, 1)
    progress = min((updates - train.lr_warmup_iters) / span, 1.0)
    remaining = 1.0 - progress if train.lr_decay_style == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return train.min_lr + (train.lr - train.min_lr) * remaining
