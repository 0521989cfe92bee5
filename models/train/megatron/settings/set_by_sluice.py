"""Fields of Megatron-core's dataclasses that are not taken from `--megatron-<option>`, each with what to use instead.

Invariant: a table of plain text. `option_faults` completes an entry to a sentence: "--megatron-lr is 1, but <entry>".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from configs.schema.train import MegatronConfig, TrainConfig

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

_OTHERS: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("hidden_dropout", "attention_dropout"),
        "dropout is 0, for the trainer's log-probs must be those of the policy that samples; leave it out",
    ),
    **dict.fromkeys(
        ("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_load_balancing_type", "dsa_indexer_loss_coeff"),
        "gradients are sums over a step that are divided once at its end, where an auxiliary loss would get a wrong "
        "weight, so that there is none; leave it out",
    ),
    **dict.fromkeys(
        ("mtp_num_layers", "mtp_loss_scaling_factor", "mtp_standalone"),
        "heads for multi-token prediction are not trained; leave it out",
    ),
    **dict.fromkeys(
        ("calculate_per_token_loss", "average_in_collective", "gradient_reduce_div_fusion", "check_for_nan_in_grad"),
        "gradients are sums that the trainer itself divides, checks and clips; leave it out",
    ),
    **dict.fromkeys(
        ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"),
        "it belongs to fp16, which is not offered; use --train-dtype bfloat16, which needs no scale",
    ),
    **dict.fromkeys(
        ("optimizer", "decoupled_weight_decay", "sgd_momentum", "decoupled_lr", "decoupled_min_lr"),
        "the optimizer is AdamW with one learning rate, for all backends alike; leave it out",
    ),
    **dict.fromkeys(
        (
            "muon_momentum",
            "muon_split_qkv",
            "muon_use_nesterov",
            "muon_scale_mode",
            "muon_fp32_matmul_prec",
            "muon_num_ns_steps",
            "muon_tp_mode",
            "muon_extra_scale_factor",
        ),
        "the optimizer is AdamW, for all backends alike; leave it out",
    ),
    **dict.fromkeys(
        ("use_cpu_initialization", "perform_initialization", "init_model_with_meta_device", "init_method_std"),
        "all weights are read from --hf-checkpoint; leave it out",
    ),
    **dict.fromkeys(
        (
            "hierarchical_context_parallel_sizes",
            "hybrid_context_parallel",
            "max_seqlen_per_dp_cp_rank",
            "num_distributed_optimizer_instances",
        ),
        "the groups of processes are made from the parallel sizes alone; leave it out",
    ),
    "variable_seq_lengths": "the shapes of micro-batches are settled by --max-tokens-per-gpu; leave it out",
    "moe_enable_routing_replay": "the engines' routing is not recorded; leave it out",
    "moe_router_force_load_balancing": "it sends tokens to experts at random; leave it out",
    "moe_router_bias_update_rate": "the router's bias is kept as the checkpoint has it; leave it out",
    "embedding_init_method_std": "all weights are read from --hf-checkpoint; leave it out",
}

SET_BY_SLUICE: Final[Mapping[str, str]] = {
    **{field: f"Sluice has a flag of its own for it; use {flag}" for field, flag in _FLAGS.items()},
    **dict.fromkeys(_ARCHITECTURE, "that is what the model is, and comes from its config.json; leave it out"),
    **_OTHERS,
}
