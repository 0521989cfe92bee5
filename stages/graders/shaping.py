"""What happens to a reward after the grader: overlong shaping (DAPO, arXiv 2503.14476), and masking of the truncated.

Invariants: pure; a sample is shaped once, however often it comes; the grader's own score stays in `Sample.raw_reward`
wherever shaping changed it.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from stages.messages import Sample

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
