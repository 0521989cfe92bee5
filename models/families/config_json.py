"""Strict reading of `config.json`: keys that would change the numbers and cannot be built are refused by name.

The family reads a key, or the key has no influence on the logits (`NEUTRAL`), or it is refused with its value and a
cure. A key at a value that means "off" counts as neutral.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

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
    """The value of a required key. Raises `UnsupportedModel`."""
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


def with_published_name(config: Mapping[str, Any], published: str) -> dict[str, Any]:
    """With the published name of the number of experts, which transformers 5 writes as `num_local_experts`."""
    found = dict(config)
    if "num_local_experts" in found:
        found.setdefault(published, found.pop("num_local_experts"))
    return found


def check_keys(config: Mapping[str, Any], known: frozenset[str], **off: tuple[Any, ...]) -> None:
    """Refuse keys that change the logits and cannot be built.

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


# --------------------------------------------------------------------------------------------------
# Rotary position embeddings: frequencies and the factor of cosines and sines.
#
# The formulas are those of transformers 5 (`modeling_rope_utils`): default, linear (arXiv:2306.15595), llama3 (Llama
# 3.1) and yarn (arXiv:2309.00071). Others are refused: their frequencies depend on the length of the text.


KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Rope:
    """`dim`: rotated dimensions of each head; `interleaved`: pairs are neighbours instead of halves."""

    base: float
    dim: int
    interleaved: bool = False
    kind: str = "default"
    scaling: Mapping[str, Any] = field(default_factory=dict)
    max_length: int = 0  # of config.json, tokens

    def frequencies(self) -> Tensor:
        """Radians per position, fp32 [dim / 2]."""
        plain = 1.0 / (self.base ** (torch.arange(0, self.dim, 2, dtype=torch.int64).to(torch.float32) / self.dim))
        if self.kind == "linear":
            return plain / float(self.scaling["factor"])
        if self.kind == "llama3":
            return self._llama3(plain)
        if self.kind == "yarn":
            return self._yarn()
        return plain

    @property
    def factor(self) -> float:
        """Factor of positions; without one, yarn takes the ratio of the maximal lengths."""
        factor = self.scaling.get("factor")
        return float(factor) if factor is not None else self.max_length / self._original_length

    @property
    def attention_factor(self) -> float:
        """The factor of cosines and sines."""
        if self.kind != "yarn":
            return 1.0
        if self.scaling.get("attention_factor") is not None:
            return float(self.scaling["attention_factor"])
        mscale, all_dim = self.scaling.get("mscale"), self.scaling.get("mscale_all_dim")
        if mscale and all_dim:
            return yarn_mscale(self.factor, mscale) / yarn_mscale(self.factor, all_dim)
        return yarn_mscale(self.factor)

    @property
    def _original_length(self) -> int:
        return int(self.scaling.get("original_max_position_embeddings") or self.max_length)

    def _llama3(self, plain: Tensor) -> Tensor:
        factor = float(self.scaling["factor"])
        low, high = float(self.scaling["low_freq_factor"]), float(self.scaling["high_freq_factor"])
        length = self._original_length
        wavelength = 2 * math.pi / plain
        scaled = torch.where(wavelength > length / low, plain / factor, plain)
        smooth = (length / wavelength - low) / (high - low)
        between = (1 - smooth) * scaled / factor + smooth * scaled
        middle = ~(wavelength < length / high) * ~(wavelength > length / low)
        return torch.where(middle, between, scaled)

    def _yarn(self) -> Tensor:
        def turns_at(rotations: float) -> float:
            return (self.dim * math.log(self._original_length / (rotations * 2 * math.pi))) / (2 * math.log(self.base))

        low = turns_at(float(self.scaling.get("beta_fast") or 32))
        high = turns_at(float(self.scaling.get("beta_slow") or 1))
        if self.scaling.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        if low == high:
            high += 0.001
        powers = self.base ** (torch.arange(0, self.dim, 2).to(torch.float32) / self.dim)
        ramp = torch.clamp((torch.arange(self.dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
        kept = 1 - ramp
        return 1.0 / (self.factor * powers) * (1 - kept) + 1.0 / powers * kept


def yarn_mscale(scale: float, mscale: float = 1.0) -> float:
    """arXiv:2309.00071, equation 22, times `mscale`."""
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0


def read_rope(config: Mapping[str, Any], *, head_width: int, partial: float = 1.0, interleaved: bool = False) -> Rope:
    """Of `config.json`, in its older (`rope_theta`, `rope_scaling`) or newer form (`rope_parameters`).

    `partial`: share of a head that is rotated if the file does not say. Raises `UnsupportedModel`.
    """
    found: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        found.update(config.get(key) or {})
    kind = str(found.get("rope_type") or found.get("type") or "default")
    if kind not in KINDS:
        raise UnsupportedModel(
            f"rope_type={kind!r} of {config.get('model_type')!r} cannot be built with Megatron-core: only "
            f"{', '.join(KINDS)} are; use --train-backend fsdp"
        )
    base = found.get("rope_theta", config.get("rope_theta", 10000.0))
    share = found.get("partial_rotary_factor", config.get("partial_rotary_factor", partial))
    return Rope(
        base=float(base),
        dim=int(head_width * float(share)),
        interleaved=interleaved,
        kind=kind,
        scaling={} if kind == "default" else found,
        max_length=int(config.get("max_position_embeddings", 0)),
    )
