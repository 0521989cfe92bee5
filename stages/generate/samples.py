"""From engines' answers to a sample: what a result brings, put behind what the sample has. Pure.

Invariants: token ids, log-probs and versions are the engine's; arrays keep equal length; neighbouring runs of one
version are one run.
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np

from stages.messages import Float32Array, Int32Array, Sample, Status, UInt8Array, VersionRun, wire
from stages.sampling.results import Finish, SampleResult
from stages.tools.stage import join_runs

STATUS_OF: Final[dict[Finish, Status]] = {
    "stop": "completed",
    "length": "truncated",
    "aborted": "aborted",
    "failed": "failed",
}


def new_sample(index: int) -> Sample:
    return Sample(index, "pending", "", wire([], Int32Array), wire([], UInt8Array), wire([], Float32Array), ())


def cut(sample: Sample, n: int) -> Sample:
    """The first `n` tokens: for a sample whose last tokens, which the policy did not make, exceed its budget."""
    runs: list[VersionRun] = []
    left = n = max(n, 0)
    for run in sample.version_runs:
        runs.append(VersionRun(run.version, min(run.n_tokens, left)))
        left -= runs[-1].n_tokens
    return msgspec.structs.replace(
        sample,
        response_ids=wire(sample.response_ids[:n], Int32Array),
        loss_mask=wire(sample.loss_mask[:n], UInt8Array),
        rollout_log_probs=wire(sample.rollout_log_probs[:n], Float32Array),
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
        response_ids=wire(np.concatenate([sample.response_ids, ids]), Int32Array),
        loss_mask=wire(np.concatenate([sample.loss_mask, np.ones(len(ids))]), UInt8Array),
        rollout_log_probs=wire(np.concatenate([sample.rollout_log_probs, result.log_probs]), Float32Array),
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
