"""Weights between Hugging Face checkpoints and the processes of Megatron-core.

`load_hf` reads from safetensors only what this process holds, one parameter at a time. `export_hf` gathers bucket by
bucket over tensor, expert and pipeline parallel processes.

Invariants:
- every parameter of a chunk is loaded, or loading fails; every tensor of a checkpoint is used, known to be left out
  (with one warning), or refused;
- an export has the names, shapes and order of the published layout (experts one by one). Its order depends on nothing
  but the model, and for experts on the expert parallel size; floating-point tensors have the precision of the model,
  routers' biases stay fp32;
- padding of the vocabulary is zero when loaded and never exported.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.errors import CheckpointUnavailable
from models.families.decoder import Architecture
from models.families.hugging_face_names import Weight, padded_vocab, part
from models.families.registry import architecture_of
from models.families.source import CheckpointTensors, local_directory, not_fetched, read_hf_config
from models.train.megatron.inputs import RowForm
from models.train.megatron.parameters import BUCKET_BYTES, export_buckets, held_parameters
from models.train.megatron.processes import ParallelSizes
from models.train.spec import TrainSpec
from models.train.step.packing import Packing


def load_hf(chunks: Sequence[Any], hf_config: Mapping[str, Any], source: Path) -> None:
    """Fill the chunks of this process from the checkpoint directory `source`; nothing is communicated.

    Raises `CheckpointUnavailable` if tensors are missing, surplus or of another shape.
    """
    from megatron.core import parallel_state as ps

    architecture = architecture_of(hf_config)
    with CheckpointTensors(source) as tensors:
        check_names(architecture, tensors)
        known = {weight.name: weight for weight in architecture.weights()}
        if architecture.tied:  # the last pipeline stage holds a copy of the embedding under this name
            known["output_layer.weight"] = known["embedding.word_embeddings.weight"]
        for name, parameter in held_parameters(chunks):
            weight = known.get(name)
            if weight is None:
                raise CheckpointUnavailable(
                    f"the model has a parameter {name} that {architecture.model_type} does not map to a checkpoint"
                )
            if weight.rule.expert:
                rank, parts = ps.get_expert_tensor_parallel_rank(), ps.get_expert_tensor_parallel_world_size()
            else:
                rank, parts = ps.get_tensor_model_parallel_rank(), ps.get_tensor_model_parallel_world_size()
            found = read_part(tensors, weight, parameter, rank, parts, architecture.vocab_size)
            if found.shape != parameter.shape:
                raise CheckpointUnavailable(
                    f"{', '.join(piece.name for piece in weight.pieces)} in {source} give {name} the shape "
                    f"{tuple(found.shape)}, but config.json says {tuple(parameter.shape)}; give the config.json that "
                    "belongs to the weights"
                )
            with torch.no_grad():
                parameter.copy_(found)


def read_part(
    tensors: CheckpointTensors, weight: Weight, parameter: Tensor, rank: int, parts: int, vocab_size: int
) -> Tensor:
    """What process `rank` of `parts` holds of one parameter, read without the rest where possible."""
    rule = weight.rule
    pieces = weight.stacked if weight.stacked and weight.pieces[0].name not in tensors.files else weight.pieces
    if rule.split == "vocabulary":
        rows = padded_vocab(vocab_size, parts) // parts
        found = tensors.rows(pieces[0].name, rank * rows, min((rank + 1) * rows, vocab_size))
        return torch.cat([found, found.new_zeros(rows - len(found), *found.shape[1:])]) if len(found) < rows else found
    split = "none" if parts == 1 or parameter.shape[0] == rule.replicated_rows else rule.split
    if split != "none" and not rule.join.parts_alone(parts):
        return part(rule.join.join([tensors.read(piece, weight.expert) for piece in pieces]), split, rank, parts)
    dimension = {"none": None, "columns": 1}.get(split, 0)
    return rule.join.join([tensors.read(piece, weight.expert, dimension, rank, parts) for piece in pieces])


def check_names(architecture: Architecture, tensors: CheckpointTensors) -> None:
    """Compare the names of a checkpoint with those of the model; warn of what is left out.

    Raises `CheckpointUnavailable`.
    """
    present = tensors.files.keys()
    unused = set(present)
    missing: list[str] = []
    for weight in architecture.weights():
        names = {piece.name for piece in weight.pieces}
        if weight.stacked and not names <= present:
            names = {piece.name for piece in weight.stacked}
        missing += sorted(names - present)
        unused -= names
    if missing:
        raise CheckpointUnavailable(
            f"{tensors.directory} lacks {len(missing)} tensors of {architecture.model_type}, first {missing[0]}; "
            "download the model again, or give the config.json that belongs to it"
        )
    for reason, extra in architecture.names_left_out(unused).items():
        unused -= set(extra)
        if reason:
            warnings.warn(f"{len(extra)} tensors of {tensors.directory} are left out: {reason}", stacklevel=3)
    if unused:
        raise CheckpointUnavailable(
            f"{tensors.directory} has {len(unused)} tensors that {architecture.model_type} does not know, first "
            f"{min(unused)}; give the config.json that belongs to it, or use --train-backend fsdp"
        )


def export_hf(
    chunks: Sequence[Any], hf_config: Mapping[str, Any], *, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) of all weights on global rank 0; nothing on others, which take part all the same.

    Collective: every process of every replica iterates to the end, and holds no other collective meanwhile. Tensors are
    on the device of the model and are valid until the next one is requested. With `overlap_param_gather`, force
    parameters to be gathered first (`start_param_sync(force_sync=True)`), or they are those of the step before.
    `bucket_bytes`: of whole parameters that exist at one time beside the model.
    """
    architecture = architecture_of(hf_config)
    pending: dict[str, dict[int, Tensor]] = {}
    for weight, whole in export_buckets(chunks, architecture, bucket_bytes=bucket_bytes):
        if weight.rule.split == "vocabulary":
            whole = whole[: architecture.vocab_size]
        for piece, tensor in zip(weight.pieces, weight.rule.join.split(whole), strict=True):
            parts = pending.setdefault(piece.name, {})
            parts[piece.part] = tensor
            if len(parts) == piece.of:
                del pending[piece.name]
                found = [parts[number] for number in range(piece.of)]
                yield piece.name, (found[0] if len(found) == 1 else torch.cat(found)).contiguous()
    if pending:
        raise CheckpointUnavailable(f"the export ended without the other parts of {sorted(pending)}")


# --------------------------------------------------------------------------------------------------
# A Hugging Face checkpoint becomes this process's chunks of a Megatron model.
#
# Invariants: weights are set before an optimizer copies them; the random stream of the process is left as it was; what
# rows a model takes is decided here, once for a model and its layout.


@dataclass(frozen=True)
class Source:
    """A checkpoint that was found."""

    name: str  # as the option gives it
    directory: Path
    config: dict[str, Any]  # contents of config.json


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


def load_chunks(source: Source, spec: TrainSpec, sizes: ParallelSizes, device: torch.device) -> list[Any]:
    """Build this process's chunks, in the order of the model's layers, and read their weights; collective.

    Raises `UnsupportedModel`, `TrainConfigInvalid`, `CheckpointUnavailable`.
    """
    from megatron.core import parallel_state as ps

    from models.train.megatron.build import build_gpt

    chunks, count = [], sizes.virtual_pipeline or 1
    with torch.random.fork_rng(devices=[]):
        for stage in range(count):
            first = ps.is_pipeline_first_stage(ignore_virtual=True) and stage == 0
            last = ps.is_pipeline_last_stage(ignore_virtual=True) and stage == count - 1
            virtual = None if sizes.virtual_pipeline is None else stage
            chunks.append(build_gpt(source.config, spec, pre_process=first, post_process=last, vp_stage=virtual))
    for chunk in chunks:
        chunk.to(device)
    _mark_split(chunks)
    load_hf(chunks, source.config, source.directory)
    return chunks


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


def rows_of(chunk: Any, spec: TrainSpec, sizes: ParallelSizes, device: torch.device) -> tuple[RowForm, Packing]:
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
