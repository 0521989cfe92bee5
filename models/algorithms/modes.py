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

from typing import Literal

from msgspec.structs import asdict

from configs.schema.algorithm import CorrectionConfig
from configs.schema.rejection import RejectionRule, parse_rules
from models.algorithms.errors import AlgorithmError

WeightLevel = Literal["token", "sequence", "geometric"]


class Correction(CorrectionConfig, frozen=True):
    """The settings of off-policy correction, decided: nothing is `auto` any more. Raises `InvalidRule`."""

    policy_mode: Literal["decoupled", "bypass", "onpolicy"]
    use_tis: bool

    def __post_init__(self) -> None:
        parse_rules(self.rollout_rs)

    @property
    def rules(self) -> tuple[RejectionRule, ...]:
        """All must pass."""
        return parse_rules(self.rollout_rs)

    @property
    def rejects(self) -> bool:
        """Whether a rejection rule or the veto is on."""
        return bool(self.rules) or self.rs_veto is not None

    @property
    def loglinear(self) -> bool:
        """Whether the old log-probs are interpolated from theta, so that no forward pass is spent on it."""
        return self.policy_mode == "decoupled" and self.prox == "loglinear"

    @property
    def against_current(self) -> bool:
        """Whether D = log theta - log mu instead of log old - log mu.

        So asked for, or because in bypass mode old is mu itself and log old - log mu is always 0.
        """
        return self.correction_ratio == "current" or self.policy_mode == "bypass"

    @property
    def measures_current(self) -> bool:
        """Whether the mismatch with the sampler is logged of theta: where old log-probs are not the trainer's own."""
        return self.against_current or self.loglinear


def correction_of(config: CorrectionConfig) -> Correction:
    """Of a resolved configuration. Raises `AlgorithmError` if it is not, `InvalidRule`."""
    if config.policy_mode == "auto" or config.use_tis is None:
        raise AlgorithmError(
            f"policy_mode={config.policy_mode} and use_tis={config.use_tis} are not decided; resolve the configuration "
            "first (configs.resolve)"
        )
    return Correction(**asdict(config))
