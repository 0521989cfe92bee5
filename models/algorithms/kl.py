"""Estimators of the divergence from the reference policy, per token, for use in the loss.

x = log theta - log ref at the sampled token. Values and gradients (with respect to log theta):

    k1          x                    gradient 1: no pull towards the reference in expectation
    k2          x^2 / 2              gradient x: that of the reverse KL on-policy
    k3          exp(-x) - 1 + x      non-negative, low variance
    low_var_kl  k3 clamped to +-10

The expectation of these is over the current policy. `use_unbiased_kl` multiplies by the ratio of theta to the policy
that sampled, with gradient: on-policy the value stays and the gradient becomes that of the divergence itself.

Invariants: masked tokens are exactly 0; the exponent is clamped to +-20, the linear term is not.
Source: J. Schulman, "Approximating KL divergence", 2020.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

from torch import Tensor

from models.algorithms.tokens import bounded_exp, log_ratio, masked
from models.import_path import pick

LOW_VAR_BOUND: Final = 10.0


class KLFunction(Protocol):
    """KL estimate [N] from x = log theta - log ref [N]; differentiable."""

    def __call__(self, difference: Tensor) -> Tensor: ...


def k1(difference: Tensor) -> Tensor:
    """x."""
    return difference


def k2(difference: Tensor) -> Tensor:
    """x^2 / 2."""
    return 0.5 * difference.square()


def k3(difference: Tensor) -> Tensor:
    """exp(-x) - 1 + x."""
    return bounded_exp(-difference) - 1.0 + difference


def low_var_kl(difference: Tensor) -> Tensor:
    """k3 clamped to [-10, 10]: one wild token cannot rule the step."""
    return k3(difference).clamp(-LOW_VAR_BOUND, LOW_VAR_BOUND)


KL_ESTIMATORS: Final[Mapping[str, KLFunction]] = {"k1": k1, "k2": k2, "k3": k3, "low_var_kl": low_var_kl}


def kl_values(kind: str, difference: Tensor, ratio: Tensor | None = None) -> Tensor:
    """KL estimate [N] from x [N], times `ratio` [N] if given; in or out of the graph, as its inputs are.

    The bound of low_var_kl applies after the ratio. Raises `UnknownAlgorithm` for a wrong `kind`.
    """
    if ratio is None:
        return pick("kl", kind, KL_ESTIMATORS)(difference)
    if kind == "low_var_kl":
        return (ratio * k3(difference)).clamp(-LOW_VAR_BOUND, LOW_VAR_BOUND)
    return ratio * pick("kl", kind, KL_ESTIMATORS)(difference)


def kl_to_reference(
    kind: str, log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, ratio: Tensor | None = None
) -> Tensor:
    """KL estimate per token [N], 0 where masked. Raises `UnknownAlgorithm` for a wrong `kind`."""
    return masked(kl_values(kind, log_ratio(log_probs, ref_log_probs, mask), ratio), mask)
