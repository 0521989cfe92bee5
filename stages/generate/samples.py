"""From engines' answers to a sample: what a result brings, put behind what the sample has. Pure.

Invariants: token ids, log-probs and versions are the engine's; arrays keep equal length; neighbouring runs of one
version are one run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from stages.messages import Float32Array, Int32Array, Sample, Status, UInt8Array, VersionRun, wire
from stages.sampling.results import Finish, SampleResult
from stages.tools.stage import join_runs

STATUS_OF: Final[dict[Finish, Status]] = {
    "stop": "completed",
    "length": "truncated",
    "aborted": "aborted",
    "failed": "failed",
}


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


def append_result(sample: Sample, result: SampleResult) -> Sample:
    """The sample with what engines made of it in one turn. Status: stop -> completed, length -> truncated."""
    ids = result.token_ids
    error = None if result.error is None else f"{type(result.error).__name__}: {result.error}"
    return msgspec.structs.replace(
        sample,
        status=STATUS_OF[result.finish],
        error=error,
        response=sample.response + result.text,
        token_ids=wire(np.concatenate([sample.token_ids, ids]), Int32Array),
        loss_mask=wire(np.concatenate([sample.loss_mask, np.ones(len(ids))]), UInt8Array),
        log_probs=wire(np.concatenate([sample.log_probs, result.log_probs]), Float32Array),
        version_runs=join_runs(sample.version_runs, result.runs),
        cached_tokens=sample.cached_tokens + result.cached_tokens,
        retractions=sample.retractions + result.retractions,
        resumed=sample.resumed + result.resumed,
        reused_tokens=sample.reused_tokens + result.reused_tokens,
        generate_s=sample.generate_s + result.spent_s,
        spec_proposed=sample.spec_proposed + result.spec_proposed,
        spec_accepted=sample.spec_accepted + result.spec_accepted,
        # A turn's experts begin with the first token of its context; what earlier turns said of those made the tokens.
        routed_experts=sample.routed_experts + result.routed_experts[len(sample.routed_experts) :],
    )
