"""A Hugging Face checkpoint becomes this process's chunks of a Megatron model.

Invariants: weights are set before an optimizer copies them; the random stream of the process is left as it was; what
rows a model takes is decided here, once for a model and its layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from models.families.registry import read_hf_config
from models.families.source import local_directory, not_fetched
from models.train.megatron.held_parameters import held_parameters
from models.train.megatron.inputs import RowForm
from models.train.megatron.processes import ParallelSizes
from models.train.megatron.weights import load_hf
from models.train.packing.packing import Packing
from models.train.spec import TrainSpec


@dataclass(frozen=True)
class Source:
    """A checkpoint that was found."""

    name: str  # as the option gives it
    directory: Path
    config: dict[str, Any]  # contents of config.json


@dataclass(frozen=True)
class LoadedChunks:
    """The chunks of one model in this process, in the order of its layers."""

    chunks: list[Any]
    vocab_size: int
    form: RowForm
    packing: Packing  # what its attention allows; the token budget is the caller's


def read_source(checkpoint: str, key: str) -> Source:
    """The checkpoint that the option `key` names: a directory, or a hub id that is fetched.

    Raises `CheckpointUnavailable`.
    """
    from huggingface_hub import snapshot_download

    path = local_directory(checkpoint, key)
    if path is None:
        try:
            path = Path(snapshot_download(checkpoint, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt"]))
        except (OSError, ValueError) as error:
            raise not_fetched(checkpoint, key, error) from error
    return Source(checkpoint, path, read_hf_config(path))


def load_chunks(source: Source, spec: TrainSpec, sizes: ParallelSizes, device: torch.device) -> LoadedChunks:
    """Build this process's chunks and read their weights; collective.

    Raises `UnsupportedModel`, `TrainConfigInvalid`, `CheckpointUnavailable`.
    """
    from models.train.megatron.build import build_gpt

    chunks = []
    with torch.random.fork_rng(devices=[]):
        for stage in range(sizes.virtual_pipeline or 1):
            first, last = _ends_of_model(sizes, stage)
            virtual = None if sizes.virtual_pipeline is None else stage
            chunks.append(build_gpt(source.config, spec, pre_process=first, post_process=last, vp_stage=virtual))
    for chunk in chunks:
        chunk.to(device)
    _mark_split(chunks)
    load_hf(chunks, source.config, source.directory)
    form, packing = _rows(chunks[0], spec, sizes, device)
    return LoadedChunks(chunks, int(chunks[0].architecture.vocab_size), form, packing)


def _mark_split(chunks: Sequence[Any]) -> None:
    """Say of each parameter whether tensor-parallel processes hold parts of it: the norm of all gradients counts what
    they all hold once. Megatron-core's layers say so only where they initialise their weights themselves.
    """
    weights = {weight.name: weight.rule for weight in chunks[0].architecture.weights()}
    tied_head = weights["embedding.word_embeddings.weight"]
    for name, parameter in held_parameters(chunks):
        rule = weights.get(name, tied_head)
        if rule.split == "none" or parameter.shape[0] == rule.replicated_rows:
            continue
        if not getattr(parameter, "tensor_model_parallel", False):
            parameter.tensor_model_parallel = True
            parameter.partition_dim = int(rule.split == "columns")
            parameter.partition_stride = 1


def _ends_of_model(sizes: ParallelSizes, stage: int) -> tuple[bool, bool]:
    """Whether chunk `stage` of this process begins and ends the model."""
    from megatron.core import parallel_state as ps

    chunks = sizes.virtual_pipeline or 1
    first = ps.is_pipeline_first_stage(ignore_virtual=True) and stage == 0
    last = ps.is_pipeline_last_stage(ignore_virtual=True) and stage == chunks - 1
    return first, last


def _rows(chunk: Any, spec: TrainSpec, sizes: ParallelSizes, device: torch.device) -> tuple[RowForm, Packing]:
    """What rows the model takes, and how sequences are best put into them.

    Local layers take any mask. Those of Transformer Engine take several sequences of one row by their ends, but no
    common prompt; shared over context-parallel processes, each sequence gets a row of its own.
    """
    from megatron.core import parallel_state as ps

    engine = chunk.config.transformer_impl == "transformer_engine"
    apart = sizes.context > 1
    multiple = sizes.tensor if spec.megatron.sequence_parallel else 1
    if apart:
        multiple *= 2 * sizes.context
    form = RowForm(
        device=device,
        multiple=multiple,
        flat=engine and not apart,
        context_rank=ps.get_context_parallel_rank(),
        context_size=sizes.context,
    )
    packing = Packing(
        max_tokens=1,
        pack=not apart,
        share_prompts=not engine and not apart,
        single_row=engine and not apart,
        # Attention with a mask runs at about half the speed of the dense layers, whose cost is 6 * hidden per token.
        quadratic_tokens=3 * int(chunk.config.hidden_size),
        row_multiple=multiple,
    )
    return form, packing
