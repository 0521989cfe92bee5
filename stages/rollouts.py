"""Sequences and rollouts: how a sample is made, grows and branches, and how the rollouts of a group are counted.

A rollout with several sequences (branches, sub-agents, a compacted context) travels as several samples that share
`index`. The last sequence carries the rollout's reward. No I/O, no clock.

Invariants:
- arrays of a sample keep equal length; neighbouring runs of one version are one run; a token that the policy did not
  generate has loss mask 0, log-prob 0.0 and version -1;
- a rollout counts once in every mean, filter and baseline; a token that several of its sequences share counts once in
  every sum of tokens;
- a removed sample counts in its group's baseline, and none of its tokens is trained;
- a rollout is a member of its group only if all of its sequences are completed or truncated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from models.algorithms.aggregation import owned, prefix_fault
from stages.messages import (
    Float32Array,
    Int32Array,
    Outcome,
    Prefix,
    RolloutSlice,
    Sample,
    Settled,
    TurnReward,
    UInt8Array,
    VersionRun,
    joined,
    wire,
)

Numbers = Sequence[float] | npt.NDArray[Any]


def new_sample(prompt: Sequence[int] | npt.NDArray[np.int32], index: int) -> Sample:
    """A rollout before its first turn: the prompt, and nothing after it."""
    n = len(prompt)
    return Sample(
        index=index,
        status="pending",
        response="",
        token_ids=wire(prompt, Int32Array),
        prompt_length=n,
        loss_mask=wire(np.zeros(n), UInt8Array),
        log_probs=wire(np.zeros(n), Float32Array),
        version_runs=join_runs((VersionRun(-1, n),), ()),
    )


def cut(sample: Sample, length: int) -> Sample:
    """The first `length` tokens, at least the prompt: for a sample with too many observation tokens at its end."""
    length = max(length, sample.prompt_length)
    kept = ((version, min(end, length) - start) for version, start, end in sample.spans() if start < length)
    return msgspec.structs.replace(
        sample,
        token_ids=wire(sample.token_ids[:length], Int32Array),
        loss_mask=wire(sample.loss_mask[:length], UInt8Array),
        log_probs=wire(sample.log_probs[:length], Float32Array),
        version_runs=join_runs(tuple(VersionRun(*run) for run in kept), ()),
    )


def branch(sample: Sample, length: int) -> Sample:
    """A sequence that begins with the first `length` tokens of an earlier one of its rollout and continues from there.

    It takes over no text, no counts and no rewards; `as_rollout` gives it its place.
    """
    head, taken = cut(sample, length), ("token_ids", "prompt_length", "loss_mask", "log_probs", "version_runs", "turns")
    fresh = _with_fields(new_sample((), sample.index), head, taken)
    return msgspec.structs.replace(fresh, prefix=Prefix(sample.sequence, head.length))


def as_rollout(*samples: Sample) -> tuple[Sample, ...]:
    """The sequences of one rollout, numbered in this order; the last one is graded."""
    index = samples[0].index
    return tuple(
        msgspec.structs.replace(sample, index=index, sequence=place, sequences=len(samples))
        for place, sample in enumerate(samples)
    )


def without_tokens(sample: Sample) -> Sample:
    """The sample without its tokens: for a failed sample that is too large to travel."""
    kept = ("status", "turns", "error", "generate_s", "sequence", "sequences", "policy")
    return _with_fields(new_sample((), sample.index), sample, kept)


def _with_fields(sample: Sample, other: Sample, names: Sequence[str]) -> Sample:
    """The sample with these fields of the other one."""
    return msgspec.structs.replace(sample, **{name: getattr(other, name) for name in names})


def with_tokens(
    sample: Sample, text: str, ids: Sequence[int], mask: Numbers, log_probs: Numbers, runs: tuple[VersionRun, ...]
) -> Sample:
    """The sample with these tokens after it."""
    return msgspec.structs.replace(
        sample,
        response=sample.response + text,
        token_ids=joined(sample.token_ids, ids),
        loss_mask=joined(sample.loss_mask, mask),
        log_probs=joined(sample.log_probs, log_probs),
        version_runs=join_runs(sample.version_runs, runs),
    )


def append_untrained(sample: Sample, ids: Sequence[int], text: str) -> Sample:
    """The sample with tokens after it that the policy did not make (mask 0, log-prob 0.0, version -1)."""
    nothing = np.zeros(len(ids))
    return with_tokens(sample, text, ids, nothing, nothing, (VersionRun(-1, len(ids)),))


def join_runs(first: tuple[VersionRun, ...], second: tuple[VersionRun, ...]) -> tuple[VersionRun, ...]:
    """Concatenate version runs, merging neighbours of one version."""
    runs: list[VersionRun] = []
    for run in (*first, *second):
        if runs and runs[-1].version == run.version:
            runs[-1] = VersionRun(run.version, runs[-1].n_tokens + run.n_tokens)
        elif run.n_tokens:
            runs.append(run)
    return tuple(runs)


def runs_of(values: npt.NDArray[np.integer]) -> Iterator[tuple[int, int]]:
    """(value, how often in a row) over an array [T]."""
    edges = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
    return ((int(values[start]), end - start) for start, end in pairwise(edges) if start < end)


def alike(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> int:
    """How many entries, or rows, two arrays begin with alike."""
    n = min(len(first), len(second))
    differ = np.nonzero(first[:n] != second[:n])[0]
    return int(differ[0]) if len(differ) else n


MEMBER_STATUSES = ("completed", "truncated")


def rollouts(samples: Iterable[Sample]) -> list[tuple[Sample, ...]]:
    """Samples by rollout, in the order of `index`; sequences in their own order."""
    samples = tuple(samples)
    if all(sample.sequences == 1 and sample.index == place for place, sample in enumerate(samples)):
        return [(sample,) for sample in samples]  # most groups, and each is asked for many times
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
    for *parts, last in rollouts(samples):
        if all(part.status in MEMBER_STATUSES for part in (*parts, last)):
            grade = ("reward", "raw_reward", "reward_parts", "is_correct")
            found += [*(_with_fields(part, last, grade) for part in parts), last]
    return tuple(found)


def prefixes(parts: Sequence[Sample]) -> list[tuple[int, int] | None]:
    """What each sequence of a rollout shares with an earlier one: (which, tokens)."""
    return [None if part.prefix is None else (part.prefix.sequence, part.prefix.length) for part in parts]


def rollout_fault(parts: Sequence[Sample]) -> str | None:
    """What is inconsistent in the sequences of a rollout, in one sentence, or None."""
    wrong = next(filter(None, (part.fault() for part in parts)), None)
    if wrong is not None:
        return wrong
    if [part.sequence for part in parts] != list(range(parts[0].sequences)):
        return f"it has sequences {[part.sequence for part in parts]} of {parts[0].sequences}; each must be there once"
    wrong = prefix_fault([part.token_ids for part in parts], prefixes(parts))
    if wrong is not None:
        return wrong
    for part in parts:
        if part.prefix is None:
            continue
        n, other = part.prefix.length, parts[part.prefix.sequence]
        if not np.array_equal(part.loss_mask[:n], other.loss_mask[:n]):
            return f"the first {n} entries of the loss mask of sequence {part.sequence} are not those of its prefix"
        if not np.array_equal(part.versions[:n], other.versions[:n]):
            return f"the versions of the first {n} tokens of sequence {part.sequence} are not those of its prefix"
        if not {turn for turn in part.turn_rewards if turn.end <= n} <= set(other.turn_rewards):
            return f"sequence {part.sequence} has a turn reward in its prefix that sequence {other.sequence} has not"
    return None


def own_turns(part: Sample) -> list[TurnReward]:
    """Rewards of turns behind its prefix; those before are the other sequence's."""
    shared = 0 if part.prefix is None else part.prefix.length
    return [turn for turn in part.turn_rewards if turn.end > shared]


def turn_total(parts: Iterable[Sample]) -> float:
    """Sum of the rewards of all turns of a rollout, each once."""
    return sum((turn.reward for part in parts for turn in own_turns(part)), 0.0)


def token_rewards(parts: Sequence[Sample]) -> list[npt.NDArray[np.float32] | None]:
    """[T] for each sequence of a rollout: rewards of turns, those of its prefix included; None if it has none."""
    if not any(part.turn_rewards for part in parts):  # most rollouts
        return [None] * len(parts)
    turns: list[list[TurnReward]] = []
    found: list[npt.NDArray[np.float32] | None] = []
    for part in parts:
        before = part.prefix
        shared = [] if before is None else [one for one in turns[before.sequence] if one.end <= before.length]
        turns.append([*shared, *own_turns(part)])
        rewards = np.zeros(part.length, dtype=np.float32)
        made = part.versions >= 0
        for turn in turns[-1]:
            rewards[np.flatnonzero(made[: turn.end])[-1]] += turn.reward
        found.append(rewards if turns[-1] else None)
    return found


def rollout_return(parts: Sequence[Sample]) -> float:
    """What a rollout is trained by: its reward at the end, shaped, and the rewards of all its turns."""
    return (parts[-1].reward or 0.0) + turn_total(parts)


def raw_returns(samples: Iterable[Sample]) -> npt.NDArray[np.float64]:
    """[n] the same before shaping: what filters judge by."""
    return np.array([raw_reward(parts[-1]) + turn_total(parts) for parts in rollouts(samples)], dtype=np.float64)


def raw_reward(sample: Sample) -> float:
    """The grader's reward before shaping; 0 where nothing graded."""
    value = sample.reward if sample.raw_reward is None else sample.raw_reward
    return 0.0 if value is None else value


def raw_rewards(samples: Iterable[Sample]) -> npt.NDArray[np.float64]:
    """[n] raw rewards of the rollouts."""
    return np.array([raw_reward(sample) for sample in closing(samples)], dtype=np.float64)


def verdicts(samples: Iterable[Sample]) -> list[bool]:
    """Which rollouts are correct, for those with a verdict. A reward is no verdict: its scale is the grader's."""
    return [sample.is_correct for sample in closing(samples) if sample.is_correct is not None]


def pass_rate(samples: Iterable[Sample]) -> float | None:
    """Share of correct rollouts, None without a verdict."""
    known = verdicts(samples)
    return sum(known) / len(known) if known else None


def trained_mask(sample: Sample) -> npt.NDArray[np.uint8]:
    """[T] 1 where a token is trained, here or in another sequence that shows it; all 0 in a removed sample."""
    if sample.remove_sample:
        return np.zeros(sample.length, dtype=np.uint8)
    return np.array(sample.loss_mask, dtype=np.uint8)


def trained_masks(parts: Sequence[Sample]) -> list[npt.NDArray[np.bool_]]:
    """[T] for each sequence of a rollout: the tokens that are trained with it, each token of the rollout once."""
    return owned([trained_mask(part) > 0 for part in parts], prefixes(parts))


def trainable_tokens(parts: Sequence[Sample]) -> int:
    """Tokens of a rollout that the policy made and that may be trained, removed samples included, each once."""
    return sum(int(np.count_nonzero(mask)) for mask in owned([part.loss_mask > 0 for part in parts], prefixes(parts)))


def trained_versions(samples: Iterable[Sample]) -> Iterator[int]:
    """Versions of the tokens that are trained."""
    kept = (sample for sample in samples if not sample.remove_sample)
    return (version for sample in kept for version, _ in by_version(sample, sample.loss_mask))


def oldest_version(samples: Iterable[Sample]) -> int | None:
    """Smallest version among the tokens that are trained, None if none is."""
    return min(trained_versions(samples), default=None)


def newest_version(samples: Iterable[Sample]) -> int | None:
    """Largest version among the tokens that are trained, None if none is."""
    return max(trained_versions(samples), default=None)


def without_older(slice_: RolloutSlice, oldest: int) -> tuple[RolloutSlice, int]:
    """The group with loss mask 0 at tokens of versions before `oldest`, and how many tokens that were."""
    samples, masked = [], 0
    for sample in slice_.samples:
        mask = np.array(sample.loss_mask, dtype=np.uint8)
        for version, start, end in sample.spans():
            if version < oldest:
                mask[start:end] = 0
        if lost := int(np.count_nonzero(sample.loss_mask)) - int(np.count_nonzero(mask)):
            sample = msgspec.structs.replace(sample, loss_mask=wire(mask, UInt8Array))
        samples.append(sample)
        masked += lost
    return (msgspec.structs.replace(slice_, samples=tuple(samples)) if masked else slice_), masked


def by_version(sample: Sample, mask: npt.NDArray[Any]) -> Iterator[tuple[int, int]]:
    """(version, number of its tokens in `mask` [T]) for each version run that has any."""
    for version, start, end in sample.spans():
        if count := int(np.count_nonzero(mask[start:end])):
            yield version, count


def mean_reward(slice_: RolloutSlice) -> float | None:
    """Mean raw reward of the graded rollouts, if any."""
    graded = [raw_reward(s) for s in closing(slice_.samples) if s.reward is not None or s.raw_reward is not None]
    return fmean(graded) if graded else None


def settlement(slice_: RolloutSlice, outcome: Outcome, detail: str) -> Settled:
    """How a group ends without being trained: tokens of all its samples, mean raw reward and pass rate by rollout."""
    return Settled(
        slice_.group.group_id,
        outcome,
        detail,
        tokens=slice_.n_tokens,
        reward=mean_reward(slice_),
        pass_rate=pass_rate(slice_.samples),
    )
