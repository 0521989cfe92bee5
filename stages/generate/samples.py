"""From an engine's answer to a sample: tokens, log-probs and versions joined to what the sample has.

Invariants: token ids, log-probs and versions are the engine's; arrays keep equal length; neighbouring runs of one
version are one run. Pure.
"""

from __future__ import annotations

import base64
import binascii

import msgspec
import numpy as np

from models.engines.errors import EngineProtocolError
from models.engines.protocol import GenerateOutput
from stages.messages import Float32Array, Int32Array, Sample, Status, UInt8Array, VersionRun, wire
from stages.tools.stage import join_runs

STATUS_OF: dict[str, Status] = {"stop": "completed", "length": "truncated", "abort": "aborted"}


class VersionLabelError(Exception):
    """An engine named weights that this run did not publish."""


def label_version(label: str) -> int:
    """`epoch.version` -> version."""
    _, separator, version = label.partition(".")
    if not separator or not version.isdigit():
        raise VersionLabelError(
            f"weights label {label!r} is not of the form epoch.version; was the engine updated by someone else?"
        )
    return int(version)


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


def append_output(sample: Sample, output: GenerateOutput, generate_s: float) -> Sample:
    """The sample with one engine answer after it. Status: stop -> completed, length -> truncated, abort -> aborted."""
    reason = output.meta_info.finish_reason
    status = STATUS_OF.get(reason.type if reason else "", "failed")
    error = f"engine finished with {reason.type if reason else 'no reason'}" if status == "failed" else None
    return _appended(sample, output, generate_s, status, error)


def append_saved(sample: Sample, output: GenerateOutput | None, generate_s: float) -> Sample:
    """The sample with what a lost engine left of its answer: aborted, unless the answer had ended by then."""
    if output is None:
        return msgspec.structs.replace(sample, status="aborted", generate_s=sample.generate_s + generate_s)
    if output.meta_info.finish_reason is not None:
        return append_output(sample, output, generate_s)
    kept = _appended(sample, output, generate_s, "aborted", None)
    return msgspec.structs.replace(kept, reused_tokens=kept.reused_tokens + len(output.output_ids))


def _appended(sample: Sample, output: GenerateOutput, generate_s: float, status: Status, error: str | None) -> Sample:
    meta, ids, log_probs = output.meta_info, output.output_ids, output.output_log_probs
    runs = tuple(VersionRun(label_version(s.version), s.end - s.start) for s in output.version_spans)
    return msgspec.structs.replace(
        sample,
        status=status,
        error=error,
        response=sample.response + output.text,
        response_ids=wire(np.concatenate([sample.response_ids, ids]), Int32Array),
        loss_mask=wire(np.concatenate([sample.loss_mask, np.ones(len(ids))]), UInt8Array),
        rollout_log_probs=wire(np.concatenate([sample.rollout_log_probs, log_probs]), Float32Array),
        version_runs=join_runs(sample.version_runs, runs),
        cached_tokens=sample.cached_tokens + (meta.cached_tokens or 0),
        retractions=sample.retractions + (meta.num_retractions or 0),
        generate_s=sample.generate_s + generate_s,
        spec_proposed=sample.spec_proposed + (meta.spec_num_proposed_drafts or 0),
        spec_accepted=sample.spec_accepted + (meta.spec_num_correct_drafts or 0),
        routed_experts=_joined_experts(sample.routed_experts, output),
    )


def _joined_experts(had: bytes, output: GenerateOutput) -> bytes:
    """Choices of experts for all tokens but the last, from the first of the prompt on.

    Every answer begins with its prompt, and so repeats what the sample has; of that, the first choice counts, for it
    made the tokens.
    """
    sent = output.meta_info.routed_experts
    if not sent:
        return had
    try:
        experts = base64.b64decode(sent, validate=True)
    except binascii.Error as error:
        raise EngineProtocolError(output.meta_info.id, f"routed_experts is not base64: {error}") from error
    return had + experts[len(had) :]
