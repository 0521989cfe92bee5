"""Modules on top of Transformer Engine. Imported only where that is installed and chosen; not run without a GPU."""

from __future__ import annotations

from typing import Any

from megatron.core.extensions.transformer_engine import TEDotProductAttention, TENorm
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from models.train.megatron.inputs import LATENT_EPS


class MaskedEngineAttention(TEDotProductAttention):  # type: ignore[misc]
    """Honours `attention_mask` (bool [b, 1, s, s], True = masked), which causal attention of the engine passes over.

    Without a mask: causal, with FlashAttention or cuDNN; with `packed_seq_params`: causal within each sequence.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType,
        **rest: Any,
    ) -> Any:
        if attention_mask is not None and rest.get("packed_seq_params") is None:
            attn_mask_type = AttnMaskType.arbitrary
        return super().forward(query, key, value, attention_mask, attn_mask_type, **rest)


class LatentEngineNorm:
    """A norm of the engine with the eps of DeepSeek's latent attention."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = LATENT_EPS) -> Any:
        return TENorm(config=config, hidden_size=hidden_size, eps=LATENT_EPS)
