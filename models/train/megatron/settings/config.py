"""Megatron-core's TransformerConfig out of a model's config.json and the options of a run: nobody types a size.

Precedence: the architecture, then the parallel layout and precision of the run, then `--megatron-<option>`, which may
set neither of the two.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from models.errors import TrainConfigInvalid
from models.families.decoder import Architecture
from models.train.megatron.settings.layout import check_layout, model_dtype, on_gpu, uses_transformer_engine
from models.train.megatron.settings.options import split_options
from models.train.spec import TrainSpec


def transformer_config(architecture: Architecture, spec: TrainSpec) -> TransformerConfig:
    """MLATransformerConfig for latent attention. Raises `UnsupportedModel`, `TrainConfigInvalid`."""
    check_layout(architecture, spec)
    fields: dict[str, Any] = {
        **_model_fields(architecture),
        **_run_fields(spec),
        **_parallel_fields(spec),
        **_recompute_fields(spec),
    }
    if architecture.experts:
        fields |= _expert_fields(spec)
    fields |= split_options(spec.megatron.megatron_args).transformer
    kind = MLATransformerConfig if architecture.latent_attention else TransformerConfig
    try:
        config = kind(**fields)
    except (AssertionError, TypeError, ValueError) as error:
        raise TrainConfigInvalid(
            f"Megatron-core refuses this {architecture.model_type} with these options ({error}); change the "
            "--*-parallel-size and --megatron-* options that it names"
        ) from error
    if architecture.rope.attention_factor != 1.0 and not architecture.latent_attention:
        # How Megatron-core asks for the factor of cosines and sines: 0.1 * mscale * ln(scaling factor) + 1.
        config.yarn_rotary_scaling_factor = math.e
        config.yarn_mscale = 10 * (architecture.rope.attention_factor - 1)
        config.yarn_mscale_all_dim = 0.0
    return config


def _model_fields(architecture: Architecture) -> dict[str, Any]:
    fields = {name: value for name, value in architecture.transformer.items() if value is not None}
    if architecture.latent_attention:
        fields["q_lora_rank"] = architecture.transformer["q_lora_rank"]  # None means something here
        # Its norms are part of the layer specification. With this set, Megatron-core would sum their gradients over
        # the tensor-parallel processes, where each already has the whole of them.
        fields["qk_layernorm"] = False
    if architecture.experts:
        kinds = set(architecture.moe_layers)
        fields["moe_layer_freq"] = 1 if kinds == {True} else [int(moe) for moe in architecture.moe_layers]
    return {**fields, "activation_func": torch.nn.functional.silu, "rotary_interleaved": architecture.rope.interleaved}


def _run_fields(spec: TrainSpec) -> dict[str, Any]:
    dtype, gpu = model_dtype(spec), on_gpu(spec)
    return {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "use_cpu_initialization": not gpu,
        "perform_initialization": False,  # every weight is read from a checkpoint, and a missing one is an error
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": gpu,
        "bias_dropout_fusion": gpu,
        "apply_rope_fusion": False,  # its kernel takes one set of angles for all rows
        "persist_layer_norm": False,
        "transformer_impl": "transformer_engine" if uses_transformer_engine(spec) else "local",
    }


def _parallel_fields(spec: TrainSpec) -> dict[str, Any]:
    m = spec.megatron
    chunks = m.virtual_pipeline_model_parallel_size
    fields: dict[str, Any] = {
        "tensor_model_parallel_size": m.tensor_model_parallel_size,
        "sequence_parallel": m.sequence_parallel,
        "pipeline_model_parallel_size": m.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": None if chunks in (None, 1) else chunks,
        "num_layers_in_first_pipeline_stage": m.decoder_first_pipeline_num_layers,
        "num_layers_in_last_pipeline_stage": m.decoder_last_pipeline_num_layers,
        "context_parallel_size": m.context_parallel_size,
    }
    if m.context_parallel_size > 1:
        fields["cp_comm_type"] = "p2p"
    return fields


def _expert_fields(spec: TrainSpec) -> dict[str, Any]:
    m = spec.megatron
    return {
        "expert_model_parallel_size": m.expert_model_parallel_size,
        "expert_tensor_parallel_size": m.expert_tensor_parallel_size,
        "moe_token_dispatcher_type": m.moe_token_dispatcher_type,
        "moe_grouped_gemm": m.moe_grouped_gemm,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_bias_update_rate": 0.0,  # the bias stays as the checkpoint has it
    }


def _recompute_fields(spec: TrainSpec) -> dict[str, Any]:
    m = spec.megatron
    granularity = m.recompute_granularity or ("selective" if m.recompute_activations else None)
    if granularity is None and spec.train.gradient_checkpointing:
        granularity = "full"
    if granularity != "full":
        return {} if granularity is None else {"recompute_granularity": granularity}
    return {
        "recompute_granularity": "full",
        "recompute_method": m.recompute_method or "uniform",
        "recompute_num_layers": m.recompute_num_layers or 1,
    }
