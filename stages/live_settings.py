"""Settings that the user changes while the run goes on, as the stages read them from the topic.

A change names the batch from which on it holds, some batches ahead, so that the trainer knows of it before it begins
that batch and all its groups are treated alike. Several changes may be on their way.

Invariant: for a batch the newest change counts whose `from_step` has come; before the first, the configuration.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Struct

from configs.schema.rollout import RolloutConfig
from stages.messages import PromptGroup
from stages.ports import Readable

SETTINGS: Final = "settings"
MOST_KEPT: Final = 16  # changes on the topic; older ones are long in force


class Settings(Struct, frozen=True):
    """All of them, changed or not, from batch `from_step` (the first is 1) on."""

    from_step: int
    max_staleness: int
    lr_scale: float  # factor of the configured learning rate
    dynamic_sampling_filter: tuple[str, ...]


class Sampling(Struct, frozen=True):
    """How the rollouts of a group are drawn, in all their turns. A group has it from its admission on, so that a change
    finds no group half-way."""

    temperature: float
    top_p: float


def sampling(group: PromptGroup, rollout: RolloutConfig) -> Sampling:
    """Of a group that is trained."""
    return Sampling(
        rollout.rollout_temperature if group.temperature is None else group.temperature,
        rollout.rollout_top_p if group.top_p is None else group.top_p,
    )


def write_settings(history: tuple[Settings, ...]) -> bytes:
    """The topic value."""
    return msgspec.msgpack.encode(history[-MOST_KEPT:])


def settings_at(topic: Readable, step: int) -> Settings | None:
    """Those of a batch; None while nothing was changed."""
    value = topic.get(SETTINGS)
    if value is None:
        return None
    history = msgspec.msgpack.decode(value, type=tuple[Settings, ...])
    return next((settings for settings in reversed(history) if settings.from_step <= step), None)


def newest_settings(topic: Readable) -> Settings | None:
    """Those that were changed last, in force or not."""
    value = topic.get(SETTINGS)
    return None if value is None else msgspec.msgpack.decode(value, type=tuple[Settings, ...])[-1]
