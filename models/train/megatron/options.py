"""`--megatron-<option>`: names and values checked against Megatron-core's dataclasses, converted, and assigned to them.

`option_faults` reads the installed source only (`option_fields`), so that it can be asked before anything is started.
`options_of` is for the processes that train: its values are ready for the dataclasses.

Invariants: a field that Sluice sets itself is refused with the flag to use instead; a field that several dataclasses
have goes to all of them; nothing is passed on that Megatron-core does not know.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from configs.schema.notation import nearest
from configs.schema.train import MegatronConfig, TrainConfig
from models.errors import TrainConfigInvalid
from models.train.megatron.option_fields import DTYPE, DTYPES, NONE, Group, Kind, fields_of, known_fields

# --------------------------------------------------------------------------------------------------
# Fields of Megatron-core's dataclasses that are not taken from `--megatron-<option>`, each with what to use instead.
#
# Invariant: a table of plain text. `option_faults` completes an entry to a sentence: "--megatron-lr is 1, but <entry>".


_OWN: Final = (*MegatronConfig.__struct_fields__, *TrainConfig.__struct_fields__)
# Field -> the flag of Sluice that means it.
_FLAGS: Final[Mapping[str, str]] = {
    **{name: f"--{name.replace('_', '-')}" for name in _OWN},
    "bf16": "--train-dtype bfloat16",
    "fp16": "--train-dtype bfloat16",
    "num_layers_in_first_pipeline_stage": "--decoder-first-pipeline-num-layers",
    "num_layers_in_last_pipeline_stage": "--decoder-last-pipeline-num-layers",
    "params_dtype": "--train-dtype",
    "pipeline_dtype": "--train-dtype",
    "use_custom_fsdp": "--train-backend fsdp",
    "use_megatron_fsdp": "--train-backend fsdp",
}

# What the model is, which only its config.json says.
_ARCHITECTURE: Final = """
    num_layers hidden_size num_attention_heads num_query_groups ffn_hidden_size kv_channels softmax_scale softmax_type
    normalization layernorm_epsilon layernorm_zero_centered_gamma add_bias_linear add_qkv_bias gated_linear_unit
    activation_func activation_func_clamp_value glu_linear_offset rotary_interleaved window_size window_attn_skip_freq
    no_rope_freq qk_layernorm qk_l2_norm attention_output_gate multi_latent_attention mrope_section
    apply_residual_connection_post_layernorm apply_query_key_layer_scaling experimental_attention_variant
    num_moe_experts moe_layer_freq moe_ffn_hidden_size moe_latent_size moe_shared_expert_intermediate_size
    moe_shared_expert_gate moe_router_topk moe_router_topk_limited_devices moe_router_num_groups moe_router_group_topk
    moe_router_pre_softmax moe_router_topk_scaling_factor moe_router_score_function moe_router_enable_expert_bias
    moe_apply_probs_on_input q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type rotary_base
    rotary_percent rotary_scaling_factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim
    dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk linear_attention_freq linear_conv_kernel_dim
    linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads is_hybrid_model
    mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads heterogeneous_block_specs quant_recipe
""".split()  # noqa: SIM905 - a list would take a line for each

# What else is not taken: the reason -> the fields.
_OTHERS: Final[Mapping[str, str]] = {
    "dropout is 0, for the trainer's log-probs must be those of the policy that samples; leave it out":
        "hidden_dropout attention_dropout",
    "gradients are sums over a step that are divided once at its end, where an auxiliary loss would get a wrong "
    "weight, so that there is none; leave it out":
        "moe_aux_loss_coeff moe_z_loss_coeff moe_router_load_balancing_type dsa_indexer_loss_coeff",
    "heads for multi-token prediction are not trained; leave it out":
        "mtp_num_layers mtp_loss_scaling_factor mtp_standalone",
    "gradients are sums that the trainer itself divides, checks and clips; leave it out":
        "calculate_per_token_loss average_in_collective gradient_reduce_div_fusion check_for_nan_in_grad",
    "it belongs to fp16, which is not offered; use --train-dtype bfloat16, which needs no scale":
        "loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis",
    "the optimizer is AdamW with one learning rate, for all backends alike; leave it out":
        "optimizer decoupled_weight_decay sgd_momentum decoupled_lr decoupled_min_lr",
    "the optimizer is AdamW, for all backends alike; leave it out":
        "muon_momentum muon_split_qkv muon_use_nesterov muon_scale_mode muon_fp32_matmul_prec muon_num_ns_steps "
        "muon_tp_mode muon_extra_scale_factor",
    "all weights are read from --hf-checkpoint; leave it out":
        "use_cpu_initialization perform_initialization init_model_with_meta_device init_method_std "
        "embedding_init_method_std",
    "the groups of processes are made from the parallel sizes alone; leave it out":
        "hierarchical_context_parallel_sizes hybrid_context_parallel max_seqlen_per_dp_cp_rank "
        "num_distributed_optimizer_instances",
    "the shapes of micro-batches are settled by --max-tokens-per-gpu; leave it out": "variable_seq_lengths",
    "the engines' routing is not recorded; leave it out": "moe_enable_routing_replay",
    "it sends tokens to experts at random; leave it out": "moe_router_force_load_balancing",
    "the router's bias is kept as the checkpoint has it; leave it out": "moe_router_bias_update_rate",
}  # fmt: skip

SET_BY_SLUICE: Final[Mapping[str, str]] = {
    **{field: f"Sluice has a flag of its own for it; use {flag}" for field, flag in _FLAGS.items()},
    **dict.fromkeys(_ARCHITECTURE, "that is what the model is, and comes from its config.json; leave it out"),
    **{field: reason for reason, fields in _OTHERS.items() for field in fields.split()},
}


class _Refused(Exception):
    """A value that a field does not take. The text is the rule."""


def option_faults(args: Mapping[str, Any]) -> tuple[str, ...]:
    """What is wrong with `--megatron-<option>`, one sentence each.

    To be asked before anything is started: takes milliseconds, imports nothing of torch or Megatron-core.

    `args`: the value of `megatron.megatron_args`. Without megatron-core that is the one fault, also for no options.
    """
    try:
        known = known_fields()
        return tuple(fault for name, value in args.items() if (fault := _fault(name, value, known)) is not None)
    except TrainConfigInvalid as error:
        return (str(error),)


def options_of(args: Mapping[str, Any], group: Group) -> dict[str, Any]:
    """The options that one dataclass has, converted to the types of its fields. They go over what Sluice sets itself.

    Enums and torch dtypes are made real here, which imports torch and `megatron.core.transformer.enums`, but only
    where an option has one. Raises `TrainConfigInvalid` with all faults.
    """
    if not args:
        return {}
    if faults := option_faults(args):
        raise TrainConfigInvalid("\n".join(faults))
    return {name: _real(*_convert(kinds, args[name])) for name, kinds in fields_of(group).items() if name in args}


def _fault(name: str, value: Any, known: Mapping[str, tuple[Group, ...]]) -> str | None:
    label = f"--megatron-{name.replace('_', '-')}"
    if name not in known:
        near = nearest(name, [one for one in known if one not in SET_BY_SLUICE])
        cure = f"did you mean --megatron-{near.replace('_', '-')}?" if near else "leave it out"
        return (
            f"{label} is no field of the installed megatron-core's TransformerConfig, OptimizerConfig or "
            f"DistributedDataParallelConfig; {cure}"
        )
    shown = value if isinstance(value, str) else repr(value).lower() if isinstance(value, bool) else repr(value)
    if name in SET_BY_SLUICE:
        return f"{label} is {shown}, but {SET_BY_SLUICE[name]}"
    for group in known[name]:
        kinds = fields_of(group)[name]
        if not set(kinds) - {NONE}:
            return f"{label} is {shown}, but that field takes an object of Python, not text; leave it out"
        try:
            _convert(kinds, value)
        except _Refused as refused:
            return f"{label} is {shown}, but {refused}"
    return None


def _convert(kinds: tuple[Kind, ...], value: Any) -> tuple[Kind, Any]:
    """The alternative of the field's type that takes the value, with the value in its type."""
    for reading in _readings(value):
        for kind in kinds:
            try:
                return kind, msgspec.convert(reading, kind.type)
            except msgspec.ValidationError:
                continue
    raise _Refused(f"must be {' or '.join(kind.rule for kind in kinds)}; give for example {kinds[0].example}")


def _readings(value: Any) -> Iterator[Any]:
    """What a value may mean, the likeliest first: text as what it spells and as itself, an item as a list of one."""
    if isinstance(value, list | tuple):
        yield [_spelt(item) for item in value]
        yield value
    else:
        yield from (_spelt(value), value, [_spelt(value)], [value])


def _spelt(value: Any) -> Any:
    """What a text spells in a dataclass's type."""
    if not isinstance(value, str):
        return value
    words = {"true": True, "false": False, "none": None}
    if value in words:
        return words[value]
    for read in (int, float):
        try:
            return read(value)
        except ValueError:
            continue
    return value


def _real(kind: Kind, value: Any) -> Any:
    """What the dataclass wants in place of a name: a dtype of torch, a member of an enum."""
    if kind.stands_for == DTYPE:
        return getattr(importlib.import_module("torch"), DTYPES[value])
    if kind.stands_for:
        return getattr(importlib.import_module("megatron.core.transformer.enums"), kind.stands_for)[value]
    return value
