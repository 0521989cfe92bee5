"""What is done about tokens that another policy sampled. Three policies: mu (sampler), old (centre of the trust
region), theta (current).

Owner: `models/algorithms`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct


class CorrectionConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    policy_mode: Annotated[
        Literal["auto", "decoupled", "bypass", "onpolicy"],
        Meta(
            description="old log-probs of the PPO ratio: decoupled = the trainer's own, weighted by TIS; bypass = the "
            "engine's; onpolicy = no correction (max staleness 0 only); auto = decoupled if TIS or a "
            "rejection rule is on, bypass with --use-rollout-logprobs, else onpolicy"
        ),
    ] = "auto"
    use_rollout_logprobs: Annotated[
        bool, Meta(description="bypass mode: the PPO ratio is against the engine's log-probs")
    ] = False
    use_tis: Annotated[
        bool | None,
        Meta(description="importance weights against the engine's log-probs; default: on if staleness > 0"),
    ] = None
    tis_level: Annotated[
        Literal["token", "sequence", "geometric"],
        Meta(description="importance weight of the token, product over the response, or its geometric mean"),
    ] = "token"
    tis_mode: Annotated[
        Literal["clip", "icepop", "seq_mask"],
        Meta(
            description="weights outside the bounds: clip = moved to the bound (TIS), icepop = set to 0, seq_mask = "
            "clip, and responses whose geometric mean lies outside tis_seq_low .. tis_seq_high set to 0"
        ),
    ] = "clip"
    tis_clip: Annotated[float, Meta(gt=0, description="upper bound of the importance weight")] = 2.0
    tis_clip_low: Annotated[float, Meta(ge=0, description="lower bound of the importance weight")] = 0.0
    tis_seq_low: Annotated[float, Meta(ge=0, description="seq_mask: lower bound of the geometric mean")] = 0.95
    tis_seq_high: Annotated[float, Meta(gt=0, description="seq_mask: upper bound of the geometric mean")] = 1.05
    tis_clip_decay: Annotated[
        float,
        Meta(gt=0, le=1, description="version-aware bound: a token s versions old has 1 + (tis_clip - 1) * decay^s"),
    ] = 1.0
    tis_batch_normalize: Annotated[bool, Meta(description="divide the weights by their mean over the whole step")] = (
        False
    )
    correction_ratio: Annotated[
        Literal["old", "current"], Meta(description="weights are of old / mu, or of current theta / mu")
    ] = "old"
    custom_tis_function_path: Annotated[
        str | None, Meta(description="import path of the importance weights, package.module:function")
    ] = None
    rollout_rs: Annotated[
        tuple[str, ...],
        Meta(
            description="rejection rules RULE=BOUND or RULE=LOW_HIGH; RULE is {token,seq_sum,seq_mean,seq_max}_"
            "{k1,k2,k3}, e.g. seq_mean_k1=0.99_1.01 token_k3=0.05"
        ),
    ] = ()
    rs_veto: Annotated[
        Annotated[float, Meta(gt=0, lt=1)] | None,
        Meta(description="reject a response with a token whose old / mu is below this, e.g. 1e-4; default: off"),
    ] = None
    rs_unit: Annotated[
        Literal["sample", "rollout"],
        Meta(
            description="what a sequence rule tests and removes, if a rollout fanned out: each row, or all rows pooled"
        ),
    ] = "sample"
    renormalize_after_rejection: Annotated[
        bool, Meta(description="divide by the tokens that are left; the survivors then weigh more")
    ] = False
    prox: Annotated[
        Literal["recompute", "loglinear"],
        Meta(
            description="old log-probs in decoupled mode: a forward pass, or interpolated between mu and theta (A-3PO)"
        ),
    ] = "recompute"
    prox_alpha: Annotated[
        Literal["next_version", "areal"],
        Meta(description="weight of theta in the interpolation, s versions old: s/(s+1), or AReaL's (s-1)/s"),
    ] = "next_version"
    use_opsm: Annotated[
        bool, Meta(description="off-policy sequence masking: drop negative responses that drifted from the sampler")
    ] = False
    opsm_delta: Annotated[float, Meta(gt=0, description="opsm: bound of the mean of log mu - log theta")] = 1e-4
    mask_offpolicy_in_partial_rollout: Annotated[
        bool, Meta(description="train only the tokens of the newest version of a response that spans several")
    ] = False
    staleness_lr_decay: Annotated[
        float, Meta(ge=0, description="learning rate divided by 1 + this * mean staleness of the step; 0 = off")
    ] = 0.0
    ess_warn: Annotated[
        float, Meta(ge=0, le=1, description="warn when the effective sample size falls below this share; 0 = never")
    ] = 0.5
    allow_uncorrected: Annotated[
        bool, Meta(description="train stale tokens without any correction, e.g. as the baseline of a comparison")
    ] = False
