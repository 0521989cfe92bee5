"""From a model's config.json and the options of a run to one chunk of the model: embedding, layers and head, as far as
this process has them.

First the layout and the precision are checked, then Megatron-core's TransformerConfig is written, then GPT is built.
Weights are not set: `weights.load_hf` reads them, or a distributed checkpoint is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from configs.schema.train import MegatronConfig, has_transformer_engine
from models.errors import TrainConfigInvalid, UnsupportedModel
from models.families.decoder import Architecture
from models.families.hugging_face_names import padded_vocab
from models.families.registry import architecture_of
from models.train.huggingface.loading import autocast_dtype
from models.train.megatron.layers import PositionRotary, layer_submodules
from models.train.megatron.options import options_of
from models.train.spec import TrainSpec

# --------------------------------------------------------------------------------------------------
# What of a run's options a model can be built with: precision, kernels, division among processes.


def model_dtype(spec: TrainSpec) -> torch.dtype:
    """Precision of parameters and forward pass; the optimizer keeps fp32 main parameters beside bfloat16."""
    device = torch.device("cuda" if on_gpu(spec) else "cpu")
    return autocast_dtype(spec.train.train_dtype, device) or torch.float32


def uses_transformer_engine(spec: TrainSpec) -> bool:
    """Whether layers are those of Transformer Engine. Raises `TrainConfigInvalid` if it is not installed."""
    found = has_transformer_engine() and torch.cuda.is_available()
    if spec.megatron.transformer_impl == "transformer_engine" and not found:
        raise TrainConfigInvalid(
            "transformer_impl=transformer_engine needs Transformer Engine and a GPU, and this process lacks one of "
            "them; install transformer-engine[pytorch] on a machine with a GPU, or use --transformer-impl local"
        )
    return found and spec.megatron.transformer_impl != "local"


def check_layout(architecture: Architecture, spec: TrainSpec) -> None:
    """Refuse layouts that this model cannot be divided by. Raises `TrainConfigInvalid`, `UnsupportedModel`."""
    m, engine = spec.megatron, uses_transformer_engine(spec)
    tensor, model_type = m.tensor_model_parallel_size, architecture.model_type
    if not architecture.experts and m.expert_model_parallel_size > 1:
        raise TrainConfigInvalid(
            f"expert_model_parallel_size={m.expert_model_parallel_size}, but {model_type} has no experts; leave "
            "--expert-model-parallel-size out"
        )
    _check_widths(architecture, m)
    if (architecture.experts or architecture.latent_attention) and tensor > 1 and not m.sequence_parallel:
        raise TrainConfigInvalid(
            f"{model_type} has experts or latent attention, and Megatron-core trains those with "
            f"tensor_model_parallel_size={tensor} only together with sequence parallelism; add --sequence-parallel"
        )
    _check_stages(architecture, m)
    if m.moe_grouped_gemm and not engine:
        raise TrainConfigInvalid(
            "moe_grouped_gemm needs Transformer Engine on a GPU; leave --moe-grouped-gemm out, or use "
            "--transformer-impl transformer_engine there"
        )
    if architecture.latent_attention and architecture.rope.kind not in ("default", "yarn"):
        raise UnsupportedModel(
            f"rope_type={architecture.rope.kind!r} of {architecture.model_type!r}: latent attention is built with "
            "default or yarn frequencies; use --train-backend fsdp"
        )


def _check_widths(architecture: Architecture, m: MegatronConfig) -> None:
    """Heads, experts and matrices must divide evenly among their processes."""
    fields, tensor = architecture.transformer, m.tensor_model_parallel_size
    expert_tensor = tensor if m.expert_tensor_parallel_size is None else m.expert_tensor_parallel_size
    of_tensor, of_experts = ("tensor_model_parallel_size", tensor), ("expert_tensor_parallel_size", expert_tensor)
    shared = fields.get("moe_shared_expert_intermediate_size")
    divided = (
        ("{} attention heads", fields["num_attention_heads"], of_tensor),
        ("{} experts", architecture.experts, ("expert_model_parallel_size", m.expert_model_parallel_size)),
        ("intermediate_size {}", fields["ffn_hidden_size"], of_tensor),
        ("moe_intermediate_size {}", fields.get("moe_ffn_hidden_size"), of_experts),
        ("width of the shared experts {}", shared, of_tensor),
    )
    for what, number, (option, parts) in divided:
        if number is not None and number % parts:
            raise TrainConfigInvalid(
                f"{option}={parts} does not divide the {what.format(number)} of {architecture.model_type}; choose a "
                f"divisor of {number}"
            )
    groups = int(fields["num_query_groups"])
    if groups % tensor and tensor % groups:
        raise TrainConfigInvalid(
            f"tensor_model_parallel_size={tensor} and the {groups} key and value heads of {architecture.model_type}: "
            "one must divide the other; choose another size"
        )


def _check_stages(architecture: Architecture, m: MegatronConfig) -> None:
    """Each pipeline stage, and each of its chunks, must get equally many whole layers."""
    stages, chunks = m.pipeline_model_parallel_size, m.virtual_pipeline_model_parallel_size or 1
    given = [n for n in (m.decoder_first_pipeline_num_layers, m.decoder_last_pipeline_num_layers) if n is not None]
    if stages == 1:
        return
    rest, even = architecture.layers - sum(given), stages - len(given)
    if even and rest > 0 and rest % even == 0:
        given.append(rest // even)
    elif even or rest:
        raise TrainConfigInvalid(
            f"pipeline_model_parallel_size={stages} does not divide the {rest} layers of {architecture.model_type} "
            f"that {even} stages share; choose a divisor, or give the ends other numbers of layers with "
            "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers"
        )
    if any(layers % chunks for layers in given):
        raise TrainConfigInvalid(
            f"virtual_pipeline_model_parallel_size={chunks} does not divide the layers of a stage, {given} of "
            f"{architecture.model_type}; choose a divisor of all of them"
        )


def on_gpu(spec: TrainSpec) -> bool:
    """Whether the model is trained on a GPU."""
    return torch.cuda.is_available() and spec.train.train_device != "cpu"


# --------------------------------------------------------------------------------------------------
# Megatron-core's TransformerConfig out of a model's config.json and the options of a run: no size is typed by hand.
#
# Precedence: the architecture, then the parallel layout and precision of the run, then `--megatron-<option>`, which may
# set neither of the two.


def transformer_config(architecture: Architecture, spec: TrainSpec) -> TransformerConfig:
    """MLATransformerConfig for latent attention. Raises `UnsupportedModel`, `TrainConfigInvalid`."""
    check_layout(architecture, spec)
    fields: dict[str, Any] = {
        **_model_fields(architecture),
        **_run_fields(spec),
        **_parallel_fields(spec, experts=architecture.experts > 0),
        **_recompute_fields(spec),
        **options_of(spec.megatron.megatron_args, "transformer"),
    }
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


def _parallel_fields(spec: TrainSpec, *, experts: bool) -> dict[str, Any]:
    m, chunks = spec.megatron, spec.megatron.virtual_pipeline_model_parallel_size
    same = ["tensor_model_parallel_size", "sequence_parallel", "pipeline_model_parallel_size", "context_parallel_size"]
    fields: dict[str, Any] = {
        "virtual_pipeline_model_parallel_size": None if chunks == 1 else chunks,
        "num_layers_in_first_pipeline_stage": m.decoder_first_pipeline_num_layers,
        "num_layers_in_last_pipeline_stage": m.decoder_last_pipeline_num_layers,
    }
    if m.context_parallel_size > 1:
        fields["cp_comm_type"] = "p2p"
    if experts:
        same += ["expert_model_parallel_size", "expert_tensor_parallel_size"]
        same += ["moe_token_dispatcher_type", "moe_grouped_gemm"]
        fields |= {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0}
        fields["moe_router_bias_update_rate"] = 0.0  # the bias stays as the checkpoint has it
    return fields | {name: getattr(m, name) for name in same}


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


class PolicyModel(GPTModel):  # type: ignore[misc]
    """GPTModel whose rotary embeddings follow `position_ids`.

    `forward(input_ids [b, s], position_ids [b, s] or None, attention_mask)`: positions None count from 0 in every row;
    a mask of None is causal, else bool [b, 1, s, s], True = masked. Every pipeline stage needs both. On the last stage,
    logits [b, s, padded vocabulary / tensor parallel size]; columns from `vocab_size` on are padding and mean nothing.
    """

    def __init__(self, architecture: Architecture, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.architecture = architecture
        self.rotary_pos_emb = PositionRotary(architecture.rope)

    def _preprocess(
        self, input_ids: Any, position_ids: Any, decoder_input: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        with self.rotary_pos_emb.at(position_ids):
            found = super()._preprocess(input_ids, position_ids, decoder_input, *args, **kwargs)
            if not self.config.multi_latent_attention:
                return found
            # Megatron-core's latent attention makes its own angles; this repository's takes them.
            length = self.rotary_pos_emb.get_rotary_seq_len(
                None, self.decoder, found[0], self.config, kwargs.get("packed_seq_params")
            )
            return (found[0], self.rotary_pos_emb(length), *found[2:])


def build_gpt(
    hf_config: Mapping[str, Any], spec: TrainSpec, *, pre_process: bool, post_process: bool, vp_stage: int | None = None
) -> PolicyModel:
    """The chunk of this process with the given ends. The parallel layout is built already (`processes.build_layout`).

    `hf_config`: contents of config.json. Raises `UnsupportedModel`, `TrainConfigInvalid`.
    """
    architecture = architecture_of(hf_config)
    config = transformer_config(architecture, spec)
    model = PolicyModel(
        architecture,
        config,
        layer_submodules(architecture, config, transformer_engine=uses_transformer_engine(spec), vp_stage=vp_stage),
        # Padding rows are zero, get no gradient as log-probs leave them out (`vocabulary`), and are not exported.
        vocab_size=padded_vocab(architecture.vocab_size, spec.megatron.tensor_model_parallel_size),
        max_sequence_length=architecture.max_length,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        share_embeddings_and_output_weights=architecture.tied,
        position_embedding_type="rope",
        rotary_base=architecture.rope.base,
        vp_stage=vp_stage,
    )
    if config.params_dtype != torch.float32:
        model.to(config.params_dtype)
        for module in model.modules():
            if hasattr(module, "_maintain_float32_expert_bias"):  # it decides between experts, compared in fp32
                module._maintain_float32_expert_bias()
    return model
