"""What is known of a model once its `config.json` is read: enough to build it and to name its weights."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from models.families.hugging_face_names import Rule, Weight, expand
from models.families.rope import Rope


@dataclass(frozen=True)
class Architecture:
    """One model.

    `transformer`: fields of Megatron-core's TransformerConfig (MLATransformerConfig if `latent_attention`), by name.
    `left_out`: regular expressions of names in checkpoints that are not part of the model here, with the reason to warn
    with ("": none is needed); a name that neither a rule nor one of these knows is refused.
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
    latent_norm_eps: float | None = None  # of the norms inside MLA, if not that of the others
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

    @property
    def _derived(self) -> dict[str, str]:
        """Tensors that old checkpoints store although others determine them."""
        return {r".*\.rotary_emb\.inv_freq": ""} | ({r"lm_head\.weight": ""} if self.tied else {})

    def names_left_out(self, names: Iterable[str]) -> dict[str, list[str]]:
        """By reason, those of `names` that checkpoints may have without the model here having them."""
        found: dict[str, list[str]] = {}
        for name in sorted(names):
            for pattern, reason in {**self.left_out, **self._derived}.items():
                if re.fullmatch(pattern, name):
                    found.setdefault(reason, []).append(name)
                    break
        return found
