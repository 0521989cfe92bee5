"""The correction of stale tokens: importance weights, rejection, masks, and the sampling that they can follow.

Invariant: tokens of an older policy are corrected exactly once, or accepted with `--allow-uncorrected`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from configs.schema import Config, CorrectionConfig
from configs.schema.algorithm import SAMPLER_LOSSES
from configs.schema.rejection_rules import InvalidRule, parse_rule

# Losses of --prox loglinear, which read the old log-probs token by token; and of --use-opsm.
_LOGLINEAR_LOSSES: Final = ("cispo", "kimi", "ppo", "sapo")
_OPSM_LOSSES: Final = ("cispo", "clip_cov", "gspo", "kimi", "kl_cov", "ppo", "sapo")
_WEIGHT_OPTIONS: Final = (
    "tis_level", "tis_mode", "tis_clip", "tis_clip_low", "tis_seq_low", "tis_seq_high", "tis_clip_decay",
    "tis_batch_normalize", "correction_ratio", "custom_tis_function_path",
)  # fmt: skip


def _rejects(correction: CorrectionConfig) -> bool:
    """Whether a rejection rule is on."""
    return bool(correction.rollout_rs) or correction.rs_veto is not None


def _corrected(correction: CorrectionConfig) -> bool:
    return bool(correction.use_tis) or correction.use_rollout_logprobs or _rejects(correction)


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
    elif mode == "onpolicy" and _rejects(correction):
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
    if config.correction.use_tis:
        yield (
            "--use-tis with --loss-type custom_loss: a loss of your own is not weighted; leave --use-tis out and "
            "correct inside the loss"
        )
    if _rejects(config.correction) or config.correction.use_opsm:
        yield (
            "--rollout-rs, --rs-veto and --use-opsm act on a policy loss, not on --loss-type custom_loss; leave them "
            "out"
        )
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
    if correction.tis_batch_normalize and correction.tis_level == "geometric":
        yield (
            "--tis-batch-normalize with --tis-level geometric: a geometric mean is no importance weight whose mean "
            "should be 1; leave one of them out"
        )


def rejection_faults(config: Config) -> Iterator[str]:
    correction = config.correction
    for text in correction.rollout_rs:
        try:
            parse_rule(text)
        except InvalidRule as error:
            yield str(error)
    names = [text.partition("=")[0] for text in correction.rollout_rs]
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            yield f"--rollout-rs has {name} {names.count(name)} times, but one bound must hold; leave the others out"


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


def correction_warnings(config: Config) -> Iterator[str]:
    correction, rollout = config.correction, config.rollout
    if config.train.loss_type == "sft_loss":
        return
    if not correction.use_tis:
        changed = [name for name in _WEIGHT_OPTIONS if getattr(correction, name) != getattr(CorrectionConfig(), name)]
        if changed:
            yield f"{', '.join('--' + name.replace('_', '-') for name in changed)} have no effect without --use-tis"
    uncorrected = not (correction.use_tis or correction.use_rollout_logprobs)
    if uncorrected and _stale(config) and _rejects(correction):
        yield "rejection without --use-tis drops drifted tokens but does not reweight the others; their bias stays"
    if uncorrected and _stale(config) and correction.allow_uncorrected and not _rejects(correction):
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
