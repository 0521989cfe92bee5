"""What a configuration names outside itself: data, checkpoints, import paths.

And whether a checkpoint is the model that `--model` names, and the one that options of Megatron-LM describe.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from configs.flags import flags_by_key, show
from configs.graph import frozen_engines, is_address
from configs.layers import value_at
from configs.schema import Config
from configs.schema.model_shapes import FAMILIES, ModelShape, fp8_block, known_shape
from configs.schema.notation import cure, repeated
from configs.sources import (
    BUILT_IN_MODELS,
    IMPORT_PATHS,
    NAMED,
    checkpoint_fault,
    import_path_fault,
    known_model,
    model_config,
    parse_source,
    source_fault,
)

_PLACE: Final = re.compile(r"\{[^{}]*\}")
_SAVED: Final = frozenset(("{step}", "{rollout_id}"))
_NEED_LABEL = ("exact", "gsm8k", "gsm8k_flex", "contains", "boxed")
# Not part of what a model is made of: a checkpoint may have been extended to longer texts.
_FREE: Final = ("max_position_embeddings",)
# Other names of a key, by family or in general, as transformers writes it again.
_RENAMED: Final[Mapping[str, str]] = {"num_experts": "num_local_experts", "n_routed_experts": "num_local_experts"}
_SAME_FAMILY: Final[Mapping[str, str]] = {"kimi_k2": "deepseek_v3"}


def data_faults(config: Config) -> Iterator[str]:
    data, evaluation = config.data, config.eval
    if not data.prompt_data and data.data_source_path is None and config.rollout.num_rollout != 0:
        yield "--prompt-data is empty, but a run needs prompts; give a file, or the built-in arithmetic"
    if data.prompt_data_weights and len(data.prompt_data_weights) != len(data.prompt_data):
        counts = f"has {len(data.prompt_data_weights)} numbers for {len(data.prompt_data)} entries of --prompt-data"
        yield f"--prompt-data-weights {counts}; give one for each"
    others = {"--loss-type sft_loss": config.train.loss_type == "sft_loss", "[[environment]]": config.environment}
    for what in (name for name, given in others.items() if given and data.data_source_path is not None):
        yield f"--data-source-path gives prompts that a run with {what} does not ask for; leave one of them out"
    for label, texts, named in (
        ("--prompt-data", () if data.data_source_path else data.prompt_data, False),
        ("--eval-prompt-data", evaluation.eval_prompt_data, True),
        ("--warm-start-data", config.warm_start.warm_start_data if config.warm_start.warm_start_steps else (), False),
    ):
        for text in texts:
            fault = source_fault(label, text, named=named, environments=[table.name for table in config.environment])
            if fault is not None and not (label == "--warm-start-data" and text in data.prompt_data):
                yield fault
    for name, count in repeated(map(_result_name, evaluation.eval_prompt_data)):
        yield (
            f"--eval-prompt-data has {count} sets named {name!r}, but each result needs its own name; write "
            "other-name=path for all but one"
        )
    yield from _eval_set_faults(config)
    template = data.chat_template_path
    if template is not None and not Path(template).is_file():
        yield f"--chat-template-path is {template!r}, but there is no such file; correct the path"
    yield from _label_faults(config)


def _eval_set_faults(config: Config) -> Iterator[str]:
    names = {_result_name(text) for text in config.eval.eval_prompt_data}
    for name in config.eval.eval_sets:
        if name not in names and names:
            hint = cure(name, names, f"the sets are {', '.join(sorted(names))}", form="eval.eval_sets.{}")
            yield f"eval.eval_sets.{name} sets up a data set that --eval-prompt-data does not name; {hint}"
        try:
            config.eval.of(name)
        except msgspec.ValidationError as error:
            yield f"eval.eval_sets.{name} does not fit: {error}; see docs/evaluation.md"


def _result_name(text: str) -> str:
    """The name under which a held-out set is reported: as given, else the file's."""
    source = parse_source(text, named=True)
    return source.name or ("heldout" if source.built_in else Path(source.path).stem)


def _label_faults(config: Config) -> Iterator[str]:
    data, warm, reward, sft = config.data, config.warm_start, config.reward, config.train.loss_type == "sft_loss"
    if data.label_key is not None or data.data_source_path is not None:
        return
    if data.prompt_data and not sft and reward.rm_type in _NEED_LABEL and reward.custom_rm_path is None:
        yield (
            f"--rm-type is {reward.rm_type}, but it compares with a reference answer and --label-key is not "
            "set; add --label-key, for example --label-key answer"
        )
    if warm.warm_start_steps > 0 and warm.warm_start_label_key is None:
        yield (
            f"--warm-start-steps is {warm.warm_start_steps}, but supervised training needs the reference answers and "
            "--label-key is not set; add --label-key, for example --label-key answer"
        )


def checkpoint_faults(config: Config) -> Iterator[str]:
    train = config.train
    named: dict[str | None, str] = {
        name: f"--frozen-engine {engine}" for engine, name in frozen_engines(config).items() if not is_address(name)
    }
    named |= {config.critic.critic_load: "--critic-load", train.ref_load: "--ref-load"}
    named[config.engine.engine_checkpoint] = "--engine-checkpoint"
    named[train.hf_checkpoint] = "--hf-checkpoint"
    for name, label in reversed(named.items()):
        if name is not None and (fault := checkpoint_fault(label, name)):
            yield fault
    limit = (model_config(train.hf_checkpoint) or {}).get("max_position_embeddings")
    if not isinstance(limit, int):
        return
    rollout = config.rollout
    for label, tokens in (
        ("--rollout-max-context-len", rollout.rollout_max_context_len),
        ("--rollout-max-response-len", rollout.rollout_max_response_len + 1),
    ):
        if tokens is not None and tokens > limit:
            shown = tokens if label.endswith("context-len") else tokens - 1
            yield f"{label} is {shown}, but the model has positions for {limit} tokens, prompt included; lower it"


def import_path_faults(config: Config) -> Iterator[str]:
    examples = dict.fromkeys(IMPORT_PATHS, "my_project.rewards:score")
    examples |= {key: "my_project.algorithms:mine" for key in NAMED if ":" in value_at(config, key)}
    named = [(flags_by_key()[key].label, value_at(config, key), example) for key, example in examples.items()]
    tools = (tool for tool in config.tools.tools if tool != "calculator")
    named += [("--tools", tool, "calculator or my_project.tools:search") for tool in tools]
    named += [(f"stage.{stage.name}.path", stage.path, "my_project.stages:Judge") for stage in config.stage]
    for label, text, example in named:
        if text is not None and (fault := import_path_fault(label, text, example)):
            yield fault


def save_faults(config: Config) -> Iterator[str]:
    """Copies of checkpoints in Hugging Face format."""
    checkpoint, backend = config.checkpoint, config.train.train_backend
    target = checkpoint.save_hf
    if target is None:
        return
    if backend == "simulated":
        yield "--save-hf writes weights, but --train-backend simulated has none; leave it out"
    unknown = sorted(set(_PLACE.findall(target)) - _SAVED)
    if unknown:
        yield f"--save-hf is {target!r}, but the names in braces are {{step}} and {{rollout_id}}, not {unknown[0]}"


def save_warnings(config: Config) -> Iterator[str]:
    checkpoint = config.checkpoint
    if checkpoint.save_interval is None:
        for label, given in (("--async-save", checkpoint.async_save), ("--save-hf", checkpoint.save_hf is not None)):
            if given:
                yield f"{label} has no effect: the run writes no checkpoints; add --save-interval"
    elif checkpoint.save_hf is not None and _SAVED.isdisjoint(_PLACE.findall(checkpoint.save_hf)):
        yield (
            f"--save-hf {checkpoint.save_hf} has no {{step}} in it: each checkpoint replaces the weights of the one "
            "before"
        )


def preset_faults(config: Config) -> Iterator[str]:
    """Whether `--hf-checkpoint` is the model that `--model` names."""
    model, train = config.model, config.train
    if not model.architecture:
        return
    label = f"--model {model.model}" if model.model is not None else "model.architecture"
    if train.hf_checkpoint in BUILT_IN_MODELS:
        yield (
            f"{label} describes a published model, but --hf-checkpoint is {train.hf_checkpoint!r}, a small built-in "
            "one; leave one of them out"
        )
        return
    found = model_config(train.hf_checkpoint)
    if found is None:
        return
    differing = [
        f"{key} ({show(found[name])}, not {show(value)})"
        for key, value in model.architecture.items()
        if key not in _FREE
        and (name := key if key in found else _RENAMED.get(key, key)) in found
        and not _equal(key, found[name], value)
    ]
    if not differing and known_shape(found) is not None:
        differing = _shape_differences(found, model.architecture)
    if differing:
        yield (
            f"--hf-checkpoint is {train.hf_checkpoint!r}, whose config.json differs from {label} in "
            f"{', '.join(differing)}; correct the directory, or leave {label} out"
        )


def _equal(key: str, found: object, expected: object) -> bool:
    if key == "model_type":
        return _SAME_FAMILY.get(str(found), found) == _SAME_FAMILY.get(str(expected), expected)
    return found == expected


def _shape_differences(found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Keys that only one of the two has, where they make another model."""
    there, wanted = known_shape(found), known_shape({**expected, "model_type": found.get("model_type")})
    if there is None or wanted is None:
        return []
    unread = ("positions", *(("head",) if there.latent else ()))  # latent attention has head sizes of its own
    return [
        f"{name} ({show(ours)}, not {show(theirs)})"
        for name in there.__struct_fields__
        if name not in unread and (ours := getattr(there, name)) != (theirs := getattr(wanted, name))
    ]


def engine_checkpoint_faults(config: Config) -> Iterator[str]:
    """Of weights in other types than the trainer's."""
    policy, place = config.train.hf_checkpoint, config.engine.engine_checkpoint
    ours, theirs = model_config(policy) or {}, model_config(place or "") or {}
    if fp8_block(ours) is not None and config.train.train_backend != "simulated":
        yield (
            f"--hf-checkpoint is {policy!r}, whose weights are in float8, in which small steps do not show; give the "
            "checkpoint in bfloat16, and this one as --engine-checkpoint"
        )
    if differing := _shape_differences(theirs, ours) if theirs and ours else ():
        yield (
            f"--engine-checkpoint is {place!r}, another model than --hf-checkpoint {policy!r}: {', '.join(differing)}; "
            "give one of the same model"
        )


def family_faults(config: Config) -> Iterator[str]:
    """Of models that the ranks would refuse; `config.json` of a hub's is seen there."""
    named = {"hf-checkpoint": config.train.hf_checkpoint, "ref-load": config.train.ref_load}
    named["critic-load"] = config.critic.critic_load
    for flag, name in named.items() if config.train.train_backend == "megatron" else ():
        if not name or (found := model_config(name)) is None:
            continue
        if (kind := found.get("model_type")) not in FAMILIES:
            yield (
                f"--{flag} is {name!r}, a model of type {kind!r}, which --train-backend megatron does not build: it "
                f"knows {', '.join(sorted(FAMILIES))}; --train-backend fsdp takes any causal language model of "
                "transformers"
            )
        elif found.get("quantization_config"):
            yield f"--{flag} is {name!r}, whose weights are quantized; give a checkpoint in bfloat16"


# What a command line of slime or Megatron-LM says of the model (`--num-layers`, `--rotary-base`, ...) is compared with
# the model's own config.json: the checkpoint decides what the model is, and an option about which config.json says
# nothing is not compared.

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
        if expected is not None and not _says(expected, value):
            found.append(f"--{name} {show(value)} (config.json: {show(expected)})")
    return found


def _says(expected: Any, value: Any) -> bool:
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
