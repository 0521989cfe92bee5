"""From engines' answers to a sample: what a result brings, put behind what the sample has. Pure.

Invariants: token ids, log-probs and versions are the engine's; arrays keep equal length; neighbouring runs of one
version are one run.
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np

from stages.messages import NO_IDS, Extra, Sample, Status, joined
from stages.rollouts import join_runs
from stages.sampling.requests import Finish, SampleResult

EXPERTS: Final = "routed_experts"  # among the extras, if the engine was asked for them
STATUS_OF: Final[dict[Finish, Status]] = {
    "stop": "completed",
    "length": "truncated",
    "aborted": "aborted",
    "failed": "failed",
}


def append_result(sample: Sample, result: SampleResult) -> Sample:
    """The sample with what engines made of it in one turn. Status: stop -> completed, length -> truncated."""
    ids = result.token_ids
    error = None if result.error is None else f"{type(result.error).__name__}: {result.error}"
    return msgspec.structs.replace(
        sample,
        status=STATUS_OF[result.finish],
        error=error,
        response=sample.response + result.text,
        token_ids=joined(sample.token_ids, ids),
        loss_mask=joined(sample.loss_mask, np.ones(len(ids), dtype="|u1")),
        log_probs=joined(sample.log_probs, result.log_probs),
        version_runs=join_runs(sample.version_runs, result.runs),
        cached_tokens=sample.cached_tokens + result.cached_tokens,
        retractions=sample.retractions + result.retractions,
        resumed=sample.resumed + result.resumed,
        reused_tokens=sample.reused_tokens + result.reused_tokens,
        generate_s=sample.generate_s + result.spent_s,
        spec_proposed=sample.spec_proposed + result.spec_proposed,
        spec_accepted=sample.spec_accepted + result.spec_accepted,
        extras=_with_experts(sample.extras, result.routed_experts),
    )


def _with_experts(extras: dict[str, Extra], experts: bytes) -> dict[str, Extra]:
    """The choices of experts, int32 of tokens x layers x top-k, in which each token of the context is told once.

    A turn's experts begin with the first token of its context; what earlier turns said of those made the tokens.
    """
    if not experts:
        return extras
    had, told = extras.get(EXPERTS, NO_IDS), np.frombuffer(experts, dtype="<i4")
    return {**extras, EXPERTS: np.concatenate([had, told[len(had) :]]).view(Extra)}
