"""A decoder as its `config.json` describes it: enough to build it and to name its weights.

Families share: the embedding, norms and head, the rules of attention, MLP and experts, and the common fields of a
transformer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from configs.schema.model_shapes import ModelShape
from models.errors import UnsupportedModel
from models.families.config_json import Rope, need, read_rope
from models.families.hugging_face_names import Gated, Layers, Piece, QueryGroups, Rule, Weight, expand, whole

# --------------------------------------------------------------------------------------------------
# A model as its `config.json` describes it.


@dataclass(frozen=True)
class Architecture:
    """One model.

    `transformer`: fields of Megatron-core's TransformerConfig (MLATransformerConfig if `latent_attention`), by name.
    `left_out`: regular expressions of names in checkpoints that the model here leaves out, with the reason for a
    warning ("": no warning); a name that neither a rule nor an expression matches is refused.
    """

    model_type: str
    transformer: Mapping[str, Any]
    vocab_size: int
    max_length: int  # tokens
    tied: bool  # the output layer is the embedding
    rope: Rope
    rules: tuple[Rule, ...]
    moe_layers: tuple[bool, ...]  # by layer: whether it has experts
    latent_attention: bool = False  # MLA
    sandwich_norms: bool = False  # norms after attention and after the MLP too
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def experts(self) -> int:
        return int(self.transformer.get("num_moe_experts") or 0)

    @property
    def layers(self) -> int:
        return len(self.moe_layers)

    def weights(self) -> Iterator[Weight]:
        """All parameters, in the order of an export."""
        return expand(self.rules, moe_layers=self.moe_layers, experts=self.experts)

    def names_left_out(self, names: Iterable[str]) -> dict[str, list[str]]:
        """By reason, those of `names` that the model here leaves out."""
        # Old checkpoints store tensors although others determine them.
        patterns = {**self.left_out, r".*\.rotary_emb\.inv_freq": ""} | ({r"lm_head\.weight": ""} if self.tied else {})
        found: dict[str, list[str]] = {}
        for name in sorted(names):
            for pattern, reason in patterns.items():
                if re.fullmatch(pattern, name):
                    found.setdefault(reason, []).append(name)
                    break
        return found


# --------------------------------------------------------------------------------------------------
# Shared by families: a decoder with its embedding, norms and head, the rules of attention, MLP and experts, and the
# common fields of a transformer.


LAYER = "model.layers.{layer}."
OWN = "decoder.layers.{layer}."

COMMON_KEYS = frozenset(
    """
    attention_bias head_dim hidden_size intermediate_size layer_types num_attention_heads num_hidden_layers
    num_key_value_heads rms_norm_eps rope_parameters rope_scaling rope_theta sliding_window tie_word_embeddings
    use_sliding_window
    """.split()  # noqa: SIM905 - a list would take a line for each
)
MOE_KEYS = frozenset(
    """
    first_k_dense_replace moe_intermediate_size n_group n_routed_experts n_shared_experts norm_topk_prob
    num_experts_per_tok routed_scaling_factor topk_group
    """.split()  # noqa: SIM905 - a list would take a line for each
)


def _transformer(config: Mapping[str, Any], shape: ModelShape) -> dict[str, Any]:
    """Fields of TransformerConfig that every dense decoder has."""
    return {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "ffn_hidden_size": shape.ffn,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.kv_heads,
        "kv_channels": shape.head,
        "layernorm_epsilon": float(need(config, "rms_norm_eps")),
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": shape.qkv_bias,
        "qk_layernorm": shape.qk_norm,
    }


def decoder(
    config: Mapping[str, Any],
    shape: ModelShape,
    layer_rules: tuple[Rule, ...],
    fields: Mapping[str, Any] | None = None,
    *,
    rope: Rope | None = None,
    left_out: Mapping[str, str] | None = None,
) -> Architecture:
    """The model of a `config.json`. `layer_rules`: of a layer, but for the norms before attention and MLP; `fields`:
    of TransformerConfig, beside those that every dense decoder has; `rope`: default: that of the file, over whole
    heads."""

    def of_vocabulary(own: str, published: str) -> Rule:
        return Rule(f"{own}.weight", whole(f"{published}.weight"), split="vocabulary", layers="once")

    return Architecture(
        model_type=str(config["model_type"]),
        transformer={**_transformer(config, shape), **(fields or {})},
        vocab_size=shape.vocabulary,
        max_length=int(need(config, "max_position_embeddings")),
        tied=shape.tied,
        rope=rope or read_rope(config, head_width=shape.head),
        rules=(
            of_vocabulary("embedding.word_embeddings", "model.embed_tokens"),
            Rule(OWN + "input_layernorm.weight", whole(LAYER + "input_layernorm.weight")),
            Rule(OWN + "pre_mlp_layernorm.weight", whole(LAYER + "post_attention_layernorm.weight")),
            *layer_rules,
            Rule("decoder.final_layernorm.weight", whole("model.norm.weight"), layers="once"),
            # A tied output layer has no own tensor.
            *(() if shape.tied else (of_vocabulary("output_layer", "lm_head"),)),
        ),
        moe_layers=shape.sparse,
        left_out=left_out or {},
    )


def attention(shape: ModelShape) -> tuple[Rule, ...]:
    """Attention with query groups."""
    join = QueryGroups(shape.heads, shape.kv_heads, shape.head)
    published, own = LAYER + "self_attn.", OWN + "self_attention."

    def qkv(kind: str) -> Rule:
        names = whole(*(f"{published}{part}_proj.{kind}" for part in "qkv"))
        return Rule(f"{own}linear_qkv.{kind}", names, split="rows", join=join)

    rules = [qkv("weight")]
    if shape.qkv_bias:
        rules.append(qkv("bias"))
    if shape.qk_norm:
        rules.append(Rule(own + "q_layernorm.weight", whole(published + "q_norm.weight")))
        rules.append(Rule(own + "k_layernorm.weight", whole(published + "k_norm.weight")))
    rules.append(Rule(own + "linear_proj.weight", whole(published + "o_proj.weight"), split="columns"))
    return tuple(rules)


def mlp(*, fused: bool = False, dense_only: bool = False) -> tuple[Rule, ...]:
    """Gated MLP. `fused`: the checkpoint stores gate and up projection as one tensor."""
    published, own = LAYER + "mlp.", OWN + "mlp."
    first = tuple(Piece(published + "gate_up_proj.weight", part, 2) for part in range(2)) if fused else ()
    return _gated(own, published, "dense" if dense_only else "all", first)


def _gated(own: str, published: str, layers: Layers, first: tuple[Piece, ...] = ()) -> tuple[Rule, Rule]:
    """Both matrices of a gated MLP. `first`: pieces of the first one, if they are not two tensors."""
    pieces = first or whole(published + "gate_proj.weight", published + "up_proj.weight")
    return (
        Rule(own + "linear_fc1.weight", pieces, split="gated_rows", join=Gated(), layers=layers),
        Rule(own + "linear_fc2.weight", whole(published + "down_proj.weight"), split="columns", layers=layers),
    )


def experts(*, router_bias: bool = False, shared: bool = False) -> tuple[Rule, ...]:
    """Router, experts, and the shared expert if there is one."""
    published, own = LAYER + "mlp.", OWN + "mlp."
    expert, local = published + "experts.{expert}.", own + "experts.local_experts.{expert}."
    rules = [Rule(own + "router.weight", whole(published + "gate.weight"), layers="moe")]
    if router_bias:
        name = whole(published + "gate.e_score_correction_bias")
        rules.append(Rule(own + "router.expert_bias", name, layers="moe"))
    fc1, fc2 = _gated(local, expert, "moe")
    both = tuple(Piece(published + "experts.gate_up_proj", part, 2, stacked=True) for part in range(2))
    down = (Piece(published + "experts.down_proj", stacked=True),)
    rules += [replace(fc1, stacked=both), replace(fc2, stacked=down)]
    if shared:
        rules += _gated(own + "shared_experts.", published + "shared_experts.", "moe")
    return tuple(rules)


# --------------------------------------------------------------------------------------------------
# Experts as DeepSeek-V3 chooses them, and GLM-4.5 after it: sigmoid scores, a bias for the choice only, groups.


def sigmoid_routing(config: Mapping[str, Any], shape: ModelShape) -> dict[str, Any]:
    """Fields of TransformerConfig. Raises `UnsupportedModel` if Megatron-core's router cannot compute it."""
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
