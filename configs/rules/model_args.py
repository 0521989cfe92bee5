"""What a command line of slime or Megatron-LM says of the model (`--num-layers`, `--rotary-base`, ...), compared with
the model's own config.json.

Invariants: the checkpoint decides what the model is; an option that says otherwise is a fault that names both values;
an option about which config.json says nothing is not compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from configs.flags import show
from configs.schema import Config
from configs.schema.model_shapes import ModelShape, known_shape
from configs.sources import known_model

Expected = Callable[[Mapping[str, Any], ModelShape | None], Any]


def model_args_faults(config: Config) -> Iterator[str]:
    """One fault for all options that differ."""
    model = known_model(config)
    if model is None or not config.model.model_args:
        return
    found = differences(model.get("text_config") or model, config.model.model_args)
    if found:
        yield (
            f"{', '.join(found)}: what the model is comes from the config.json of --hf-checkpoint "
            f"{config.train.hf_checkpoint!r}, which differs; correct --hf-checkpoint, or leave these options out"
        )


def differences(model: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    """`--name value (value of config.json)` of the options that say something else than a config.json."""
    shape = known_shape(model)
    found = []
    for key, value in options.items():
        name = key.replace("_", "-")
        expected = _EXPECTED[name](model, shape) if name in _EXPECTED else None
        if expected is not None and not _equal(expected, value):
            found.append(f"--{name} {show(value)} (config.json: {show(expected)})")
    return found


def _equal(expected: Any, value: Any) -> bool:
    if isinstance(value, str) and "$" in value:  # known to a shell alone
        return True
    try:
        return abs(float(expected) - float(value)) <= 1e-9 * abs(float(expected))
    except (TypeError, ValueError):
        return bool(expected == value)


def _key(*names: str) -> Expected:
    """The value of the first of these keys that is there."""
    return lambda model, shape: next((model[name] for name in names if model.get(name) is not None), None)


def _shape(read: Callable[[ModelShape], Any]) -> Expected:
    return lambda model, shape: None if shape is None else read(shape)


def _rotary(key: str) -> Expected:
    """As published, or below `rope_parameters`, as transformers saves it again."""
    return lambda model, shape: model.get(key, (model.get("rope_parameters") or {}).get(key))


_EXPECTED: Final[Mapping[str, Expected]] = {
    "num-layers": _key("num_hidden_layers"),
    "hidden-size": _key("hidden_size"),
    "ffn-hidden-size": _shape(lambda shape: None if all(shape.sparse) else shape.ffn),
    "num-attention-heads": _key("num_attention_heads"),
    "num-query-groups": _shape(lambda shape: None if shape.latent else shape.kv_heads),
    "kv-channels": _shape(lambda shape: None if shape.latent else shape.head),
    "swiglu": lambda model, shape: model["hidden_act"] in ("silu", "swish") if "hidden_act" in model else None,
    "normalization": lambda model, shape: "RMSNorm" if "rms_norm_eps" in model else None,
    "norm-epsilon": _key("rms_norm_eps"),
    "rotary-base": _rotary("rope_theta"),
    "rotary-percent": _rotary("partial_rotary_factor"),
    "vocab-size": _key("vocab_size"),
    "qk-layernorm": _shape(lambda shape: None if shape.latent else shape.qk_norm),
    "add-qkv-bias": _shape(lambda shape: shape.qkv_bias),
    "disable-bias-linear": _shape(lambda shape: not (shape.ffn_bias or shape.out_bias)),
    "untie-embeddings-and-output-weights": _shape(lambda shape: not shape.tied),
    "multi-latent-attention": _shape(lambda shape: shape.latent is not None),
    "q-lora-rank": _key("q_lora_rank"),
    "kv-lora-rank": _key("kv_lora_rank"),
    "qk-head-dim": _key("qk_nope_head_dim"),
    "qk-pos-emb-head-dim": _key("qk_rope_head_dim"),
    "v-head-dim": _key("v_head_dim"),
    "num-experts": _key("num_experts", "n_routed_experts", "num_local_experts"),
    "moe-ffn-hidden-size": _key("moe_intermediate_size"),
    "moe-router-topk": _key("num_experts_per_tok"),
    "moe-router-score-function": _key("scoring_func"),
    "moe-router-topk-scaling-factor": _key("routed_scaling_factor"),
    "moe-router-num-groups": _key("n_group"),
    "moe-router-group-topk": _key("topk_group"),
    "moe-shared-expert-intermediate-size": _shape(lambda shape: shape.shared_ffn or None),
}
