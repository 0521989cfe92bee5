"""Held-out evaluation at a known weights version. Owner: `stages/evaluate/stage`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct


class EvalConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    eval_interval: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="evaluate every this many versions; default: off"),
    ] = None
    eval_prompt_data: Annotated[
        tuple[str, ...], Meta(description="held-out prompts: name=path[@[a:b]] or path[@[a:b]]; several allowed")
    ] = ()
    n_samples_per_eval_prompt: Annotated[int, Meta(ge=1, description="rollouts per held-out prompt")] = 1
    eval_temperature: Annotated[float, Meta(ge=0, description="sampling temperature of evaluation; 0 = greedy")] = 0.0
    eval_max_response_len: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="default: --rollout-max-response-len"),
    ] = None
    eval_input_key: Annotated[str | None, Meta(description="default: --input-key")] = None
    eval_label_key: Annotated[str | None, Meta(description="default: --label-key")] = None
    eval_deadline_s: Annotated[float, Meta(gt=0, description="give up on an evaluation after this many seconds")] = (
        300.0
    )
    skip_eval_before_train: Annotated[bool, Meta(description="no evaluation of the first weights")] = False
