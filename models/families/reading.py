"""Reading `config.json` strictly: what would change the numbers and cannot be built is refused, by name.

Every key of the file is one of three: read by the family, without influence on the logits (`NEUTRAL`), or refused with
its value and a cure. A key at a value that means "off" counts as neutral.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from configs.schema.model_shapes import ALLOWED_VALUES, ModelShape, read_shape, refused_keys
from models.errors import UnsupportedModel

# Of transformers' configurations: generation, bookkeeping, initialisation, training losses that are not used here.
NEUTRAL = frozenset(
    """
    add_cross_attention architectures attn_implementation auto_map aux_loss_alpha bad_words_ids
    begin_suppress_tokens bos_token_id chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id
    diversity_penalty do_sample dtype early_stopping encoder_no_repeat_ngram_size eos_token_id ep_size
    experts_implementation exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
    id2label initializer_range is_decoder is_encoder_decoder label2id length_penalty max_length
    max_position_embeddings max_window_layers min_length model_type no_repeat_ngram_size num_beam_groups num_beams
    num_mtp_layers num_nextn_predict_layers num_return_sequences original_max_position_embeddings output_attentions
    output_hidden_states output_router_logits output_scores pad_token_id prefix pretraining_tp problem_type
    pruned_heads remove_invalid_values repetition_penalty return_dict return_dict_in_generate router_aux_loss_coef
    sep_token_id seq_aux suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder
    tokenizer_class top_k top_p torch_dtype torchscript transformers_version typical_p unsloth_fixed unsloth_version
    use_bfloat16 use_cache vocab_size
    """.split()  # noqa: SIM905 - a list would take a line for each
)


def need(config: Mapping[str, Any], key: str) -> Any:
    """The value of a key that must be there. Raises `UnsupportedModel`."""
    if config.get(key) is None:
        raise UnsupportedModel(
            f"config.json of {config.get('model_type')!r} has no {key}, which its architecture needs; "
            "give the config.json that was published with the model"
        )
    return config[key]


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """Raises `UnsupportedModel` for a size that is missing."""
    try:
        return read_shape(config)
    except KeyError as error:
        need(config, str(error.args[0]))
        raise


def renamed(config: Mapping[str, Any], **names: str) -> dict[str, Any]:
    """With the published name of keys that transformers 5 writes under another: `theirs="published"`."""
    found = dict(config)
    for theirs, published in names.items():
        if theirs in found:
            found.setdefault(published, found[theirs])
            del found[theirs]
    return found


def check_keys(config: Mapping[str, Any], known: frozenset[str], **off: tuple[Any, ...]) -> None:
    """Refuse what changes the logits and cannot be built.

    `known`: keys that the family reads; `off`: keys with the values that it can build. An absent key or null is the
    default of transformers, which is always among them. Raises `UnsupportedModel`.
    """
    model_type = config.get("model_type")
    for key in refused_keys(config, off):
        raise UnsupportedModel(_refusal(config, key, {**ALLOWED_VALUES, **off}))
    for key, value in config.items():
        named = key in known or key in off or key in ALLOWED_VALUES or key in NEUTRAL
        if value is not None and not named and key != "quantization_config" and not key.startswith("_"):
            raise UnsupportedModel(
                f"{key}={value!r} in config.json of {model_type!r} is not known here and may change the logits; "
                "use --train-backend fsdp, or add the key to models/families if it has no influence"
            )


def _refusal(config: Mapping[str, Any], key: str, allowed: Mapping[str, tuple[Any, ...]]) -> str:
    model_type, value = config.get("model_type"), config[key]
    if key == "quantization_config":
        return (
            f"quantization_config={value!r} of {model_type!r}: quantized weights are not trained; convert the "
            "checkpoint to bfloat16 first and remove the key"
        )
    if key in ("layer_types", "use_sliding_window"):
        kinds = sorted(set(config.get("layer_types") or ()) - {"full_attention"})
        return (
            f"sliding_window={config.get('sliding_window')!r} of {model_type!r} is in use (layer_types "
            f"{kinds or 'not given'}), and attention is built over all earlier tokens here; use --train-backend fsdp, "
            "or set use_sliding_window to false if no text is longer than the window"
        )
    return (
        f"{key}={value!r} of {model_type!r} cannot be built with Megatron-core here, only "
        f"{' or '.join(repr(value) for value in allowed[key]) or 'null'} can; use --train-backend fsdp"
    )
