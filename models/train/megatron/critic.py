"""The critic of PPO on Megatron: a second GPT in the layout of the policy, with a head of one output.

Invariants: the head is fp32 whatever the model's precision, stands on the last stage, and is the same in all tensor
ranks; values are not divided by the temperature; the policy and the critic share no parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from models.train.dp_group import DpGroup, Float32Array
from models.train.megatron.forward import Pipeline, chosen_hidden, of_all_tokens
from models.train.megatron.inputs import ModelInputs
from models.train.megatron.optimizer import TrainedChunks
from models.train.model_set import UpdateResult
from models.train.step.critic import ValueNumerator
from models.train.step.micro_batches import MicroBatch


class ValueHead(torch.nn.Module):  # type: ignore[misc]
    """Values of hidden states, in fp32; in the place of a chunk's output layer."""

    def __init__(self, hidden_size: int, *, seed: int, device: torch.device) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        # Small, so that the first values are near 0 whatever the scale of the hidden states.
        weight = torch.empty((1, hidden_size), device="cpu").normal_(0.0, 1.0 / (hidden_size + 1), generator=generator)
        self.weight = torch.nn.Parameter(weight.to(device))
        self.bias = torch.nn.Parameter(torch.zeros(1, device=device))

    def forward(self, hidden: Tensor) -> Tensor:
        """Values [N] of hidden states [N, H]."""
        values: Tensor = torch.nn.functional.linear(hidden.float(), self.weight, self.bias).squeeze(-1)
        return values


def into_critic(chunks: Sequence[Any], *, seed: int, device: torch.device) -> None:
    """Make the chunks of a language model those of a critic, in place."""
    for chunk in chunks:
        chunk.share_embeddings_and_output_weights = False  # the embedding is no output layer any more
        if chunk.post_process:
            chunk.output_layer = ValueHead(chunk.config.hidden_size, seed=seed, device=device)


class MegatronCritic:
    """`CriticModel` over the chunks of this process."""

    def __init__(self, trained: TrainedChunks, pipeline: Pipeline, *, value_clip: float, is_mp_src_rank: bool) -> None:
        self.trained = trained
        self._pipeline = pipeline
        self._numerator = ValueNumerator(value_clip)
        self._unused = ValueNumerator(value_clip)  # sums of a process whose results another one hands in
        self._is_mp_src_rank = is_mp_src_rank

    def _values(self, hidden: Tensor, inputs: ModelInputs) -> Tensor:
        """V [N] before each chosen token, on the last stage; differentiable. Collective over its tensor ranks."""
        model = self._pipeline.last
        assert model is not None
        chosen = chosen_hidden(model, hidden, inputs, partial_gradients=False)
        return of_all_tokens(model.output_layer(chosen), inputs, model.pg_collection.cp)

    def values(self, batches: Sequence[MicroBatch]) -> list[Float32Array]:
        """V before each chosen token, one array [N] per micro-batch; nothing without `is_mp_src_rank`."""
        return self._pipeline.score(batches, self._values, keep=self._is_mp_src_rank)

    def backward(self, batches: Sequence[MicroBatch]) -> None:
        """Add the gradient of the micro-batches' numerators, and their sums."""
        sums = self._numerator if self._is_mp_src_rank else self._unused

        def numerator(number: int, hidden: Tensor, inputs: ModelInputs) -> Tensor:
            values = self._values(hidden, inputs)
            batch = batches[number]
            return values.sum() * 0.0 if batch.blank else sums(batch.members, values)

        self._pipeline.train(batches, numerator)

    def update(
        self, loss_denominator: float, mean_denominator: float, dp_group: DpGroup
    ) -> tuple[UpdateResult, dict[str, float]]:
        """Make the update, or refuse it, and start the next step; metrics of this one."""
        return self._numerator.finish_step(
            self.trained.update, self.trained.refuse, loss_denominator, mean_denominator, dp_group
        )

    def discard(self) -> None:
        """Forget the gradients and sums of the running step."""
        self.trained.clear()
        self._numerator.begin_step()
