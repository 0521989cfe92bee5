"""Parameters of this process's part of a model, and their gathering into whole tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from models.errors import BackendMisuse
from models.families.decoder import Architecture
from models.families.hugging_face_names import Weight, merge
from models.train.dp_group import all_gather

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection


# --------------------------------------------------------------------------------------------------
# Which parameters the chunks of this process hold, under their global names (`families.hugging_face_names`).


# Norms that Transformer Engine fuses into the linear layer behind them.
_FUSED: Final = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
}
_LAYER: Final = re.compile(r"^decoder\.layers\.(\d+)\.(.*)$")
_LOCAL_EXPERT: Final = re.compile(r"^mlp\.experts\.local_experts\.(\d+)\.(.*)$")
_GROUPED_EXPERT: Final = re.compile(r"^mlp\.experts\.(linear_fc[12]\.weight)(\d+)$")


def unwrap(chunk: Any) -> Any:
    """The GPTModel inside DistributedDataParallel, Float16Module and the like."""
    while not hasattr(chunk, "decoder"):
        chunk = chunk.module
    return chunk


def held_parameters(chunks: Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
    """(global name, parameter or buffer) of this process. A tied output layer that is the embedding itself is left out.

    The copy of a tied embedding on the last of several pipeline stages appears as `output_layer.weight`.
    """
    from megatron.core import parallel_state as ps

    for chunk in chunks:
        model = unwrap(chunk)
        local = (model.config.num_moe_experts or 0) // ps.get_expert_model_parallel_world_size()
        first_expert = ps.get_expert_model_parallel_rank() * local
        tensors = [*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if n.endswith("expert_bias"))]
        for name, tensor in tensors:
            yield global_name(name, model, first_expert), tensor


def global_name(name: str, model: Any, first_expert: int) -> str:
    """Of a parameter of `model`, whose first expert has the number `first_expert` among all."""
    in_layer = _LAYER.match(name)
    if in_layer is None:
        return name
    layer, own = model.decoder.layers[int(in_layer[1])].layer_number - 1, _FUSED.get(in_layer[2], in_layer[2])
    if found := _LOCAL_EXPERT.match(own):
        own = f"mlp.experts.local_experts.{first_expert + int(found[1])}.{found[2]}"
    elif found := _GROUPED_EXPERT.match(own):
        own = f"mlp.experts.local_experts.{first_expert + int(found[2])}.{found[1]}"
    return f"decoder.layers.{layer}.{own}"


# --------------------------------------------------------------------------------------------------
# Whole parameters out of the parts that processes hold: over tensor, expert and pipeline parallel, bucket by bucket.
#
# Every process of every replica does the same collectives in the same order: the plan is made of names that all derive
# from the architecture, and of shapes and owners that pipeline stages exchange once.
#
# Invariant: no more than a bucket of whole parameters exists beside the model, or one parameter if that is larger.


BUCKET_BYTES: Final = 256 << 20  # of whole parameters that travel together
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
_DIMENSIONS: Final = 2  # at most, of any parameter


@dataclass(frozen=True)
class _Slot:
    """A parameter, or one expert's parameter of each expert-parallel process: the same shape in all of them."""

    weights: tuple[Weight, ...]  # by expert-parallel rank; one if it is no expert's
    shape: tuple[int, ...]  # of the part that a process holds
    dtype: torch.dtype
    owner: int  # pipeline stage

    @property
    def expert(self) -> bool:
        return self.weights[0].rule.expert

    @property
    def elements(self) -> int:
        return int(torch.Size(self.shape).numel())


def export_buckets(
    chunks: Sequence[Any], architecture: Architecture, *, bucket_bytes: int
) -> Iterator[tuple[Weight, Tensor]]:
    """(parameter, whole tensor) for all of them, in the order of `Architecture.weights`; nothing but on global rank 0.

    Collective over all processes; each iterates to the end. Experts come by slot: with E experts on n processes, expert
    0, E/n, 2 E/n, ..., then 1, E/n + 1, ...
    """
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "expt_tp", "ep", "pp"])
    held = dict(held_parameters(chunks))
    first = torch.distributed.get_rank() == 0
    slots = _plan(architecture, held, groups)
    if all(group.size() == 1 for group in (groups.tp, groups.expt_tp, groups.ep, groups.pp)):
        bucket_bytes = 0  # one parameter after the other, as it is, without a copy
    for bucket in _buckets(slots, groups, bucket_bytes):
        gathered = _gather(bucket, held, groups)
        if first:
            yield from _unpack(bucket, gathered)


def _plan(architecture: Architecture, held: Mapping[str, Tensor], groups: ProcessGroupCollection) -> list[_Slot]:
    """All slots, with dtype, shape and owner of each. Collective over the pipeline."""
    weights = _by_slot(architecture, groups.ep.size())
    device = next(iter(held.values())).device if held else torch.device("cpu")
    stages, rank = groups.pp.size(), groups.pp.rank()
    mine = groups.ep.rank()
    table = torch.zeros(len(weights), 2 + _DIMENSIONS, dtype=torch.int64)
    for row, slot_weights in zip(table, weights, strict=True):
        tensor = held.get(slot_weights[mine % len(slot_weights)].name)
        if tensor is not None:
            shape = [*tensor.shape, *[-1] * (_DIMENSIONS - tensor.dim())]
            row.copy_(torch.tensor([stages - rank, _DTYPES.index(tensor.dtype), *shape]))
    if stages > 1:
        # Shapes and dtypes are equal wherever a parameter is held; -1, a missing dimension, is below any length.
        table[table[:, 0] == 0] = -2
        table = table.to(device)
        torch.distributed.all_reduce(table, op=torch.distributed.ReduceOp.MAX, group=groups.pp)
    slots = []
    for slot_weights, (owner, dtype, *shape) in zip(weights, table.tolist(), strict=True):
        if owner <= 0:
            raise BackendMisuse(
                f"no pipeline stage holds {slot_weights[0].name}; hand over all chunks of the model of every process"
            )
        slots.append(_Slot(slot_weights, tuple(n for n in shape if n >= 0), _DTYPES[dtype], stages - owner))
    return slots


def _by_slot(architecture: Architecture, expert_parallel: int) -> list[tuple[Weight, ...]]:
    """Parameters in the order of an export; experts with the same place in their processes together."""
    local = architecture.experts // expert_parallel
    slots: list[tuple[Weight, ...]] = []
    for (_layer, _rule), group in groupby(architecture.weights(), key=lambda one: (one.layer, id(one.rule))):
        members = list(group)
        if members[0].rule.expert:
            slots += [tuple(members[index::local]) for index in range(local)]
        else:
            slots.append(tuple(members))
    return slots


def _buckets(slots: Sequence[_Slot], groups: ProcessGroupCollection, bucket_bytes: int) -> Iterator[list[_Slot]]:
    """Neighbours of one owner, kind and dtype, up to a size."""
    bucket: list[_Slot] = []
    size = 0
    for slot in slots:
        copies = groups.ep.size() * groups.expt_tp.size() if slot.expert else groups.tp.size()
        whole = slot.elements * slot.dtype.itemsize * copies
        if bucket and (
            size + whole > bucket_bytes
            or (slot.owner, slot.expert, slot.dtype) != (bucket[0].owner, bucket[0].expert, bucket[0].dtype)
        ):
            yield bucket
            bucket, size = [], 0
        bucket.append(slot)
        size += whole
    if bucket:
        yield bucket


def _gather(bucket: Sequence[_Slot], held: Mapping[str, Tensor], groups: ProcessGroupCollection) -> Tensor:
    """[expert-parallel rank, tensor-parallel rank, elements of the bucket]. Collective over the whole replica."""
    expert = bucket[0].expert
    tensor_group = groups.expt_tp if expert else groups.tp
    spread = groups.ep.size() if expert else 1
    elements = sum(slot.elements for slot in bucket)
    if groups.pp.rank() == bucket[0].owner:
        rank = groups.ep.rank() if expert else 0
        parts = [held[slot.weights[rank].name].detach().reshape(-1) for slot in bucket]
        flat = torch.cat(parts)[None, None] if len(parts) > 1 else parts[0][None, None]
        gathered = _all_gather(flat, tensor_group, 1)
        if expert:
            gathered = _all_gather(gathered, groups.ep, 0)
    else:
        device = next(iter(held.values())).device
        gathered = torch.empty(spread, tensor_group.size(), elements, dtype=bucket[0].dtype, device=device)
    if groups.pp.size() > 1:
        source = torch.distributed.get_process_group_ranks(groups.pp)[bucket[0].owner]
        torch.distributed.broadcast(gathered, source, group=groups.pp)
    return gathered


def _all_gather(tensor: Tensor, group: Any, dimension: int) -> Tensor:
    """Tensors of all processes of the group one behind the other along `dimension`, of length 1 before."""
    return tensor if group.size() == 1 else torch.cat(all_gather(tensor, group), dim=dimension)


def _unpack(bucket: Sequence[_Slot], gathered: Tensor) -> Iterator[tuple[Weight, Tensor]]:
    offset = 0
    for slot in bucket:
        held = gathered[:, :, offset : offset + slot.elements]
        offset += slot.elements
        rule = slot.weights[0].rule
        split = "none" if rule.replicated_rows == slot.shape[0] else rule.split
        for weight, parts in zip(slot.weights, held.unbind(0), strict=True):
            yield weight, merge([part.view(slot.shape) for part in parts.unbind(0)], split)
