"""Parts of a run alone, rollout batches kept on disk, faults on purpose.

Owners: `stages/train/saved_batches`, `models/fault_injection`.
"""

from __future__ import annotations

import math
from typing import Final, Literal, get_args

from msgspec import Struct

from configs.schema.notation import Section

FaultKind = Literal["kill", "error", "hang", "slow", "drop"]
KINDS: Final[tuple[str, ...]] = get_args(FaultKind)
FORM: Final = "stage:probability:kind, or stage:probability:kind:seconds"
RANK: Final = "rank"  # of a trainer group; the train stage, which hands it its work, is `train`
# Longer than a lease without a sign of life (30 s), and than the health checks of an engine by default (45 s).
_SECONDS: Final = {"hang": 60.0, "slow": 1.0}


class DebugConfig(Section, frozen=True, kw_only=True):
    """Debugging: saved rollout batches, parts of a run alone, faults on purpose."""

    save_debug_rollout_data: str | None = None
    """write every rollout batch whole to this file; {rollout_id} is its number, from 0"""
    load_debug_rollout_data: str | None = None
    """train on the batches of such files, without engines and rewards"""
    debug_train_only: bool = False
    """refuse a run that would start engines: needs --load-debug-rollout-data or --loss-type sft_loss"""
    debug_rollout_only: bool = False
    """generate and grade, but train nothing: every version has the weights of the start"""
    fault_inject: tuple[str, ...] = ()
    """disturb a stage, engine or rank on purpose, as stage:probability:kind, e.g. reward:0.01:kill; kinds: kill, error,
    hang, slow, for engine also drop; repeatable"""


def batch_file(template: str, rollout_id: int) -> str:
    """Where batch `rollout_id` (0 = the first) lies. Raises ValueError for a template that names something else."""
    try:
        return template.format(rollout_id=rollout_id)
    except (KeyError, IndexError, AttributeError) as error:
        raise ValueError(f"the only name in braces is {{rollout_id}}, not {error}") from error


class FaultSpec(Struct, frozen=True):
    """`probability`: of each message that the stage takes; for `engine`, of each request to generate (of SGLang, of
    each health check); for `rank`, of each call that a rank of the trainer group makes. `seconds`: length of a `hang`
    or `slow`, 0 for other kinds."""

    stage: str
    probability: float
    kind: FaultKind
    seconds: float = 0.0

    def __str__(self) -> str:
        length = f" for {self.seconds:g} s" if self.seconds else ""
        return f"{self.stage} {self.kind}{length}, {self.probability:.3g} of {self.unit}"

    @property
    def unit(self) -> str:
        return {"engine": "requests", RANK: "calls"}.get(self.stage, "messages")


def read_fault(text: str) -> FaultSpec:
    """Raises ValueError that names the rule."""
    stage, *rest = text.split(":")
    if not stage or len(rest) not in (2, 3):
        raise ValueError(f"must be {FORM}, such as reward:0.01:kill")
    kind = next((known for known in get_args(FaultKind) if known == rest[1]), None)
    if kind is None:
        raise ValueError(f"the kind is {rest[1]!r} and must be one of {', '.join(KINDS)}")
    probability = _number(rest[0])
    if not 0 < probability <= 1:
        raise ValueError(f"the probability is {rest[0]!r} and must be a number above 0 and at most 1")
    seconds = _SECONDS.get(kind, 0.0)
    if len(rest) == 3:
        if kind not in _SECONDS:
            raise ValueError(f"seconds stand only behind {' and '.join(_SECONDS)}, not behind {kind}")
        seconds = _number(rest[2])
        if not 0 < seconds <= 86400:
            raise ValueError(f"the seconds are {rest[2]!r} and must be a number above 0, a day at the most")
    return FaultSpec(stage, probability, kind, seconds)


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        return math.nan
    return number
