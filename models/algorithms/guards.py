"""Combinations of options that would train something other than what they say: refused before the run starts.

Invariants: no torch here; `check` and `warn` are pure; every sentence names the key, the value, the rule and the cure.
"""

from __future__ import annotations

from configs.schema.algorithm import AlgorithmConfig
from models.algorithms.advantages import GROUP_RELATIVE
from models.algorithms.modes import Correction, resolve_correction


def check(
    config: AlgorithmConfig,
    max_staleness: int,
    *,
    update_weights_interval: int = 1,
    n_samples_per_prompt: int | None = None,
    rollout_top_p: float = 1.0,
    rollout_top_k: int = -1,
    loss_type: str = "policy_loss",
) -> list[str]:
    """Faults of the configuration, each in one sentence; an empty list means that it may run.

    `max_staleness`: bound in weights updates; `update_weights_interval`: batches between publications.
    """
    if loss_type == "sft_loss":
        return []  # no ratio, no group, no reference: only token log-probs are trained
    correction = resolve_correction(config, max_staleness=max(max_staleness, update_weights_interval - 1))
    faults = _mode_faults(config, correction, max_staleness, update_weights_interval)
    faults += _kl_faults(config)
    if config.tis_clip_low > config.tis_clip:
        faults.append(
            f"tis_clip_low={config.tis_clip_low} is above tis_clip={config.tis_clip}: no weight lies between them; "
            "set --tis-clip-low below --tis-clip"
        )
    if config.eps_clip >= 1.0:
        faults.append(
            f"eps_clip={config.eps_clip}: the lower bound 1 - eps_clip of the ratio must stay above 0; "
            "set --eps-clip below 1"
        )
    if n_samples_per_prompt is not None and n_samples_per_prompt < 2 and config.advantage_estimator in GROUP_RELATIVE:
        faults.append(
            f"n_samples_per_prompt={n_samples_per_prompt} with advantage_estimator={config.advantage_estimator}: "
            "a group of one has advantage 0 and trains nothing; set --n-samples-per-prompt to 2 or more"
        )
    if (rollout_top_p != 1.0 or rollout_top_k > 0) and correction.is_off_policy_safe:
        faults.append(
            f"rollout_top_p={rollout_top_p}, rollout_top_k={rollout_top_k} with importance ratios against the engine: "
            "the engine's log-probs would cover fewer tokens than the trainer's, which biases every ratio; "
            "set --rollout-top-p 1 --rollout-top-k -1"
        )
    return faults


def warn(config: AlgorithmConfig, *, loss_type: str = "policy_loss") -> list[str]:
    """Choices that run but rarely do what is expected, each in one sentence."""
    if loss_type == "sft_loss":
        return []
    warnings = []
    if config.use_kl_loss and config.kl_loss_coef > 0 and config.kl_loss_type == "k1":
        warnings.append(
            "kl_loss_type=k1 in the loss: its expected gradient on-policy is zero, so that it holds nothing near the "
            "reference; use --kl-loss-type low_var_kl or k2"
        )
    if config.eps_clip_high is not None and config.eps_clip_high < config.eps_clip:
        warnings.append(
            f"eps_clip_high={config.eps_clip_high} is below eps_clip={config.eps_clip}: ratios are held tighter above "
            "than below, the reverse of clip-higher; set --eps-clip-high above --eps-clip"
        )
    if config.disable_grpo_std_normalization and config.advantage_estimator != "grpo":
        warnings.append(
            f"disable_grpo_std_normalization has no effect with advantage_estimator={config.advantage_estimator}, "
            "which never divides by the standard deviation; leave it out"
        )
    return warnings


def _mode_faults(
    config: AlgorithmConfig, correction: Correction, max_staleness: int, update_weights_interval: int
) -> list[str]:
    faults = []
    stale = max_staleness > 0 or update_weights_interval > 1
    if stale and not correction.is_off_policy_safe:
        faults.append(
            f"policy_mode={correction.mode} without TIS, yet max_staleness={max_staleness} and "
            f"update_weights_interval={update_weights_interval} admit samples of older weights: training them "
            "uncorrected is refused; add --use-tis or --use-rollout-logprobs, or set --max-staleness 0"
        )
    if config.use_rollout_logprobs and correction.mode != "bypass":
        faults.append(
            f"use_rollout_logprobs with policy_mode={correction.mode}: the engine's log-probs are the anchor in bypass "
            "mode only; drop --use-rollout-logprobs, or drop --use-tis and --policy-mode"
        )
    elif config.use_tis and correction.mode != "decoupled":
        faults.append(
            f"use_tis with policy_mode={correction.mode}: the importance weight exists in decoupled mode only; "
            "drop --use-tis or set --policy-mode decoupled"
        )
    return faults


def _kl_faults(config: AlgorithmConfig) -> list[str]:
    if config.use_kl_loss and config.kl_loss_coef == 0:
        return [
            "use_kl_loss with kl_loss_coef=0: the reference would be loaded and run for nothing; "
            "set --kl-loss-coef above 0 or drop --use-kl-loss"
        ]
    if config.kl_loss_coef > 0 and not config.use_kl_loss:
        return [
            f"kl_loss_coef={config.kl_loss_coef} without use_kl_loss would be ignored; "
            "add --use-kl-loss or set --kl-loss-coef 0"
        ]
    return []
