"""Which anchor the policy ratio has, and whether tokens are weighted against the engine's log-probs.

Three policies are told apart: mu sampled the token (the engine's log-probs), old anchors the trust region (fixed while
one rollout batch is trained), theta is being trained.

    mode        anchor old                     weight of the policy term
    decoupled   trainer, weights of the start  truncated importance weight of exp(log old - log mu)
    bypass      mu                             1 (the clipped ratio is theta / mu)
    onpolicy    trainer, weights of the start  1 (only with max staleness 0)

Invariant: no torch here. Sources: arXiv:2110.00641, arXiv:2505.24298.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from configs.schema.correction import CorrectionConfig

PolicyMode = Literal["decoupled", "bypass", "onpolicy"]


@dataclass(frozen=True)
class Correction:
    """The resolved mode, with the bounds of the importance weight (used in decoupled mode only)."""

    mode: PolicyMode
    use_tis: bool
    low: float = 0.0
    high: float = 2.0

    @property
    def is_off_policy_safe(self) -> bool:
        """Whether tokens of older weights are corrected for."""
        return self.use_tis or self.mode == "bypass"


def resolve_correction(config: CorrectionConfig, *, max_staleness: int) -> Correction:
    """Fill in `policy_mode = auto` and `use_tis = None`, for a bound of `max_staleness` updates.

    TIS is on by default where samples may be stale and no other mode was asked for.
    """
    mode = config.policy_mode
    use_tis = config.use_tis
    if use_tis is None:
        bypass = config.use_rollout_logprobs or mode == "bypass"
        use_tis = not bypass and mode != "onpolicy" and (max_staleness > 0 or mode == "decoupled")
    if mode == "auto":
        mode = "decoupled" if use_tis else "bypass" if config.use_rollout_logprobs else "onpolicy"
    return Correction(mode=mode, use_tis=use_tis, low=config.tis_clip_low, high=config.tis_clip)
