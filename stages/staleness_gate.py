"""The staleness gate: how many groups may be out, and how old a token may be when it is trained. Pure arithmetic.

A *version* counts the rollout batches that the weights were trained on. With B groups a batch and the bound eta:

    admission    capacity = (v + eta + 1) * B + extra - trained - open,   v = version that every live engine has applied
    consumption  batch t takes a group only if t - (oldest version among its trainable tokens) <= eta

With `--async-unused-samples-handler train_masked` batch t takes a group if any trainable token is that young, and masks
the others: "newest" in the place of "oldest".

Invariant I2: no token older than eta versions is trained. Admission is the pace, consumption the guarantee: a group
that needs many turns can outlive any admission rule. A slot frees when new weights have landed in the engines, since
until then a new prompt would be born old. The consumption rule stands here alone (`batches_left`); the buffer and the
train stage ask this gate. Demonstrations of supervised training were sampled by no policy and have no age (`ages`).

`extra` is over-sampling: groups beyond the need of the batches, to replace groups that filters will drop. It widens
admission only. A group that filters keep all the same outlives its batch, and consumption refuses it: as stale, or, if
eta is 0 and every leftover is too old, as discarded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from configs.schema import Config, FilterConfig, generates
from configs.schema.rollout import AUTO_MOST
from stages.messages import Outcome, Sample
from stages.rollouts import newest_version, oldest_version


def filters_on(config: FilterConfig) -> bool:
    """Whether any group may be dropped."""
    return bool(config.dynamic_sampling_filter) or config.dynamic_sampling_filter_path is not None


def over_sampling(config: Config) -> int:
    """Groups in flight beyond the need of the batches: 0 unless filters are on."""
    wanted = config.filter.over_sampling_batch_size
    if wanted is None or not filters_on(config.filter) or not generates(config):
        return 0
    return max(wanted - config.rollout.rollout_batch_size, 0)


@dataclass(frozen=True)
class StalenessGate:
    """`batch`: groups per rollout batch (B). `total`: rollout batches of the whole run, None = open end.

    `extra`: groups that may be open beyond the batches' own, see `over_sampling`. `ages`: whether tokens grow old.
    `masks`: stale tokens are masked, and do not keep the rest of their group from being trained. `floor`: the version
    of the newest rollback; tokens of earlier ones are as good as too old.
    """

    batch: int
    max_staleness: int
    total: int | None = None
    extra: int = 0
    ages: bool = True
    masks: bool = False
    floor: int = 0

    @classmethod
    def of(cls, config: Config) -> StalenessGate:
        """The gate of a resolved configuration."""
        rollout = config.rollout
        return cls(
            rollout.rollout_batch_size,
            config.asynchrony.max_staleness or 0,
            rollout.num_rollout,
            over_sampling(config),
            ages=config.train.loss_type != "sft_loss",
            masks=config.asynchrony.async_unused_samples_handler == "train_masked",
        )

    @classmethod
    def widest(cls, config: Config) -> StalenessGate:
        """The gate with the largest bound that `--async-buffer-size auto` may choose."""
        gate = cls.of(config)
        if config.asynchrony.async_buffer_size != "auto":
            return gate
        largest = AUTO_MOST + config.asynchrony.update_weights_interval - 1
        return replace(gate, max_staleness=max(gate.max_staleness, largest))

    def capacity(self, *, version: int, trained: int, open_groups: int) -> int:
        """Groups that may be admitted now (never negative). `trained` counts groups."""
        needed = (version + self.max_staleness + 1) * self.batch
        if self.total is not None:
            needed = min(needed, self.total * self.batch)
        if trained >= needed:
            return 0  # nothing is needed, so nothing is over-sampled either
        return max(needed + self.extra - trained - open_groups, 0)

    def batches_left(self, *, step: int, version: int | None) -> float:
        """How many batches after `step` (0 = the first) could still train a group: negative if `step` itself may not.

        `version`: the smallest of its trained tokens, with `masks` the largest; None if none is trained. Infinite for
        what does not grow old.
        """
        if version is None or not self.ages:
            return math.inf
        return self.max_staleness - (step - version) if version >= self.floor else -1

    def fresh(self, *, step: int, version: int | None) -> bool:
        """Whether batch `step` may train a group (I2). `version`: as in `batches_left`."""
        return self.batches_left(step=step, version=version) >= 0

    def refusal(self, step: int, samples: Sequence[Sample]) -> tuple[Outcome, str] | None:
        """How a group ends that batch `step` may not train, and why; None if it may."""
        which, version = ("newest", newest_version(samples)) if self.masks else ("oldest", oldest_version(samples))
        if self.fresh(step=step, version=version):
            return None
        detail = f"{which} token has version {version}, batch {step}, bound {self.max_staleness}"
        if version is not None and version < self.floor:
            detail += f", and version {self.floor} went back to a checkpoint"
        over_sampled = self.max_staleness == 0 and self.extra > 0
        return ("discarded", f"over-sampled: {detail}") if over_sampled else ("stale", detail)

    @property
    def most_open(self) -> int:
        """Bound of groups out at any time: what every stream must be able to hold."""
        return (self.max_staleness + 1) * self.batch + self.extra
