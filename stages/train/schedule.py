"""What is due after a step: publish the weights, evaluate them, save a checkpoint, end the run. No I/O, no clock."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping

from msgspec import Struct

from configs.schema import Config, generates


class Due(Struct, frozen=True):
    """`evaluate` implies `publish`: an evaluation reads published weights."""

    publish: bool
    evaluate: bool
    save: bool
    end: bool


class Schedule:
    """Of one start of a run. Steps are counted over all its starts; step s gives version s of the weights."""

    def __init__(self, config: Config, *, first: int) -> None:
        """`first`: the step with which this start of the run began; its weights are published at once."""
        self.total = config.rollout.num_rollout or 0  # the step with which the run ends
        self._config, self._first, self._publishes = config, first, generates(config)

    def due(self, step: int, *, target_reached: bool = False, save_requested: bool = False) -> Due:
        """After `step` batches. `target_reached`: of a warm start; `save_requested`: by the user."""
        end = target_reached or step >= self.total
        interval, save_interval = self._config.asynchrony.update_weights_interval, self._config.checkpoint.save_interval
        publish = self._publishes and (end or step == self._first or step % interval == 0)
        save = end or save_requested or (save_interval is not None and step % save_interval == 0)
        return Due(publish, publish and self._evaluates(step), save, end)

    def _evaluates(self, version: int) -> bool:
        evaluation = self._config.eval
        if evaluation.eval_interval is None or not evaluation.eval_prompt_data:
            return False
        if version == 0 and evaluation.skip_eval_before_train:
            return False
        return version % evaluation.eval_interval == 0 or version >= self.total


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
