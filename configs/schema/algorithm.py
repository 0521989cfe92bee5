"""Advantages, losses and corrections. Owner: `models/algorithms`."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct


class AlgorithmConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    advantage_estimator: Annotated[
        Literal["grpo", "dr_grpo", "rloo"], Meta(description="how rewards of a group become advantages")
    ] = "grpo"
    disable_grpo_std_normalization: Annotated[
        bool, Meta(description="grpo without division by the group's standard deviation")
    ] = False
    eps_clip: Annotated[float, Meta(gt=0, description="PPO clip: ratio below 1 - eps_clip is clipped")] = 0.2
    eps_clip_high: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="PPO clip-higher: ratio above 1 + this is clipped; default: --eps-clip"),
    ] = None
    policy_mode: Annotated[
        Literal["auto", "decoupled", "bypass", "onpolicy"],
        Meta(
            description="anchor of the PPO ratio: decoupled = trainer's old log-probs, weighted by TIS; bypass = the "
            "engine's log-probs; onpolicy = no correction (max staleness 0 only); auto = decoupled if TIS is on, "
            "bypass with --use-rollout-logprobs, else onpolicy"
        ),
    ] = "auto"
    use_rollout_logprobs: Annotated[
        bool, Meta(description="bypass mode: the PPO ratio is against the engine's log-probs")
    ] = False
    use_tis: Annotated[
        bool | None,
        Meta(description="truncated importance sampling against the engine's log-probs; default: on if staleness > 0"),
    ] = None
    tis_clip: Annotated[float, Meta(gt=0, description="upper bound of the TIS weight")] = 2.0
    tis_clip_low: Annotated[float, Meta(ge=0, description="lower bound of the TIS weight")] = 0.0
    use_kl_loss: Annotated[bool, Meta(description="add a KL term to the reference policy to the loss")] = False
    kl_loss_coef: Annotated[float, Meta(ge=0, description="weight of the KL term")] = 0.0
    kl_loss_type: Annotated[Literal["k1", "k2", "k3", "low_var_kl"], Meta(description="KL estimator")] = "low_var_kl"
    entropy_coef: Annotated[float, Meta(ge=0, description="weight of the entropy bonus")] = 0.0
    loss_aggregation: Annotated[
        Literal["rollout_mean", "token_mean", "seq_mean", "constant"],
        Meta(description="how token losses become one number, always with the step's global denominators"),
    ] = "rollout_mean"
