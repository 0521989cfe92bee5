"""The rejection rules of `--rollout-rs`: RULE=BOUND or RULE=LOW_HIGH.

A rule has a level (token, seq_sum, seq_mean, seq_max) and a statistic of D = log old - log mu:

    k1  -D             two bounds LOW_HIGH of the ratio mu / old, the inverse of the importance weight
    k2  D^2 / 2        one upper bound
    k3  exp(D) - 1 - D one upper bound

The check of the configuration and the loss read rules by the same function, so both refuse the same.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache
from typing import Final, Literal, cast

RuleLevel = Literal["token", "seq_sum", "seq_mean", "seq_max"]
RuleKind = Literal["k1", "k2", "k3"]

_NAME: Final = re.compile(r"(token|seq_sum|seq_mean|seq_max)_(k1|k2|k3)")


@dataclass(frozen=True)
class RejectionRule:
    """Keep a token or sequence whose statistic lies within low .. high, both included."""

    level: RuleLevel
    kind: RuleKind
    low: float  # of the statistic: log LOW for k1, -inf otherwise
    high: float  # of the statistic: log HIGH for k1, the bound otherwise

    @property
    def name(self) -> str:
        """E.g. seq_mean_k1: what metrics are called after."""
        return f"{self.level}_{self.kind}"

    @property
    def meaning(self) -> str:
        """The rule in words; for k1 both ways round, as its bounds are on the inverse of the importance weight."""
        unit = "sequences" if self.whole_sequence else "tokens"
        if self.kind != "k1":
            return f"{self.name} keeps {unit} up to {self.high:g}"
        low, high = math.exp(self.low), math.exp(self.high)
        return (
            f"{self.name} keeps {unit} with mu / old from {low:g} to {high:g}, that is old / mu from {1 / high:g} "
            f"to {1 / low:g}"
        )

    @property
    def whole_sequence(self) -> bool:
        """Whether a failed test removes every token of the sequence."""
        return self.level != "token"


class InvalidRule(ValueError):
    """A rejection rule is unknown, does not exist, or its bounds cannot be read."""


@cache
def parse_rules(texts: tuple[str, ...]) -> tuple[RejectionRule, ...]:
    """The rules of `--rollout-rs`; all of them must pass. Raises `InvalidRule`."""
    return tuple(map(parse_rule, texts))


def parse_rule(text: str) -> RejectionRule:
    """One rule, e.g. "seq_mean_k1=0.99_1.01" or "token_k3=0.05". Raises `InvalidRule`."""
    name, separator, bound = text.partition("=")
    matched = _NAME.fullmatch(name)
    if matched is None or not separator:
        raise InvalidRule(
            f"--rollout-rs {text!r} is no rejection rule; write for example seq_mean_k1=0.99_1.01 or token_k3=0.05, "
            "with one of token, seq_sum, seq_mean, seq_max and one of k1, k2, k3"
        )
    level, kind = cast("RuleLevel", matched[1]), cast("RuleKind", matched[2])
    if level == "seq_max" and kind == "k1":
        raise InvalidRule(
            f"--rollout-rs {text!r} does not exist: the largest signed log-ratio says nothing of the other side; use "
            "seq_max_k2 or seq_max_k3"
        )
    values = _numbers(bound)
    if kind == "k1":
        if not (len(values) == 2 and 0 < values[0] < values[1]):
            raise InvalidRule(
                f"--rollout-rs {text!r} needs two bounds of the ratio mu / old, the lower one first; write for example "
                f"{name}=0.99_1.01"
            )
        return RejectionRule(level, kind, math.log(values[0]), math.log(values[1]))
    if not (len(values) == 1 and values[0] > 0):
        raise InvalidRule(f"--rollout-rs {text!r} needs one upper bound above 0; write for example {name}=0.05")
    return RejectionRule(level, kind, -math.inf, values[0])


def _numbers(text: str) -> list[float]:
    """Finite numbers joined by underscores; nothing if one of them is none."""
    try:
        values = [float(part) for part in text.split("_")]
    except ValueError:
        return []
    return values if all(map(math.isfinite, values)) else []
