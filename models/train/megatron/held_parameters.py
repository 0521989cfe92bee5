"""Which parameters the chunks of this process hold, under their global names (`families.rules`)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

from torch import Tensor

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
        local = model.config.num_moe_experts or 0
        local //= ps.get_expert_model_parallel_world_size()
        first_expert = ps.get_expert_model_parallel_rank() * local
        tensors = [*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if n.endswith("expert_bias"))]
        for name, tensor in tensors:
            yield global_name(name, model, first_expert), tensor


def global_name(name: str, model: Any, first_expert: int) -> str:
    """Of a parameter of `model`, whose first expert has the number `first_expert` among all."""
    in_layer = _LAYER.match(name)
    if in_layer is None:
        return name
    layer = model.decoder.layers[int(in_layer[1])].layer_number - 1
    return f"decoder.layers.{layer}.{_in_layer(in_layer[2], first_expert)}"


def _in_layer(name: str, first_expert: int) -> str:
    if name in _FUSED:
        return _FUSED[name]
    if found := _LOCAL_EXPERT.match(name):
        return f"mlp.experts.local_experts.{first_expert + int(found[1])}.{found[2]}"
    if found := _GROUPED_EXPERT.match(name):
        return f"mlp.experts.local_experts.{first_expert + int(found[2])}.{found[1]}"
    return name
