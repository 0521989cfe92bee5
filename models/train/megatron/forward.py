"""Forward pass of one chunk of a GPT, down to what is wanted of its chosen tokens.

Invariants:
- logits exist only for chosen tokens, a block at a time (`models.algorithms.token_log_probs`), in both passes, and only
  of the ids of this tensor-parallel process;
- each token has the position of its own sequence, wherever it stands in a row;
- all tensor- and context-parallel processes find the same numbers, and get the gradients of their own part.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from models.algorithms.token_log_probs import OutputLayer, Vocabulary, token_log_probs
from models.train.huggingface.context import spread
from models.train.megatron.held_parameters import unwrap
from models.train.megatron.inputs import ModelInputs


def hidden_states(chunk: Any, inputs: ModelInputs) -> Tensor:
    """Run a chunk, wrapped or not: hidden states [S, B, H], normed on the last stage, for its successor otherwise.

    The stage before has set its own with `set_input_tensor`.
    """
    model = unwrap(chunk)
    is_last, model.post_process = model.post_process, False  # a forward pass that ends with hidden states
    try:
        hidden: Tensor = chunk(
            input_ids=inputs.input_ids,
            position_ids=inputs.position_ids,
            attention_mask=inputs.mask,
            packed_seq_params=_packed(inputs),
        )
    finally:
        model.post_process = is_last
    return hidden


def _packed(inputs: ModelInputs) -> Any | None:
    """How a flat row tells its sequences apart."""
    if inputs.ends is None:
        return None
    from megatron.core.packed_seq_params import PackedSeqParams

    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=inputs.ends,
        cu_seqlens_kv=inputs.ends,
        max_seqlen_q=inputs.longest,
        max_seqlen_kv=inputs.longest,
    )


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
        self._temperature = temperature
        self._chunk_tokens = chunk_tokens
        group = model.pg_collection.tp
        self._vocabulary = Vocabulary(group.rank() * self._weight().shape[0], vocab_size, group)

    def _weight(self) -> Tensor:
        """The output matrix [width, H]."""
        model = self._model
        tied = model.share_embeddings_and_output_weights
        weight: Tensor = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
        return weight

    def __call__(self, hidden: Tensor, inputs: ModelInputs, *, entropy: str = "none") -> tuple[Tensor, Tensor | None]:
        """Log-probs [N] and, unless `entropy` is "none", entropies [N] of the chosen tokens, in fp32.

        `entropy`: "value" without a graph, "graph" with one. Collective over the tensor and context ranks.
        """
        _gather_parameters(self._model.output_layer)
        chosen = chosen_hidden(self._model, hidden, inputs, partial_gradients=True)
        apart = inputs.own_temperatures
        log_probs, entropies = token_log_probs(
            chosen,
            OutputLayer(self._weight()),
            inputs.own_targets,
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


def _gather_parameters(layer: Any) -> None:
    """What a call of the layer would wait for: parameters on their way from other processes."""
    for hook in layer._forward_pre_hooks.values():
        hook(layer, ())


def of_all_tokens(values: Tensor, inputs: ModelInputs, group: Any) -> Tensor:
    """Numbers [N] of all chosen tokens from those [n] of each context-parallel process; differentiable."""
    return values if inputs.kept is None else spread(values, inputs.kept, len(inputs.targets), group)
