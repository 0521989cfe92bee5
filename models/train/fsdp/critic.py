"""The value model of PPO in shards, with its optimizer.

Invariants: those of `models.train.step.critic`; the backbone is sharded like the policy, its output embedding is left
out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from models.train.dp_group import DpGroup, Float32Array
from models.train.fsdp.context import ContextParallel
from models.train.fsdp.loading import load_sharded
from models.train.fsdp.updates import ShardedUpdater
from models.train.fsdp.wrap import Sharding, reshard
from models.train.huggingface.optimizer import UpdateResult
from models.train.huggingface.scoring import Backbone
from models.train.packing.balance import MicroBatch
from models.train.packing.packing import Packing
from models.train.packing.rows import PackedRows
from models.train.spec import TrainSpec
from models.train.step.critic import ValueModel, ValueNumerator, critic_train_config


class ValueScorer(Backbone):
    """Values of chosen tokens: decoder and head in one forward pass."""

    def __init__(self, model: Any, sharding: Sharding, context: ContextParallel, *, seed: int) -> None:
        super().__init__(
            model, device=sharding.mesh.device, autocast_dtype=None, mask_dtype=sharding.precision or torch.float32
        )
        self.model = ValueModel(model.base_model, int(model.config.get_text_config().hidden_size), seed=seed)
        context.prepare(model)
        self._context = context

    def forward(self, rows: PackedRows) -> Tensor:
        """V [N] before each chosen token."""
        part = self._context.part(rows)
        values: Tensor = self.model(self._context.run(self, part))
        # Not the view that the head returns: what is done in place to the output of a root would miss its hooks.
        return self._context.joined(values.clone(), part)


class ShardedCritic:
    """`CriticModel` in shards."""

    def __init__(self, spec: TrainSpec, sharding: Sharding, context: ContextParallel) -> None:
        """Collective. Raises `CheckpointUnavailable`, `UnsupportedModel`."""
        config, train = spec.critic, spec.train
        loaded = load_sharded(
            config.critic_load or train.hf_checkpoint,
            "critic_load" if config.critic_load else "hf_checkpoint",
            train,
            sharding,
            lambda model: ValueScorer(model, sharding, context, seed=spec.seed),
            seed=spec.seed,
            precise=lambda root: [root.model.value_head],
        )
        self._root = loaded.root
        self.model: ValueModel = loaded.root.model
        self.packing: Packing = loaded.packing
        self.vocab_size = loaded.vocab_size
        self._numerator = ValueNumerator(config.value_clip)
        self._dp_group = sharding.mesh.dp_group
        self.updater = ShardedUpdater(self.model, critic_train_config(config, train), None, sharding.mesh)

    def values(self, batches: Sequence[MicroBatch]) -> list[Float32Array]:
        """V before each chosen token, one array [N] per micro-batch that is not blank."""
        out = []
        with torch.no_grad():
            for batch in batches:
                values = self._root(batch.rows)
                if not batch.blank:
                    out.append(values.cpu().numpy())
        reshard(self._root)
        return out if self._dp_group.is_mp_src_rank else []

    def backward(self, batches: Sequence[MicroBatch]) -> None:
        """Add the gradient of the micro-batches' numerators, and their sums."""
        for batch in batches:
            values = self._root(batch.rows)
            if batch.blank:
                values.backward(torch.zeros_like(values))  # the others wait for this process's part of the sums
            else:
                self._numerator(batch.members, values).backward()

    def update(
        self, loss_denominator: float, mean_denominator: float, dp_group: DpGroup
    ) -> tuple[UpdateResult, dict[str, float]]:
        """Make the update, or refuse it, and start the next step; metrics of this one."""
        result = self.updater.apply(loss_denominator)
        return result, self._numerator.metrics(result, loss_denominator, mean_denominator, dp_group)

    def discard(self) -> None:
        """Forget the gradients and sums of the running step."""
        self.updater.clear()
        self._numerator.begin_step()
