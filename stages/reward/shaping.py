"""From grades to a reward: the weighted sum of components, `--reward-key`, overlong shaping, masking of the truncated.

No I/O, no clock. Invariants: a component that failed fails the whole grade, for a sum with a hole is no reward; parts
carry the names of the components, and the parts of a component's own grade come as `name/part`; a sample is shaped
once, however often it comes; the grader's own score stays in `Sample.raw_reward` wherever shaping changed it. Overlong
shaping is DAPO's (arXiv 2503.14476).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from stages.graders.grade import Grade, failed
from stages.messages import Sample
from stages.reward.selection import Component

PART = "overlong_penalty"


class Overlong(Struct, frozen=True):
    """A penalty that grows linearly over the last `buffer` tokens before `limit`."""

    limit: int  # L_max, tokens of the response
    buffer: float  # B, tokens; 0 = no penalty
    factor: float  # p, the penalty at the limit

    def penalty(self, length: int) -> float:
        """min(0, -(L - (L_max - B)) / B * p), and no less than -p: beyond the limit it grows no more.

        `length` is L, the trainable tokens of the response.
        """
        if self.buffer == 0:
            return 0.0
        beyond = length - (self.limit - self.buffer)
        return -self.factor * min(1.0, max(0.0, beyond / self.buffer))


def shaped(sample: Sample, overlong: Overlong, length: int, *, mask_truncated: bool) -> Sample:
    """A graded sample with its penalty, and taken out of training if it is truncated and `mask_truncated` is set.

    A sample without a reward gets no penalty. While shaping is on, every sample has the part `overlong_penalty`, so
    that its mean is over all of them.
    """
    if mask_truncated and sample.status == "truncated":
        sample = msgspec.structs.replace(sample, remove_sample=True)
    if sample.reward is None or overlong.buffer == 0 or PART in sample.reward_parts:
        return sample
    penalty = overlong.penalty(length)
    parts = {**sample.reward_parts, PART: penalty}
    if penalty == 0.0:
        return msgspec.structs.replace(sample, reward_parts=parts)
    return msgspec.structs.replace(sample, reward=sample.reward + penalty, raw_reward=sample.reward, reward_parts=parts)


def combined(components: Sequence[Component], grades: Sequence[Grade]) -> Grade:
    """The weighted sum of the components' scores, of which there is one grade for each.

    `is_correct` and `extracted` come from the first component that reports `is_correct`.
    """
    score, parts = 0.0, {}
    correct: bool | None = None
    extracted: str | None = None
    timed_out = False
    for component, grade in zip(components, grades, strict=True):
        if grade.error is not None:
            reason = f"component {component.name!r}: {grade.error}"
            return failed(reason, "timeout" if grade.status == "timeout" else "error")
        timed_out |= grade.status == "timeout"
        score += component.weight * grade.score
        parts[component.name] = grade.score
        parts.update({f"{component.name}/{part}": value for part, value in grade.parts.items()})
        if correct is None and grade.is_correct is not None:
            correct, extracted = grade.is_correct, grade.extracted
    if not math.isfinite(score):
        return failed(f"the weighted sum of the components is {score}; lower the weights")
    return Grade(score, correct, parts, extracted, status="timeout" if timed_out else "ok")


def picked(grade: Grade, key: str | None, grader: str) -> Grade:
    """The grade with the part `key` (--reward-key) as its score; unchanged for None and `score`."""
    if key is None or key == "score" or grade.error is not None:
        return grade
    if key not in grade.parts:
        keys = ", ".join(["score", *grade.parts])
        return failed(f"--reward-key is {key!r}, but {grader} returned only: {keys}; set it to one of these")
    score = grade.parts[key]
    parts = {"score": grade.score, **grade.parts}
    return Grade(score, grade.is_correct, parts, grade.extracted, status=grade.status)
