"""Which old policy the ratio is taken to, and what is done about tokens that another policy sampled.

Three policies are told apart: mu sampled the token (the engine's log-probs), old is the centre of the trust region
(fixed while one rollout batch is trained), theta is being trained.

    mode        old log-probs                    weight of the policy term
    decoupled   trainer, weights of the start    truncated importance weight of exp(log old - log mu)
                (prox loglinear: between mu and theta, no forward pass)
    bypass      mu                               1 (the clipped ratio is theta / mu)
    onpolicy    trainer, weights of the start    1 (only with max staleness 0)

Invariant: no torch here. Sources: arXiv:2110.00641, arXiv:2505.24298, arXiv:2512.06547.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from configs.schema.algorithm import SAMPLER_LOSSES
from configs.schema.correction import CorrectionConfig
from models.algorithms.rules import RejectionRule, parse_rules

PolicyMode = Literal["decoupled", "bypass", "onpolicy"]
WeightLevel = Literal["token", "sequence", "geometric"]
WeightMode = Literal["clip", "icepop", "seq_mask"]


@dataclass(frozen=True)
class Correction:
    """Everything that the objective needs to know of off-policy correction, resolved: nothing is `auto` any more."""

    mode: PolicyMode
    use_tis: bool
    low: float = 0.0  # bounds of the importance weight
    high: float = 2.0
    level: WeightLevel = "token"
    tis_mode: WeightMode = "clip"
    seq_low: float = 0.95  # seq_mask: bounds of the geometric mean
    seq_high: float = 1.05
    clip_decay: float = 1.0  # a token s versions old has the upper bound 1 + (high - 1) clip_decay^s
    batch_normalize: bool = False
    ratio: Literal["old", "current"] = "old"  # numerator of the weight
    custom: str | None = None  # import path of the weights
    rules: tuple[RejectionRule, ...] = ()  # all must pass
    veto: float | None = None  # a token whose old / mu is below this removes its sequence
    rs_unit: Literal["sample", "rollout"] = "sample"
    renormalize: bool = False
    prox: Literal["recompute", "loglinear"] = "recompute"
    prox_alpha: Literal["next_version", "areal"] = "next_version"
    use_opsm: bool = False
    opsm_delta: float = 1e-4

    @property
    def rejects(self) -> bool:
        """Whether a rejection rule or the veto is on."""
        return bool(self.rules) or self.veto is not None

    @property
    def loglinear(self) -> bool:
        """Whether the old log-probs are interpolated from theta, so that no forward pass is spent on it."""
        return self.mode == "decoupled" and self.prox == "loglinear"

    @property
    def against_current(self) -> bool:
        """Whether D = log theta - log mu instead of log old - log mu.

        So asked for, or because in bypass mode old is mu itself and log old - log mu is always 0.
        """
        return self.ratio == "current" or self.mode == "bypass"

    @property
    def measures_current(self) -> bool:
        """Whether the mismatch with the sampler is logged of theta: where old log-probs are not the trainer's own."""
        return self.against_current or self.loglinear


def resolve_correction(config: CorrectionConfig, *, max_staleness: int, policy_loss: str = "ppo") -> Correction:
    """Fill in `policy_mode = auto` and `use_tis = None`, for a bound of `max_staleness` updates.

    Importance weights are on by default where samples may be stale and nothing else was asked for. A `policy_loss`
    whose ratio is theta / mu corrects by itself and resolves to bypass. Raises `InvalidRule`.
    """
    mode, use_tis = config.policy_mode, config.use_tis
    bypass = config.use_rollout_logprobs or mode == "bypass" or (mode == "auto" and policy_loss in SAMPLER_LOSSES)
    rules = parse_rules(config.rollout_rs)
    if use_tis is None:
        corrects_itself = bypass or policy_loss in SAMPLER_LOSSES
        use_tis = max_staleness > 0 and not corrects_itself and mode != "onpolicy" and not config.allow_uncorrected
    if mode == "auto":
        rejects = bool(rules) or config.rs_veto is not None
        mode = "decoupled" if use_tis or (rejects and not bypass) else "bypass" if bypass else "onpolicy"
    return Correction(
        mode=mode,
        use_tis=use_tis,
        low=config.tis_clip_low,
        high=config.tis_clip,
        level=config.tis_level,
        tis_mode=config.tis_mode,
        seq_low=config.tis_seq_low,
        seq_high=config.tis_seq_high,
        clip_decay=config.tis_clip_decay,
        batch_normalize=config.tis_batch_normalize,
        ratio=config.correction_ratio,
        custom=config.custom_tis_function_path,
        rules=rules,
        veto=config.rs_veto,
        rs_unit=config.rs_unit,
        renormalize=config.renormalize_after_rejection,
        prox=config.prox,
        prox_alpha=config.prox_alpha,
        use_opsm=config.use_opsm,
        opsm_delta=config.opsm_delta,
    )
