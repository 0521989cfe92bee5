"""How the sequences of a rollout are made and grow, but for what engines add: for generate and for loop stages. Pure.

Invariants: arrays keep equal length; neighbouring runs of one version are one run; what the policy did not make has
loss mask 0, log-prob 0.0 and version -1.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from stages.messages import Float32Array, Int32Array, Prefix, Sample, UInt8Array, VersionRun, joined, wire


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
    """The first tokens, the prompt at least: for a sample whose last ones, which nothing of ours made, are too many."""
    length = max(length, sample.prompt_length)
    runs: list[VersionRun] = []
    left = length
    for run in sample.version_runs:
        runs.append(VersionRun(run.version, min(run.n_tokens, left)))
        left -= runs[-1].n_tokens
    return msgspec.structs.replace(
        sample,
        token_ids=wire(sample.token_ids[:length], Int32Array),
        loss_mask=wire(sample.loss_mask[:length], UInt8Array),
        log_probs=wire(sample.log_probs[:length], Float32Array),
        version_runs=join_runs(tuple(runs), ()),
    )


def branch(sample: Sample, length: int, response: str = "") -> Sample:
    """A sequence that begins with the first `length` tokens of another of its rollout, and goes on from there.

    `response`: their text after the prompt. Of the counts and rewards of the other sequence it has none; `as_rollout`
    gives it its place.
    """
    head = cut(sample, length)
    return msgspec.structs.replace(
        new_sample((), sample.index),
        response=response,
        token_ids=head.token_ids,
        prompt_length=head.prompt_length,
        loss_mask=head.loss_mask,
        log_probs=head.log_probs,
        version_runs=head.version_runs,
        turns=sample.turns,
        prefix=Prefix(sample.sequence, head.length),
    )


def as_rollout(*samples: Sample) -> tuple[Sample, ...]:
    """The sequences of one rollout, numbered in this order; the last one is graded."""
    index = samples[0].index
    return tuple(
        msgspec.structs.replace(sample, index=index, sequence=place, sequences=len(samples))
        for place, sample in enumerate(samples)
    )


def append_untrained(sample: Sample, ids: Sequence[int], text: str) -> Sample:
    """The sample with tokens after it that the policy did not make (mask 0, log-prob 0.0, version -1)."""
    n = len(ids)
    return msgspec.structs.replace(
        sample,
        response=sample.response + text,
        token_ids=joined(sample.token_ids, ids),
        loss_mask=joined(sample.loss_mask, np.zeros(n)),
        log_probs=joined(sample.log_probs, np.zeros(n)),
        version_runs=join_runs(sample.version_runs, (VersionRun(-1, n),)),
    )


def join_runs(first: tuple[VersionRun, ...], second: tuple[VersionRun, ...]) -> tuple[VersionRun, ...]:
    """Concatenate version runs, merging neighbours of one version."""
    joined: list[VersionRun] = []
    for run in (*first, *second):
        if run.n_tokens == 0:
            continue
        if joined and joined[-1].version == run.version:
            joined[-1] = VersionRun(run.version, joined[-1].n_tokens + run.n_tokens)
        else:
            joined.append(run)
    return tuple(joined)
