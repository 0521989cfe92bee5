"""Advantages, policy loss, KL, entropy and aggregation. Owner: `models/algorithms`."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

# Names that `--advantage-estimator` knows; an import path package.module:function is taken beside them.
ESTIMATORS: Final = (
    "grpo",
    "dr_grpo",
    "gspo",
    "cispo",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "ppo",
    "on_policy_distillation",
)
# Names that `--policy-loss` knows; an import path is taken beside them.
POLICY_LOSSES: Final = ("ppo", "gspo", "cispo", "dppo", "topr", "topr_sequence", "aipo", "m2po", "kimi")

LOSS_OF_ESTIMATOR: Final = {"gspo": "gspo", "cispo": "cispo"}  # what `auto` means; "ppo" for all others
GROUP_RELATIVE: Final = frozenset(
    ("grpo", "dr_grpo", "gspo", "cispo", "rloo", "reinforce_plus_plus_baseline")
)  # compare the rollouts of a prompt, hence need two
WHITENED: Final = frozenset(("reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"))
KL_IN_REWARD: Final = WHITENED  # estimators that read kl_coef
SAMPLER_LOSSES: Final = frozenset(("dppo", "topr", "topr_sequence", "aipo", "m2po"))  # their ratio is theta / mu


class AlgorithmConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    advantage_estimator: Annotated[
        str,
        Meta(
            description="how rewards become advantages: grpo, dr_grpo, gspo, cispo, rloo, reinforce_plus_plus, "
            "reinforce_plus_plus_baseline, ppo, on_policy_distillation, or package.module:function"
        ),
    ] = "grpo"
    policy_loss: Annotated[
        str,
        Meta(
            description="loss of a token: ppo, gspo, cispo, dppo, topr, topr_sequence, aipo, m2po, kimi, or "
            "package.module:function; auto = the one that belongs to the estimator"
        ),
    ] = "auto"
    disable_grpo_std_normalization: Annotated[
        bool, Meta(description="grpo without division by the group's standard deviation")
    ] = False
    disable_rewards_normalization: Annotated[
        bool, Meta(description="group estimators take the rewards as they are, without the group's mean")
    ] = False
    normalize_advantages: Annotated[
        bool | None,
        Meta(
            description="whiten advantages over the whole batch; default: on for reinforce_plus_plus, "
            "reinforce_plus_plus_baseline and ppo"
        ),
    ] = None
    gamma: Annotated[float, Meta(gt=0, le=1, description="discount per trainable token (ppo, reinforce_plus_plus)")] = (
        1.0
    )
    lambd: Annotated[float, Meta(ge=0, le=1, description="lambda of GAE (ppo)")] = 1.0
    bootstrap_truncated: Annotated[
        bool, Meta(description="GAE of a truncated response continues with the critic's last value instead of 0")
    ] = False
    eps_clip: Annotated[float, Meta(gt=0, description="PPO clip: ratio below 1 - eps_clip is clipped")] = 0.2
    eps_clip_high: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="PPO clip-higher: ratio above 1 + this is clipped; default: --eps-clip"),
    ] = None
    eps_clip_c: Annotated[
        Annotated[float, Meta(gt=1)] | None,
        Meta(description="dual clip: bound of the loss of tokens with negative advantage, as a multiple of it"),
    ] = None
    dppo_threshold: Annotated[
        float, Meta(gt=0, description="dppo: largest move of a token's probability away from the sampler's")
    ] = 0.15
    dppo_kl_coef: Annotated[
        float, Meta(ge=0, description="dppo: weight of the quadratic term (log theta - log mu)^2")
    ] = 1e-3
    aipo_clip: Annotated[float, Meta(gt=0, description="aipo: upper bound of the ratio theta / mu")] = 2.0
    m2po_threshold: Annotated[
        float, Meta(gt=0, description="m2po: bound of the mean squared log-ratio of the tokens that are kept")
    ] = 0.04
    kimi_tau: Annotated[float, Meta(ge=0, description="kimi: weight of the quadratic term (log theta - log old)^2")] = (
        0.1
    )
    custom_loss_function_path: Annotated[
        str | None,
        Meta(description="with --loss-type custom_loss: the loss over whole groups, package.module:function"),
    ] = None
    kl_coef: Annotated[
        float,
        Meta(
            ge=0, description="weight of the KL to the reference in the reward (ppo, reinforce_plus_plus, .._baseline)"
        ),
    ] = 0.0
    use_kl_loss: Annotated[bool, Meta(description="add a KL term to the reference policy to the loss")] = False
    kl_loss_coef: Annotated[float, Meta(ge=0, description="weight of the KL term")] = 0.0
    kl_loss_type: Annotated[Literal["k1", "k2", "k3", "low_var_kl"], Meta(description="KL estimator")] = "low_var_kl"
    use_unbiased_kl: Annotated[
        bool, Meta(description="multiply the KL term by the ratio of theta to the policy that sampled, with gradient")
    ] = False
    ref_update_interval: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="the reference becomes the current policy every this many rollout batches; default: never"),
    ] = None
    entropy_coef: Annotated[float, Meta(ge=0, description="weight of the entropy bonus")] = 0.0
    loss_aggregation: Annotated[
        Literal["rollout_mean", "token_mean", "seq_mean", "constant"],
        Meta(description="how token losses become one number, always with the step's global denominators"),
    ] = "rollout_mean"
