"""Corrections for stale tokens, sampling that the trainer can follow, and losses that mean something."""

from __future__ import annotations

from collections.abc import Iterator

from configs.schema import Config

__all__ = ["correction_faults", "loss_faults", "sampling_faults", "warnings"]


def correction_faults(config: Config) -> Iterator[str]:
    correction = config.correction
    mode, tis, bypass = correction.policy_mode, correction.use_tis, correction.use_rollout_logprobs
    if tis and bypass:
        yield (
            "--use-tis and --use-rollout-logprobs are both on, but the second already measures the PPO ratio against "
            "the engine's log-probs, and the correction would count twice; leave one of them out"
        )
    elif mode == "decoupled" and bypass:
        yield ("--policy-mode is decoupled, but --use-rollout-logprobs means bypass; leave one of them out")
    elif mode == "bypass" and not bypass:
        yield "--policy-mode is bypass, but --no-use-rollout-logprobs forbids it; leave one of them out"
    elif mode in ("bypass", "onpolicy") and tis:
        yield f"--policy-mode is {mode}, but --use-tis needs decoupled; leave --use-tis or --policy-mode out"
    elif mode == "onpolicy" and bypass:
        yield "--policy-mode is onpolicy, but --use-rollout-logprobs means bypass; leave one of them out"
    yield from _uncorrected(config)


def _uncorrected(config: Config) -> Iterator[str]:
    """Stale tokens need a correction: the invariant that this project does not negotiate."""
    gate, correction = config.asynchrony, config.correction
    stale = (gate.max_staleness or 0) > 0 or gate.update_weights_interval > 1
    corrected = correction.use_tis or correction.use_rollout_logprobs
    if not stale or corrected or config.train.loss_type == "sft_loss":
        return
    yield (
        f"max_staleness is {gate.max_staleness} and update_weights_interval {gate.update_weights_interval}, so that "
        "stale tokens are trained, but no correction is on; leave --no-use-tis and --policy-mode onpolicy out, add "
        "--use-rollout-logprobs (bypass), or choose --mode sync"
    )


def sampling_faults(config: Config) -> Iterator[str]:
    rollout, algorithm, correction = config.rollout, config.algorithm, config.correction
    if rollout.rollout_top_k == 0:
        yield "--rollout-top-k is 0, but would keep no token; set it to -1 (off) or to at least 1"
    corrected = correction.use_tis or correction.use_rollout_logprobs
    reason = (
        "the engine's log-probs would be of the tokens that remained and the trainer's of the whole vocabulary, so "
        "that their ratio is no importance weight"
    )
    if rollout.rollout_top_p < 1 and corrected:
        yield f"--rollout-top-p is {rollout.rollout_top_p:g} with TIS or bypass, but must be 1: {reason}; leave it out"
    if rollout.rollout_top_k > 0 and corrected:
        yield f"--rollout-top-k is {rollout.rollout_top_k} with TIS or bypass, but must be -1: {reason}; leave it out"
    if rollout.n_samples_per_prompt < 2 and config.train.loss_type == "policy_loss" and rollout.num_rollout != 0:
        yield (
            f"--n-samples-per-prompt is {rollout.n_samples_per_prompt}, but {algorithm.advantage_estimator} compares "
            "the rollouts of a group, and alone each advantage is 0; set it to at least 2"
        )


def loss_faults(config: Config) -> Iterator[str]:
    algorithm, correction, train = config.algorithm, config.correction, config.train
    if algorithm.use_kl_loss and algorithm.kl_loss_coef == 0:
        yield (
            "--kl-loss-coef is 0, but --use-kl-loss pays for a reference forward pass; set --kl-loss-coef above 0, for "
            "example 0.001, or leave --use-kl-loss out"
        )
    if algorithm.kl_loss_coef > 0 and not algorithm.use_kl_loss:
        yield (
            f"--kl-loss-coef is {algorithm.kl_loss_coef:g}, but does nothing without --use-kl-loss; add "
            "--use-kl-loss, or leave --kl-loss-coef out"
        )
    if correction.tis_clip_low > correction.tis_clip:
        yield (
            f"--tis-clip-low is {correction.tis_clip_low:g}, but must not be above --tis-clip {correction.tis_clip:g}; "
            "lower it, for example to 0"
        )
    if train.min_lr > train.lr:
        yield f"--min-lr is {train.min_lr:g}, but must not be above --lr {train.lr:g}; lower it, for example to 0"


def warnings(config: Config) -> Iterator[str]:
    algorithm, correction, rollout = config.algorithm, config.correction, config.rollout
    if algorithm.use_kl_loss and algorithm.kl_loss_type == "k1":
        yield "--kl-loss-type k1 has no gradient on-policy as a loss (its expected gradient is 0); use low_var_kl or k2"
    if not algorithm.use_kl_loss and config.train.ref_load not in (None, config.train.hf_checkpoint):
        yield "--ref-load is given but never used; add --use-kl-loss and --kl-loss-coef"
    if algorithm.disable_grpo_std_normalization and algorithm.advantage_estimator != "grpo":
        yield (
            "--disable-grpo-std-normalization has no effect with --advantage-estimator "
            f"{algorithm.advantage_estimator}, which never divides by the standard deviation"
        )
    if algorithm.eps_clip >= 1:
        yield f"--eps-clip {algorithm.eps_clip:g} clips no ratio from below, for 1 - eps_clip is not above 0"
    if not correction.use_tis and (correction.tis_clip != 2.0 or correction.tis_clip_low != 0.0):
        yield "--tis-clip and --tis-clip-low have no effect without --use-tis"
    uncorrected = not (correction.use_tis or correction.use_rollout_logprobs)
    if uncorrected and (rollout.rollout_top_p < 1 or rollout.rollout_top_k > 0):
        yield (
            "--rollout-top-p or --rollout-top-k is on: the trainer's log-probs are of the whole vocabulary, so that "
            "the policy that is trained is not quite the one that samples"
        )
    if rollout.rollout_top_k == 1:
        yield "--rollout-top-k 1 makes all rollouts of a prompt equal: every advantage is 0"
