"""Forward pass of one chunk of a GPT, down to what is wanted of its chosen tokens.

Invariants:
- logits exist only for chosen tokens, a block at a time (`models.algorithms.tokens`), in both passes, and only
  of the ids of this tensor-parallel process;
- each token has the position of its own sequence, wherever it stands in a row;
- all tensor- and context-parallel processes find the same numbers, and get the gradients of their own part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from models.algorithms.tokens import OutputLayer, Vocabulary, token_log_probs
from models.train.dp_group import Float32Array
from models.train.huggingface.scoring import Spread
from models.train.megatron.inputs import ModelInputs, RowForm, model_inputs
from models.train.megatron.parameters import unwrap
from models.train.step.micro_batches import MicroBatch, blank


def hidden_states(chunk: Any, inputs: ModelInputs) -> Tensor:
    """Run a chunk, wrapped or not: hidden states [S, B, H], normed on the last stage, for its successor otherwise.

    The stage before has set its own with `set_input_tensor`.
    """
    packed = None
    if inputs.ends is not None:  # ends of the sequences in a flat row
        from megatron.core.packed_seq_params import PackedSeqParams

        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=inputs.ends, cu_seqlens_kv=inputs.ends)
        packed.max_seqlen_q = packed.max_seqlen_kv = inputs.longest
    model = unwrap(chunk)
    is_last, model.post_process = model.post_process, False  # a forward pass that ends with hidden states
    try:
        return chunk(inputs.input_ids, inputs.position_ids, inputs.mask, packed_seq_params=packed)
    finally:
        model.post_process = is_last


def chosen_hidden(model: Any, hidden: Tensor, inputs: ModelInputs, *, partial_gradients: bool) -> Tensor:
    """Last hidden states [n, H] at the places of the chosen tokens.

    `partial_gradients`: whether each tensor-parallel process goes on with its part of a matrix, so that the gradients
    they send back are summed; otherwise all go on with the same.
    """
    from megatron.core.tensor_parallel import mappings

    group = model.pg_collection.tp
    if model.config.sequence_parallel:
        hidden = mappings.gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=partial_gradients, group=group
        )
    chosen = hidden.reshape(-1, hidden.shape[-1]).index_select(0, inputs.places)
    if partial_gradients and not model.config.sequence_parallel:
        chosen = mappings.copy_to_tensor_model_parallel_region(chosen, group=group)
    return chosen


class TokenScorer:
    """Log-probs and entropies of chosen tokens, on the last stage."""

    def __init__(self, model: Any, *, vocab_size: int, temperature: float, chunk_tokens: int) -> None:
        """`model`: the last chunk. `vocab_size`: ids that exist; the matrices may be padded to more."""
        self._model = model
        self._temperature, self._chunk_tokens = temperature, chunk_tokens
        group = model.pg_collection.tp
        self._vocabulary = Vocabulary(group.rank() * self._weight().shape[0], vocab_size, group)

    def _weight(self) -> Tensor:
        """The output matrix [width, H]."""
        model = self._model
        tied = model.share_embeddings_and_output_weights
        return model.shared_embedding_or_output_weight() if tied else model.output_layer.weight

    def __call__(self, hidden: Tensor, inputs: ModelInputs, *, entropy: str = "none") -> tuple[Tensor, Tensor | None]:
        """Log-probs [N] and, unless `entropy` is "none", entropies [N] of the chosen tokens, in fp32.

        `entropy`: "value" without a graph, "graph" with one. Collective over the tensor and context ranks.
        """
        for wait_for_parameters in self._model.output_layer._forward_pre_hooks.values():  # as a call of it would
            wait_for_parameters(self._model.output_layer, ())
        chosen = chosen_hidden(self._model, hidden, inputs, partial_gradients=True)
        apart = inputs.temperatures
        log_probs, entropies = token_log_probs(
            chosen,
            OutputLayer(self._weight()),
            inputs.targets,
            temperature=self._temperature if apart is None else apart.nan_to_num(self._temperature),
            entropy=entropy,
            chunk_tokens=self._chunk_tokens,
            vocabulary=self._vocabulary,
        )
        group = self._model.pg_collection.cp
        return (
            of_all_tokens(log_probs, inputs, group),
            None if entropies is None else of_all_tokens(entropies, inputs, group),
        )


def of_all_tokens(values: Tensor, inputs: ModelInputs, group: Any) -> Tensor:
    """Numbers [N] of all chosen tokens from those [n] of each context-parallel process; differentiable."""
    return values if inputs.kept is None else Spread.apply(values, inputs.kept, inputs.chosen, group)


# --------------------------------------------------------------------------------------------------
# Micro-batches through the stages of a pipeline, forward and backward, by Megatron's own schedules.
#
# Invariants:
# - all processes of a replica are given the same micro-batches, and all replicas equally many;
# - losses are numerators and are divided by nothing; gradients are added to those that are there, and no process sends
#   them to another: that is done once for a step, by the optimizer;
# - micro-batches may differ in shape: stages exchange shapes before they send.


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
        self._stages, self._interleaved = stages, interleaved
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

        # Interleaved, the schedule takes a multiple of the stages.
        missing = -len(batches) % self._stages if self._interleaved else 0
        given, filled = len(batches), [*batches, *[blank()] * missing]

        def forward_step(numbered: Iterator[tuple[int, MicroBatch]], chunk: Any) -> tuple[Tensor, Callable[..., Any]]:
            number, batch = next(numbered)
            inputs = model_inputs(batch.rows, self._form)
            hidden = hidden_states(chunk, inputs)

            def numerator(output: Tensor, non_loss_data: bool = False) -> Any:
                found = last_stage(number, output, inputs) if number < given else None
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
