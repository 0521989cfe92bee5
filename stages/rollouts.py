"""Rollouts of a group: the unit in which rewards are counted, however many sequences each of them has.

A rollout with several sequences (sub-agents, compaction of its context) travels as several samples, which share
`index`; the last sequence carries the rollout's reward. Pure arithmetic on messages.

Invariants: a rollout counts once in every mean, filter and baseline; a removed sample counts there as well, but none of
its tokens is trained; a rollout is a member of its group only if all of its sequences are completed or truncated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from stages.messages import Outcome, RolloutSlice, Sample, Settled

MEMBER_STATUSES = ("completed", "truncated")


def rollouts(samples: Iterable[Sample]) -> list[tuple[Sample, ...]]:
    """Samples by rollout, in the order of `index`; sequences in their own order."""
    by_index: dict[int, list[Sample]] = {}
    for sample in samples:
        by_index.setdefault(sample.index, []).append(sample)
    return [tuple(sorted(by_index[i], key=lambda s: s.sequence)) for i in sorted(by_index)]


def closing(samples: Iterable[Sample]) -> list[Sample]:
    """The last sequence of each rollout: it holds the reward, the verdict and the way the rollout ended."""
    return [parts[-1] for parts in rollouts(samples)]


def counting(samples: Iterable[Sample]) -> tuple[Sample, ...]:
    """Sequences of the rollouts that are members of their group, with the reward of the last sequence in each."""
    found: list[Sample] = []
    for parts in rollouts(samples):
        if all(part.status in MEMBER_STATUSES for part in parts):
            found += [_graded_as(part, parts[-1]) for part in parts]
    return tuple(found)


def _graded_as(part: Sample, last: Sample) -> Sample:
    if part is last:
        return part
    return msgspec.structs.replace(
        part,
        reward=last.reward,
        raw_reward=last.raw_reward,
        reward_parts=last.reward_parts,
        is_correct=last.is_correct,
    )


def raw_reward(sample: Sample) -> float:
    """The grader's reward before shaping; 0 where nothing graded."""
    value = sample.reward if sample.raw_reward is None else sample.raw_reward
    return 0.0 if value is None else value


def raw_rewards(samples: Iterable[Sample]) -> npt.NDArray[np.float64]:
    """[n] raw rewards of the rollouts."""
    return np.array([raw_reward(sample) for sample in closing(samples)], dtype=np.float64)


def verdicts(samples: Iterable[Sample]) -> list[bool]:
    """Which rollouts are correct, of those whose grader says so. A reward is no verdict: its scale is the grader's."""
    return [sample.is_correct for sample in closing(samples) if sample.is_correct is not None]


def pass_rate(samples: Iterable[Sample]) -> float | None:
    """Share of correct rollouts, None where no grader says which are."""
    known = verdicts(samples)
    return sum(known) / len(known) if known else None


def trained_mask(sample: Sample) -> npt.NDArray[np.uint8]:
    """[T] 1 where a token is trained; all 0 in a removed sample."""
    if sample.remove_sample:
        return np.zeros(sample.length, dtype=np.uint8)
    return np.array(sample.loss_mask, dtype=np.uint8)


def oldest_version(samples: Iterable[Sample]) -> int | None:
    """Smallest version among the tokens that are trained, None if none is."""
    versions = [v for s in samples if not s.remove_sample and (v := s.oldest_version) is not None]
    return min(versions, default=None)


def settlement(slice_: RolloutSlice, outcome: Outcome, detail: str) -> Settled:
    """How a group ends without being trained: tokens of all its samples, mean raw reward and pass rate by rollout."""
    graded = [raw_reward(s) for s in closing(slice_.samples) if s.reward is not None or s.raw_reward is not None]
    return msgspec.structs.replace(
        slice_.ended(outcome, detail),
        reward=mean(graded),
        pass_rate=pass_rate(slice_.samples),
    )


def mean(values: Sequence[float]) -> float | None:
    """Arithmetic mean, None of nothing."""
    return sum(values) / len(values) if values else None
