"""Micro-batches through the stages of a pipeline, forward and backward, by Megatron's own schedules.

Invariants:
- all processes of a replica are given the same micro-batches, and all replicas equally many;
- losses are numerators and are divided by nothing; gradients are added to those that are there, and no process sends
  them to another: that is done once for a step, by the optimizer;
- micro-batches may differ in shape: stages tell each other before they send.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.train.dp_group import Float32Array
from models.train.megatron.forward import hidden_states
from models.train.megatron.held_parameters import unwrap
from models.train.megatron.inputs import ModelInputs, RowForm, model_inputs
from models.train.packing.micro_batches import MicroBatch
from models.train.packing.packing import Layout, Unit
from models.train.packing.rows import pack_rows

# What is wanted of one micro-batch on the last stage: (its number, hidden states, inputs) -> scalar with a graph, or
# None where nothing is trained.
LastStage = Callable[[int, Tensor, ModelInputs], Tensor | None]
# Numbers [N] of the chosen tokens, from the hidden states on the last stage.
OfTokens = Callable[[Tensor, ModelInputs], Tensor]


class Pipeline:
    """The chunks of one model in this process."""

    def __init__(self, chunks: Sequence[Any], form: RowForm, *, stages: int, interleaved: bool) -> None:
        """`chunks`: wrapped for data parallelism, or bare. `interleaved`: several chunks in each of the `stages`."""
        self._chunks = list(chunks)
        self._form = form
        self._stages = stages
        self._interleaved = interleaved
        for chunk in chunks:
            config = unwrap(chunk).config
            config.variable_seq_lengths = stages > 1
            # What the next stage has is not kept here. Megatron's interleaved schedule lets go of an output before it
            # has waited for its send: gloo then sends what others have written into that memory since.
            config.deallocate_pipeline_outputs = stages > 1 and not interleaved
            config.calculate_per_token_loss = True  # numerators are left as they are
            config.finalize_model_grads_func = None
            if interleaved:
                # Two stages are each other's neighbour on both sides: sent in one batch, activations and gradients
                # would be taken for one another.
                config.overlap_p2p_comm, config.batch_p2p_comm = True, False

    @property
    def last(self) -> Any | None:
        """The chunk that ends the model, if it is in this process, unwrapped."""
        model = unwrap(self._chunks[-1])
        return model if model.post_process else None

    def train(self, batches: Sequence[MicroBatch], last_stage: LastStage) -> None:
        """Add the gradients of all numerators; `last_stage` gives one for every micro-batch."""
        with ExitStack() as stack:
            for chunk in self._chunks:
                stack.enter_context(chunk.no_sync())
            self._run(batches, last_stage, forward_only=False)

    def score(self, batches: Sequence[MicroBatch], of_tokens: OfTokens, *, keep: bool) -> list[Float32Array]:
        """Run all micro-batches without gradients; one array [N] each of what the last stage finds, if `keep`."""
        found: dict[int, Float32Array] = {}

        def last_stage(number: int, hidden: Tensor, inputs: ModelInputs) -> None:
            numbers = of_tokens(hidden, inputs)
            if keep:
                found[number] = numbers.float().cpu().numpy()

        with torch.no_grad():
            self._run(batches, last_stage, forward_only=True)
        return [found[number] for number in sorted(found)]

    def _run(self, batches: Sequence[MicroBatch], last_stage: LastStage, *, forward_only: bool) -> None:
        if not batches:
            return
        from megatron.core.pipeline_parallel import get_forward_backward_func

        asked, filled = len(batches), self._filled_up(batches)

        def forward_step(numbered: Iterator[tuple[int, MicroBatch]], chunk: Any) -> tuple[Tensor, Callable[..., Any]]:
            number, batch = next(numbered)
            inputs = model_inputs(batch.rows, self._form)
            hidden = hidden_states(chunk, inputs)

            def numerator(output: Tensor, non_loss_data: bool = False) -> Any:
                found = last_stage(number, output, inputs) if number < asked else None
                if forward_only:
                    return None
                # Nothing comes of a micro-batch that only fills up; its gradients are zeros.
                loss = output.sum() * 0.0 if found is None else found
                return loss, torch.zeros([], dtype=torch.int, device=output.device), {}

            return hidden, numerator

        iterators = [iter(enumerate(filled)) for _ in self._chunks]
        shape = filled[0].rows.input_ids.shape
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if self._interleaved else iterators[0],
            model=self._chunks if self._interleaved else self._chunks[0],
            num_microbatches=len(filled),
            seq_length=shape[1],  # of no meaning where shapes vary
            micro_batch_size=shape[0],
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _filled_up(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """As many micro-batches as the schedule takes: interleaved, a multiple of the stages."""
        missing = -len(batches) % self._stages if self._interleaved else 0
        return [*batches, *[_filler()] * missing]


def _filler() -> MicroBatch:
    """A micro-batch of one token that counts for nothing."""
    ids, at = np.zeros(2, dtype=np.int32), np.array([1], dtype=np.int64)
    layout = Layout(((Unit((0,), 0, 1),),), 1)
    return MicroBatch(pack_rows(layout, [ids], [at]), layout, ())
