"""What is due after a step: publish the weights, evaluate them, save a checkpoint, end the run. No I/O, no clock."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from configs.schema import Config, generates


@dataclass(frozen=True)
class Due:
    """`evaluate` implies `publish`: an evaluation reads published weights."""

    publish: bool
    evaluate: bool
    save: bool
    end: bool


@dataclass(frozen=True)
class Schedule:
    """Of one start of a run. Steps are counted over all its starts; step s gives version s of the weights.

    Args:
        total: the step with which the run ends.
        first: the step with which this start of the run began; its weights are published at once.
        publish_every, save_every: steps; None = not at all.
        evaluate_every: versions; None = no evaluation.
        evaluate_initial: whether version 0 is evaluated.
    """

    total: int
    first: int
    publish_every: int | None
    save_every: int | None
    evaluate_every: int | None
    evaluate_initial: bool

    @classmethod
    def of(cls, config: Config, *, first: int) -> Schedule:
        publishes, evaluation = generates(config), config.eval
        return cls(
            total=config.rollout.num_rollout or 0,
            first=first,
            publish_every=config.asynchrony.update_weights_interval if publishes else None,
            save_every=config.checkpoint.save_interval,
            evaluate_every=evaluation.eval_interval if publishes and evaluation.eval_prompt_data else None,
            evaluate_initial=not evaluation.skip_eval_before_train,
        )

    def due(self, step: int, *, target_reached: bool = False, save_requested: bool = False) -> Due:
        """After `step` batches. `target_reached`: of a warm start; `save_requested`: by the user."""
        end = target_reached or step >= self.total
        publish = self.publish_every is not None and (end or step == self.first or step % self.publish_every == 0)
        return Due(
            publish=publish,
            evaluate=publish and self._evaluates(step),
            save=end or save_requested or (self.save_every is not None and step % self.save_every == 0),
            end=end,
        )

    def _evaluates(self, version: int) -> bool:
        if self.evaluate_every is None or (version == 0 and not self.evaluate_initial):
            return False
        return version % self.evaluate_every == 0 or version >= self.total


class TargetLoss:
    """Whether a supervised phase may end early: the mean loss of its newest batches is below the target."""

    def __init__(self, config: Config, batches: int = 10) -> None:
        supervised = config.train.loss_type == "sft_loss"
        self._target = config.warm_start.warm_start_target_loss if supervised else None
        self._losses: deque[float] = deque(maxlen=batches)

    def reached(self, metrics: Mapping[str, float]) -> bool:
        """Counts a batch by its metrics."""
        if self._target is None:
            return False
        self._losses.append(metrics.get("train/loss", math.inf))
        return len(self._losses) == self._losses.maxlen and statistics.fmean(self._losses) < self._target
