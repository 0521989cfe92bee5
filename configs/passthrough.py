"""Flags that are no fields of the schema: `--sglang-<option>`, `--router-<option>` and `--megatron-<option>`, which are
passed on by name, and settings of earlier versions, which get one sentence.

Beside them, names that users of Megatron-LM's own scripts know: some are other names of ours or of an option that is
passed on (`ALIASES`), others say what a model is, which here its checkpoint says.

Invariants: a flag of the schema always wins; a name that is nearly one of them is a slip, not an option; whether the
installed program knows an option and takes its value is checked with that program (`pipeline.preflight.refusals`,
`models.train.megatron.options`), not here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from configs.schema.notation import nearest

# Fields of Megatron-core's dataclasses whose flag in Megatron-LM has no prefix; here they are passed on.
_MEGATRON_OPTIONS: Final = tuple(
    """
    attention-backend attention-softmax-in-fp32 cp-comm-type cpu-offloading-num-layers cross-entropy-fusion-impl
    cross-entropy-loss-fusion deterministic-mode distribute-saved-activations exp-avg-dtype exp-avg-sq-dtype
    main-grads-dtype main-params-dtype moe-enable-deepep moe-expert-capacity-factor moe-permute-fusion
    moe-router-dtype moe-router-fusion moe-shared-expert-overlap moe-token-drop-policy overlap-cpu-optimizer-d2h-h2d
    overlap-p2p-comm recompute-modules tp-comm-overlap use-precision-aware-optimizer
    """.split()  # noqa: SIM905
)

# Other names of flags, as other programs call them.
ALIASES: Final[Mapping[str, str]] = {
    "sglang-server-concurrency": "server-concurrency",
    "accumulate-allreduce-grads-in-fp32": "megatron-grad-reduce-in-fp32",
    "ddp-bucket-size": "megatron-bucket-size",
    **{name: f"megatron-{name}" for name in _MEGATRON_OPTIONS},
}

# Flags of Megatron-LM that describe the model.
_ARCHITECTURE: Final = frozenset(
    """
    num-layers hidden-size ffn-hidden-size num-attention-heads num-query-groups group-query-attention kv-channels
    swiglu normalization norm-epsilon qk-layernorm add-qkv-bias disable-bias-linear position-embedding-type
    rotary-base rotary-percent use-rotary-position-embeddings no-position-embedding vocab-size padded-vocab-size
    make-vocab-size-divisible-by untie-embeddings-and-output-weights max-position-embeddings num-experts
    moe-ffn-hidden-size moe-shared-expert-intermediate-size moe-layer-freq moe-router-topk moe-router-score-function
    moe-router-pre-softmax moe-router-enable-expert-bias moe-router-topk-scaling-factor moe-router-num-groups
    moe-router-group-topk multi-latent-attention q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim
    post-self-attn-layernorm post-mlp-layernorm
    """.split()  # noqa: SIM905 - a list would take a line for each
)
# Flags of Megatron-LM with nothing to switch here, each with the reason.
_NOTHING: Final[Mapping[str, str]] = {
    "attention-dropout": "there is no dropout",
    "hidden-dropout": "there is no dropout",
    "moe-aux-loss-coeff": "there is no auxiliary loss",
    "moe-router-load-balancing-type": "there is no auxiliary loss",
    "moe-router-bias-update-rate": "the router's bias stays as the checkpoint has it",
    "bf16": "that is --train-dtype bfloat16, and the default on a GPU",
    "fp16": "fp16 is not offered; use --train-dtype bfloat16",
    "optimizer": "the optimizer is AdamW",
    "load": "a run continues with --resume, and begins with --hf-checkpoint",
    "save": "a run writes its checkpoints into --run-dir; see --save-interval and --save-hf",
    "use-mcore-models": "all models are Megatron-core's",
    "use-flash-attn": "that is --megatron-attention-backend flash",
}

# Hooks of slime that are not here, each with what to use.
SLIME: Final[Mapping[str, str]] = {
    "buffer-filter-path": "which waiting group is trained next is --buffer-order module:function",
    "rollout-all-samples-process-path": "samples.jsonl has all of them, and a stage of yours after reward sees them",
    "rollout-data-postprocess-path": "a stage of yours after reward changes samples; --rollout-rs masks by log-probs",
    "custom-convert-samples-to-train-data-path": "a stage of yours after group changes samples before they are trained",
    "eval-function-path": "evaluations use --custom-generate-function-path, with evaluation=True",
    "custom-advantage-function-path": "write --advantage-estimator module:function",
    "custom-pg-loss-reducer-function-path": "write --loss-aggregation, or --policy-loss module:function",
    "custom-model-provider-path": "what the model is comes from --hf-checkpoint",
    "custom-megatron-init-path": "write --policy-loss module:function, or a stage of yours",
    "custom-megatron-before-log-prob-hook-path": "write --policy-loss module:function, or a stage of yours",
    "custom-megatron-before-train-step-hook-path": "write --policy-loss module:function, or a stage of yours",
    "custom-update-weight-post-write-path": "engines fetch versions themselves; see --update-weight-transport",
}

# Settings of earlier versions: key -> (the default it had, what to do instead).
RETIRED: Final[Mapping[str, tuple[object, str]]] = {
    "run.hub_processes": (0, "all streams run in the controller's process"),
    "run.hub_shards": (1, "all streams run in the controller's process"),
    "run.train_standby": (False, "a killed trainer starts again from its last checkpoint; see --save-interval"),
}


def retired(key: str) -> str | None:
    """What to do instead of a setting of an earlier version, by its key or its flag's name; None for all others."""
    plain = key.replace("-", "_").removeprefix("no_")
    found = (instead for name, (_, instead) in RETIRED.items() if plain in (name, name.partition(".")[2]))
    return next((f"{key} was removed: {instead}; leave it out" for instead in found), None)


_OWNERS: Final[Mapping[str, str]] = {
    "sglang-": "sglang.sglang_args",
    "router-": "router.router_args",
    "megatron-": "megatron.megatron_args",
}
_SLIP: Final = 0.85  # likeness above which a name is a slip of one of our flags
# Options of the router that may be given several times, each with a URL and perhaps a port.
_REPEATED: Final = {"prefill", "decode", "encode"}


def option_of(name: str, known: Iterable[str]) -> tuple[str, str, str | None] | None:
    """`sglang-mem-fraction-static` -> (`sglang.sglang_args`, `mem_fraction_static`, None).

    The third part is a fault, if the name cannot be passed on. None if the name has none of the prefixes and is no flag
    of Megatron-LM. `known`: the names of our own flags, of which `name` is none.
    """
    plain = name.replace("_", "-")
    negative = plain.startswith("no-")
    plain = plain.removeprefix("no-")
    prefix = next((start for start in _OWNERS if plain.startswith(start) and plain != start), None)
    if prefix is None:
        reason = _of_megatron_lm(name.replace("_", "-"))
        return None if reason is None else ("megatron.megatron_args", plain.replace("-", "_"), reason)
    near = nearest(plain, [flag for flag in known if flag.startswith(prefix)], _SLIP)
    option = plain.removeprefix(prefix)
    key, field = _OWNERS[prefix], option.removeprefix("no-").replace("-", "_")
    fault = None
    if near:
        fault = f"--{name} is no flag; did you mean --{near}?"
    elif negative or option.startswith("no-"):
        fault = (
            f"--{name} turns an option off, but only what is given is passed on; leave it out, or write "
            f"{key}.{field}=false"
        )
    elif "_" in name:
        fault = f"--{name} is no flag, for names are written with dashes; write --{plain}"
    return key, field, fault


def _of_megatron_lm(name: str) -> str | None:
    """What to do instead of a flag of Megatron-LM or a hook of slime; None for all other names."""
    if name in _ARCHITECTURE:
        return (
            f"--{name} is no flag, for what the model is comes from the config.json of --hf-checkpoint (and --model); "
            "leave it out"
        )
    if name in _NOTHING:
        return f"--{name} is no flag: {_NOTHING[name]}; leave it out"
    if name in SLIME:
        return f"--{name} is no flag: {SLIME[name]}; leave it out"
    bare = name.removeprefix("no-")
    if name.startswith("no-") and bare.endswith("-fusion"):
        return f"--{name} is no flag; write megatron.megatron_args.{bare.replace('-', '_')}=false"
    return None


def option_value(key: str, option: str, texts: list[str], before: Any) -> Any:
    """True without a value, else the text, else the list of texts. `before`: what an earlier giving of it left."""
    if option in _REPEATED and key == _OWNERS["router-"]:
        return [*(before or []), " ".join(texts)]
    return True if not texts else texts[0] if len(texts) == 1 else texts
