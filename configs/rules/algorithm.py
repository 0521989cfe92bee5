"""Estimators, losses, KL and the correction of stale tokens: names that exist, and choices that fit together.

Invariant: tokens of an older policy are corrected exactly once, or accepted with `--allow-uncorrected`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from configs.schema import AlgorithmConfig, Config, CorrectionConfig
from configs.schema.algorithm import ESTIMATORS, GROUP_RELATIVE, KL_IN_REWARD, POLICY_LOSSES, SAMPLER_LOSSES
from configs.schema.notation import cure, repeated
from configs.schema.rejection_rules import InvalidRule, parse_rule

IMPORT_PATH: Final = re.compile(r"(?:[A-Za-z_][\w.]*|[\w./~-]+\.py):[A-Za-z_]\w*")
BUFFER_ORDERS: Final = ("oldest_first", "ready_first", "priority")
_CLIPPED_LOSSES: Final = frozenset(("ppo", "gspo", "cispo", "clip_cov"))  # read eps_clip
# Losses of --prox loglinear, which read the old log-probs token by token; and of --use-opsm.
_LOGLINEAR_LOSSES: Final = ("cispo", "kimi", "ppo", "sapo")
_OPSM_LOSSES: Final = ("cispo", "clip_cov", "gspo", "kimi", "kl_cov", "ppo", "sapo")
_WEIGHT_OPTIONS: Final = (
    "tis_level", "tis_mode", "tis_clip", "tis_clip_low", "tis_seq_low", "tis_seq_high", "tis_clip_decay",
    "tis_batch_normalize", "correction_ratio", "custom_tis_function_path",
)  # fmt: skip


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
    yield from _correction_warnings(config)


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


def _corrected(correction: CorrectionConfig) -> bool:
    return bool(correction.use_tis) or correction.use_rollout_logprobs or correction.rejects


def correction_faults(config: Config) -> Iterator[str]:
    """Which policy the ratio is to, and that the sampler is corrected for exactly once."""
    if config.train.loss_type == "sft_loss":
        return
    if config.train.loss_type == "custom_loss":
        yield from _custom_loss(config)
        return
    correction, loss = config.correction, config.algorithm.policy_loss
    mode, tis, bypass = correction.policy_mode, correction.use_tis, correction.use_rollout_logprobs
    if loss in SAMPLER_LOSSES:
        if tis:
            yield (
                f"--use-tis with --policy-loss {loss}: its ratio is already of the current policy to the sampler, and "
                "the correction would count twice; leave --use-tis out"
            )
        elif mode != "bypass":
            yield f"--policy-mode is {mode}, but --policy-loss {loss} measures its ratio to the sampler; leave it out"
    elif tis and bypass:
        yield (
            "--use-tis and --use-rollout-logprobs are both on, but the second already measures the PPO ratio against "
            "the engine's log-probs, and the correction would count twice; leave one of them out"
        )
    elif mode != "bypass" and bypass:
        yield f"--policy-mode is {mode}, but --use-rollout-logprobs means bypass; leave one of them out"
    elif mode == "bypass" and not bypass:
        yield "--policy-mode is bypass, but --no-use-rollout-logprobs forbids it; leave one of them out"
    elif mode in ("bypass", "onpolicy") and tis:
        yield f"--policy-mode is {mode}, but --use-tis needs decoupled; leave --use-tis or --policy-mode out"
    elif mode == "onpolicy" and correction.rejects:
        yield (
            "--policy-mode is onpolicy, but --rollout-rs and --rs-veto compare the old log-probs with the sampler's, "
            "which needs decoupled; leave --policy-mode or the rules out"
        )
    if _stale(config) and not (_corrected(correction) or correction.allow_uncorrected):
        gate = config.asynchrony  # stale tokens need a correction: this project does not negotiate that invariant
        yield (
            f"max_staleness is {gate.max_staleness} and update_weights_interval {gate.update_weights_interval}, so "
            "that stale tokens are trained, but no correction is on; leave --no-use-tis and --policy-mode onpolicy "
            "out, add --use-rollout-logprobs (bypass), choose --mode sync, or accept it with --allow-uncorrected"
        )
    yield from _old_policy_faults(config)


def _stale(config: Config) -> bool:
    return (config.asynchrony.max_staleness or 0) > 0 or config.asynchrony.update_weights_interval > 1


def _custom_loss(config: Config) -> Iterator[str]:
    if _stale(config) and not config.correction.allow_uncorrected:
        yield (
            f"--loss-type custom_loss with max_staleness {config.asynchrony.max_staleness}: whether your loss corrects "
            "stale tokens cannot be seen from here; choose --mode sync, or say so with --allow-uncorrected"
        )


def _old_policy_faults(config: Config) -> Iterator[str]:
    correction, loss = config.correction, config.algorithm.policy_loss
    if correction.prox == "loglinear":
        if correction.policy_mode != "decoupled":
            yield (
                f"--prox loglinear interpolates the old log-probs of decoupled mode, but the mode is "
                f"{correction.policy_mode}; add --use-tis, or leave --prox out"
            )
        elif loss not in _LOGLINEAR_LOSSES:
            yield (
                f"--prox loglinear with --policy-loss {loss}: the old policy differs from token to token by its age, "
                f"and a ratio of whole responses to it has no meaning; choose one of {', '.join(_LOGLINEAR_LOSSES)}"
            )
        elif correction.correction_ratio == "current":
            yield (
                "--correction-ratio current with --prox loglinear counts the step from the old to the current "
                "policy twice; leave one of them out"
            )
    if correction.use_opsm and loss not in _OPSM_LOSSES:
        yield (
            f"--use-opsm with --policy-loss {loss}: it masks whole responses of a clipped ratio loss; choose one of "
            f"{', '.join(_OPSM_LOSSES)}, or leave --use-opsm out"
        )


def weight_faults(config: Config) -> Iterator[str]:
    """Kinds of the importance weight."""
    correction = config.correction
    for label, used in (
        (f"--tis-mode {correction.tis_mode}", correction.tis_mode != "clip"),
        (f"--tis-clip-decay {correction.tis_clip_decay:g}", correction.tis_clip_decay != 1),
    ):
        if used and correction.tis_level != "token":
            yield (
                f"{label} with --tis-level {correction.tis_level}: it is defined for the weight of a single token; "
                "set --tis-level token"
            )


def rejection_faults(config: Config) -> Iterator[str]:
    correction = config.correction
    for text in correction.rollout_rs:
        try:
            parse_rule(text)
        except InvalidRule as error:
            yield str(error)
    for name, count in repeated(text.partition("=")[0] for text in correction.rollout_rs):
        yield f"--rollout-rs has {name} {count} times, but one bound must hold; leave the others out"


def sampling_faults(config: Config) -> Iterator[str]:
    rollout, correction = config.rollout, config.correction
    for label, kept in (("--rollout-top-k", rollout.rollout_top_k), ("--eval-top-k", config.eval.eval_top_k)):
        if kept == 0:
            yield f"{label} is 0, but would keep no token; set it to -1 (off) or to at least 1"
    if config.train.loss_type == "sft_loss" or not (_corrected(correction) or correction.use_opsm):
        return
    for label, value, off, on in (
        ("--rollout-top-p", rollout.rollout_top_p, 1, rollout.rollout_top_p < 1),
        ("--rollout-top-k", rollout.rollout_top_k, -1, rollout.rollout_top_k > 0),
    ):
        if on:
            yield (
                f"{label} is {value:g} with TIS or bypass, but must be {off}: the engine's log-probs would be of the "
                "tokens that remained and the trainer's of the whole vocabulary, so their ratio is no importance "
                "weight; leave it out"
            )


def _correction_warnings(config: Config) -> Iterator[str]:
    correction, rollout = config.correction, config.rollout
    if not correction.use_tis:
        changed = [name for name in _WEIGHT_OPTIONS if getattr(correction, name) != getattr(CorrectionConfig(), name)]
        if changed:
            yield f"{', '.join('--' + name.replace('_', '-') for name in changed)} have no effect without --use-tis"
    uncorrected = not (correction.use_tis or correction.use_rollout_logprobs)
    if uncorrected and _stale(config) and correction.rejects:
        yield "rejection without --use-tis drops drifted tokens but does not reweight the others; their bias stays"
    if uncorrected and _stale(config) and correction.allow_uncorrected and not correction.rejects:
        yield "--allow-uncorrected: stale tokens are trained as if the current policy had sampled them"
    if uncorrected and (rollout.rollout_top_p < 1 or rollout.rollout_top_k > 0):
        yield (
            "--rollout-top-p or --rollout-top-k is on: the trainer's log-probs are of the whole vocabulary, so that "
            "the policy that is trained is not quite the one that samples"
        )
    if rollout.rollout_top_k == 1:
        yield "--rollout-top-k 1 makes all rollouts of a prompt equal: every advantage is 0"
    steps = config.train.num_steps_per_rollout or 1
    if correction.correction_ratio == "current" and steps > 1:
        yield (
            f"--correction-ratio current with {steps} optimizer steps per batch: from the second step on, weight and "
            "ratio both hold the change since the batch's start"
        )
