"""The value model of PPO on a Hugging Face backbone, with its optimizer.

Invariants: those of `models.train.step.critic`; the backbone's output embedding is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from models.train.dp_group import DpGroup, Float32Array
from models.train.huggingface.optimizer import Updater, UpdateResult
from models.train.huggingface.placement import Placement
from models.train.huggingface.scoring import Backbone, Passes
from models.train.packing.micro_batches import MicroBatch
from models.train.packing.rows import PackedRows
from models.train.step.critic import ValueModel, ValueNumerator, critic_train_config


class ValueScorer(Backbone):
    """Values of chosen tokens: decoder and head in one forward pass."""

    def __init__(self, model: Any, passes: Passes, *, seed: int) -> None:
        super().__init__(model, passes)
        self.model = ValueModel(model.base_model, int(model.config.get_text_config().hidden_size), seed=seed)

    def forward(self, rows: PackedRows) -> Tensor:
        """V [N] before each chosen token."""
        part = self._context.part(rows)
        with self.autocast():
            hidden = self.own_hidden(part)
        values: Tensor = self.model(hidden)
        # Not the view that the head returns: what is done in place to the output of a root would miss its hooks.
        return self._context.joined(values.clone(), part)


class Critic:
    """`CriticModel` wherever its tensors lie."""

    def __init__(self, placement: Placement) -> None:
        """Collective. Raises `CheckpointUnavailable`, `UnsupportedModel`."""
        config, train, seed = placement.spec.critic, placement.spec.train, placement.spec.seed
        self._placement = placement
        self.placed = placement.load(
            config.critic_load or train.hf_checkpoint,
            "critic_load" if config.critic_load else "hf_checkpoint",
            lambda model: ValueScorer(model, placement.passes, seed=seed),
            precise=lambda root: [root.model.value_head],
        )
        self.model: ValueModel = self.placed.root.model
        self._numerator = ValueNumerator(config.value_clip)
        self.updater = Updater(self.model, critic_train_config(config, train), None, placement.sum_over_shards)

    def values(self, batches: Sequence[MicroBatch]) -> list[Float32Array]:
        """V before each chosen token, one array [N] per micro-batch that is not blank."""
        return self._placement.scores(self.placed, self.placed.root, batches)

    def backward(self, batches: Sequence[MicroBatch]) -> None:
        """Add the gradient of the micro-batches' numerators, and their sums."""
        for batch in self._placement.runs(batches):
            values = self.placed.root(batch.rows)
            if batch.blank:
                values.backward(torch.zeros_like(values))  # the others wait for this process's part of the sums
            else:
                self._numerator(batch.members, values).backward()

    def update(
        self, loss_denominator: float, mean_denominator: float, dp_group: DpGroup
    ) -> tuple[UpdateResult, dict[str, float]]:
        """Make the update, or refuse it, and start the next step; metrics of this one."""

        def apply(denominator: float) -> UpdateResult:
            self._placement.sum_gradients(parameter for _, parameter in self.updater.named_parameters)
            return self.updater.apply(denominator)

        return self._numerator.finish_step(apply, self.updater.refuse, loss_denominator, mean_denominator, dp_group)

    def discard(self) -> None:
        """Forget the gradients and sums of the running step."""
        self.updater.clear()
        self._numerator.begin_step()
