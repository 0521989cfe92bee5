"""The critic of PPO: a value head on a model of its own. Owner: `models/train`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct


class CriticConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    critic_load: Annotated[
        str | None, Meta(description="Hugging Face checkpoint of the critic's backbone; default: --hf-checkpoint")
    ] = None
    critic_lr: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(description="learning rate of the critic; default: ten times --lr, at most 3e-4"),
    ] = None
    critic_lr_warmup_iters: Annotated[int, Meta(ge=0, description="optimizer steps of the critic's linear warm-up")] = 0
    num_critic_only_steps: Annotated[
        int, Meta(ge=0, description="rollout batches at the start in which only the critic is trained")
    ] = 0
    value_clip: Annotated[
        float, Meta(gt=0, description="a value may move this far from that of the batch's start within the loss")
    ] = 0.2
