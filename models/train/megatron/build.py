"""One chunk of a model for Megatron-core: its embedding, layers and head, as far as this process has them.

Weights are not set: `weights.load_hf` reads them, or a distributed checkpoint is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel

from models.families.decoder import Architecture
from models.families.hugging_face_names import padded_vocab
from models.families.registry import architecture_of
from models.train.megatron.layers import PositionRotary, layer_submodules
from models.train.megatron.settings.config import transformer_config, uses_transformer_engine
from models.train.spec import TrainSpec


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
        _keep_router_bias(model)
    return model


def _keep_router_bias(model: torch.nn.Module) -> None:
    """In fp32: it decides between experts, and is compared in fp32."""
    for module in model.modules():
        if hasattr(module, "_maintain_float32_expert_bias"):
            module._maintain_float32_expert_bias()
