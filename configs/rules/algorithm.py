"""Estimators, losses and KL: names that exist, and choices that fit together."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from configs.schema import AlgorithmConfig, Config
from configs.schema.algorithm import ESTIMATORS, GROUP_RELATIVE, KL_IN_REWARD, POLICY_LOSSES
from configs.schema.notation import cure

IMPORT_PATH: Final = re.compile(r"(?:[A-Za-z_][\w.]*|[\w./~-]+\.py):[A-Za-z_]\w*")
BUFFER_ORDERS: Final = ("oldest_first", "ready_first", "priority")
_CLIPPED_LOSSES: Final = frozenset(("ppo", "gspo", "cispo", "clip_cov"))  # read eps_clip


def name_faults(config: Config) -> Iterator[str]:
    """What is chosen by a name or an import path."""
    algorithm = config.algorithm
    for label, name, known in (
        ("--advantage-estimator", algorithm.advantage_estimator, ESTIMATORS),
        ("--policy-loss", algorithm.policy_loss, ("auto", *POLICY_LOSSES)),
        ("--buffer-order", config.asynchrony.buffer_order, BUFFER_ORDERS),
    ):
        if name not in known and not IMPORT_PATH.fullmatch(name):
            hint = cure(name, known)
            yield f"{label} is {name!r}, which is neither known nor an import path package.module:function; {hint}"


def estimator_faults(config: Config) -> Iterator[str]:
    """What the rollouts must be like for the estimator to say anything."""
    algorithm, rollout = config.algorithm, config.rollout
    estimator = algorithm.advantage_estimator
    if config.train.loss_type == "sft_loss":
        return
    if rollout.n_samples_per_prompt < 2 and rollout.num_rollout != 0:
        if estimator in GROUP_RELATIVE and not algorithm.disable_rewards_normalization:
            yield (
                f"--n-samples-per-prompt is {rollout.n_samples_per_prompt}, but {estimator} compares "
                "the rollouts of a group, and alone each advantage is 0; set it to at least 2"
            )
        elif "nonzero_std" in config.filter.dynamic_sampling_filter:
            yield (
                f"--n-samples-per-prompt is {rollout.n_samples_per_prompt}, and --dynamic-sampling-filter nonzero_std "
                "drops every group of one, so that nothing is ever trained; leave the filter out"
            )
    if algorithm.disable_rewards_normalization and estimator in ("dr_grpo", "rloo", "reinforce_plus_plus_baseline"):
        yield (
            f"--disable-rewards-normalization with --advantage-estimator {estimator}: the group's baseline is all that "
            "this estimator is; choose reinforce_plus_plus or grpo for rewards as they are, or leave it out"
        )
    if estimator == "gdpo" and len(config.reward.reward_component) < 2:
        yield (
            f"--reward-component is given {len(config.reward.reward_component)} times, but --advantage-estimator gdpo "
            "normalises the components of a reward one by one; give two or more, or choose grpo"
        )
    if estimator == "on_policy_distillation" and not config.distill.use_opd:
        yield (
            "--advantage-estimator on_policy_distillation has no reward term, so that without --use-opd every "
            "advantage is 0; add --use-opd and a teacher with --frozen-engine teacher=PATH"
        )
    if estimator == "on_policy_distillation" and "nonzero_std" in config.filter.dynamic_sampling_filter:
        yield (
            "--dynamic-sampling-filter nonzero_std with --advantage-estimator on_policy_distillation drops groups for "
            "their rewards, which this estimator never reads; leave the filter out"
        )


def kl_faults(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.use_kl_loss and algorithm.kl_loss_coef == 0:
        yield (
            "--kl-loss-coef is 0, but --use-kl-loss pays for a reference forward pass; set --kl-loss-coef above 0, for "
            "example 0.001, or leave --use-kl-loss out"
        )
    if algorithm.kl_coef > 0 and algorithm.advantage_estimator not in KL_IN_REWARD:
        yield (
            f"--kl-coef is {algorithm.kl_coef:g}, but --advantage-estimator {algorithm.advantage_estimator} has no "
            f"reward per token to take it from; use --use-kl-loss --kl-loss-coef {algorithm.kl_coef:g}, or choose one "
            f"of {', '.join(sorted(KL_IN_REWARD))}"
        )
    if algorithm.kl_coef > 0 and algorithm.use_kl_loss:
        yield (
            f"--kl-coef {algorithm.kl_coef:g} and --use-kl-loss both hold the policy near the reference, once in the "
            "reward and once in the loss; leave one of them out"
        )


def loss_faults(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if config.train.loss_type == "custom_loss":
        if algorithm.custom_loss_function_path is None:
            yield (
                "--loss-type is custom_loss, but there is no loss; give --custom-loss-function-path, for example "
                "my_project.losses:preference"
            )
        for label, used in (
            ("--use-opd", config.distill.use_opd),
            ("--kl-coef", algorithm.kl_coef > 0),
            ("--advantage-estimator ppo", algorithm.advantage_estimator == "ppo"),
            (f"--policy-loss {algorithm.policy_loss}", algorithm.policy_loss not in ("auto", "ppo")),
        ):
            if used:
                yield f"{label} with --loss-type custom_loss: a loss of your own does not read it; leave it out"
    if algorithm.policy_loss in ("ppo", "gspo", "clip_cov") and algorithm.eps_clip >= 1:
        yield (
            f"--eps-clip is {algorithm.eps_clip:g}, but the ratio's lower bound 1 - eps_clip must stay above 0; set it "
            "below 1 (only cispo takes 1 or more, as 'no lower bound')"
        )


def algorithm_warnings(config: Config) -> Iterator[str]:
    if config.train.loss_type == "sft_loss":
        return
    algorithm = config.algorithm
    estimator = algorithm.advantage_estimator
    if algorithm.use_kl_loss and algorithm.kl_loss_type == "k1":
        yield "--kl-loss-type k1 has no gradient on-policy as a loss (its expected gradient is 0); use low_var_kl or k2"
    reference = algorithm.use_kl_loss or algorithm.kl_coef > 0
    if not reference and config.train.ref_load not in (None, config.train.hf_checkpoint):
        yield "--ref-load is given but never used; add --use-kl-loss and --kl-loss-coef, or --kl-coef"
    if algorithm.disable_grpo_std_normalization and estimator not in ("grpo", "gspo", "cispo"):
        yield (
            "--disable-grpo-std-normalization has no effect with --advantage-estimator "
            f"{estimator}, which never divides by the standard deviation"
        )
    if algorithm.normalize_advantages is False and estimator == "reinforce_plus_plus":
        yield "--no-normalize-advantages with reinforce_plus_plus leaves it without any baseline"
    if estimator == "dr_grpo" and algorithm.loss_aggregation != "constant":
        yield (
            f"--loss-aggregation {algorithm.loss_aggregation} with dr_grpo brings back the length bias that it "
            "removes; its own form is --loss-aggregation constant"
        )
    yield from _clip_warnings(algorithm)


def _clip_warnings(algorithm: AlgorithmConfig) -> Iterator[str]:
    loss = algorithm.policy_loss
    if loss == "cispo" and algorithm.eps_clip < 1:
        yield (
            f"--eps-clip {algorithm.eps_clip:g} bounds cispo's weight from below; its canonical form has no lower "
            "bound: set --eps-clip 1"
        )
    if loss == "gspo" and algorithm.eps_clip > 0.05:
        yield (
            f"--eps-clip {algorithm.eps_clip:g} is wide for gspo, whose ratio is a mean over the response; the paper "
            "has 3e-4 (and --eps-clip-high 4e-4)"
        )
    high = algorithm.eps_clip_high or algorithm.eps_clip
    if loss in ("ppo", "gspo") and high < algorithm.eps_clip:
        yield (
            f"--eps-clip-high {high:g} is below --eps-clip {algorithm.eps_clip:g}: ratios are held tighter above than "
            "below, the reverse of clip-higher"
        )
    if loss not in _CLIPPED_LOSSES and ":" not in loss and (algorithm.eps_clip, high) != (0.2, 0.2):
        yield f"--eps-clip and --eps-clip-high have no effect with --policy-loss {loss}, which does not clip a ratio"
