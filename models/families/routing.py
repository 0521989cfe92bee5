"""Experts as DeepSeek-V3 chooses them, and GLM-4.5 after it: sigmoid scores, a bias for the choice only, groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from configs.schema.model_shapes import ModelShape
from models.errors import UnsupportedModel
from models.families.reading import need


def sigmoid_routing(config: Mapping[str, Any], shape: ModelShape) -> dict[str, Any]:
    """Fields of TransformerConfig. Raises `UnsupportedModel` for what Megatron-core's router cannot do."""
    model_type = config.get("model_type")
    need(config, "n_routed_experts")
    top = shape.active_experts
    chosen_groups, all_groups = int(config.get("topk_group") or 1), int(config.get("n_group") or 1)
    if not config.get("norm_topk_prob", True):
        raise UnsupportedModel(
            f"norm_topk_prob=false of {model_type!r}: Megatron-core always normalises sigmoid scores; "
            "use --train-backend fsdp"
        )
    if top == 1:
        raise UnsupportedModel(
            f"num_experts_per_tok=1 of {model_type!r}: Megatron-core does not normalise the score of a single expert; "
            "use --train-backend fsdp"
        )
    if all_groups > 1 and chosen_groups < all_groups and top // chosen_groups != 2:
        raise UnsupportedModel(
            f"topk_group={chosen_groups} of {model_type!r} with num_experts_per_tok={top}: groups are chosen by the "
            "sum of their two best scores, and Megatron-core takes num_experts_per_tok // topk_group of them, which "
            "must be 2; use --train-backend fsdp"
        )
    grouped = all_groups > 1 and chosen_groups < all_groups
    return {
        "num_moe_experts": shape.experts,
        "moe_router_topk": top,
        "moe_ffn_hidden_size": shape.expert_ffn,
        "moe_router_score_function": "sigmoid",
        "moe_router_dtype": "fp32",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": all_groups if grouped else None,
        "moe_router_group_topk": chosen_groups if grouped else None,
        "moe_router_topk_scaling_factor": float(config.get("routed_scaling_factor") or 1.0),
        "moe_shared_expert_intermediate_size": shape.shared_ffn or None,
    }


def prediction_layers(config: Mapping[str, Any]) -> dict[str, str]:
    """Names of layers for multi-token prediction, which stand after the last layer in published checkpoints."""
    first = int(need(config, "num_hidden_layers"))
    count = int(config.get("num_nextn_predict_layers") or config.get("num_mtp_layers") or 0)
    numbers = "|".join(str(first + index) for index in range(max(count, 1)))
    reason = "layers for multi-token prediction are not trained, and not part of an export"
    return {rf"model\.layers\.({numbers})\..*": reason}
