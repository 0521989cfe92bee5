"""From engines' answers to one result: tokens, log-probs and versions of the pieces joined. Pure.

Invariants: token ids, log-probs and versions are the engine's; all have one length; neighbouring runs of one version
are one run.
"""

from __future__ import annotations

import base64
import binascii
from typing import Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from models.engines.answers import AnswerLimits
from models.engines.errors import EngineProtocolError
from models.engines.protocol import GenerateOutput
from stages.engine_entries import POLICY
from stages.messages import VersionRun
from stages.sampling.requests import SampleRequest
from stages.sequences import join_runs

Finish = Literal["pending", "stop", "length", "aborted", "failed"]
FINISH_OF: Final[dict[str, Finish]] = {"stop": "stop", "length": "length", "abort": "aborted"}
OUT_OF_TIME: Final = "engines have worked on it for engine_s"
DRAINED: Final = "the run is stopping"


class VersionLabelError(Exception):
    """An engine named weights that this run did not publish."""


def label_version(label: str) -> int:
    """`run_generation.version` -> version."""
    _, separator, version = label.partition(".")
    if not separator or not (version.isascii() and version.isdigit() and len(version) < 10):
        raise VersionLabelError(
            f"weights label {label[:80]!r} is not of the form generation.version; has someone else updated the engine?"
        )
    return int(version)


class SampleResult(Struct, frozen=True):
    """One member of a request, in the end or so far. What is summed counts all pieces that it was made in."""

    finish: Finish = "pending"
    token_ids: tuple[int, ...] = ()  # [R]
    log_probs: tuple[float, ...] = ()  # [R], or empty if they were not asked for
    runs: tuple[VersionRun, ...] = ()  # over all R tokens; version -1 of weights that never change
    text: str = ""
    reason: str = ""  # why it was aborted
    error: Exception | None = None  # why it failed
    cached_tokens: int = 0
    retractions: int = 0
    resumed: int = 0  # times that another request went on with it
    reused_tokens: int = 0  # saved from requests that were lost
    spec_proposed: int = 0
    spec_accepted: int = 0
    routed_experts: bytes = b""  # of all tokens but the last, from the first of the context on
    spent_s: float = 0.0  # engines worked on it


class Chunk(Struct, frozen=True):
    """Further tokens of a member. They stay: whatever becomes of its engine, they are in its result."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]  # zeros if they were not asked for


def failed(had: SampleResult, error: Exception) -> SampleResult:
    return replace(had, finish="failed", error=error)


class Sent(Struct, frozen=True):
    """What is known of a request that was sent, for its answers to be checked by."""

    limits: AnswerLimits | None = None
    met: str | None = None  # the weights that the engine had, if that is certain
    generation: str = ""  # of the weights of this run, "" before any
    oldest: int = -1  # version that the engine had at least
    newest: int | None = None  # version that it can have now at most, if that is known

    def version(self, label: str) -> int:
        """Raises VersionLabelError for weights that the engine cannot have made tokens with."""
        prefix, _, _ = label.partition(".")
        version = label_version(label)
        if self.generation and prefix != self.generation:
            raise VersionLabelError(
                f"weights {label!r} are of another run; those of this run are called {self.generation}.N"
            )
        if self.met is not None and version < label_version(self.met):
            raise VersionLabelError(f"weights {label!r} are older than {self.met}, which the engine had when asked")
        if version < self.oldest:
            raise VersionLabelError(f"weights {label!r} are older than version {self.oldest}, which it had when asked")
        if self.newest is not None and version > self.newest:
            raise VersionLabelError(f"weights {label!r} are newer than any that were published (up to {self.newest})")
        return version


UNCHECKED: Final = Sent()


def extended(
    request: SampleRequest, had: SampleResult, output: GenerateOutput, spent_s: float, sent: Sent = UNCHECKED
) -> SampleResult:
    """The result with one answer after it; failed, without the answer, if that is not what was asked for."""
    reason = output.meta_info.finish_reason
    finish = FINISH_OF.get(reason.type if reason else "")
    if finish is not None:
        return _appended(request, had, output, spent_s, finish, sent)
    error = EngineProtocolError(output.meta_info.id, f"engine finished with {reason.type if reason else 'no reason'}")
    return failed(_appended(request, had, output, spent_s, "failed", sent), error)


def with_saved(
    request: SampleRequest,
    had: SampleResult,
    output: GenerateOutput | None,
    spent_s: float,
    sent: Sent = UNCHECKED,
    *,
    lost: bool,
) -> SampleResult:
    """The result with what there is of an answer that did not end: aborted. `lost`: its engine did not give it back."""
    if output is None:
        return replace(had, finish="aborted", spent_s=had.spent_s + spent_s)
    kept = _appended(request, had, output, spent_s, "aborted", sent)
    return replace(kept, reused_tokens=had.reused_tokens + len(kept.token_ids) - len(had.token_ids)) if lost else kept


def _appended(
    request: SampleRequest, had: SampleResult, output: GenerateOutput, spent_s: float, finish: Finish, sent: Sent
) -> SampleResult:
    meta, ids = output.meta_info, output.output_ids
    named = request.policy == POLICY  # weights that never change are called as their checkpoint is
    spent_s += had.spent_s
    try:
        if sent.limits is not None:
            sent.limits.check(output)
        runs = tuple(
            VersionRun(sent.version(span.version) if named else -1, span.end - span.start)
            for span in output.version_spans
        )
        log_probs = (*had.log_probs, *output.output_log_probs) if request.log_probs else ()
        experts = _joined_experts(had.routed_experts, output)
    except (EngineProtocolError, VersionLabelError, ValueError) as error:
        return failed(replace(had, spent_s=spent_s), error)
    return replace(
        had,
        finish=finish,
        token_ids=(*had.token_ids, *ids),
        log_probs=log_probs,
        runs=join_runs(had.runs, runs),
        text=had.text + output.text,
        cached_tokens=had.cached_tokens + (meta.cached_tokens or 0),
        retractions=had.retractions + (meta.num_retractions or 0),
        spec_proposed=had.spec_proposed + (meta.spec_num_proposed_drafts or 0),
        spec_accepted=had.spec_accepted + (meta.spec_num_correct_drafts or 0),
        routed_experts=experts,
        spent_s=spent_s,
    )


def _joined_experts(had: bytes, output: GenerateOutput) -> bytes:
    """Choices of experts for all tokens but the last, from the first of the context on.

    Every answer begins with its context, and so repeats what is known already; of that, the first choice counts, for it
    made the tokens.
    """
    sent = output.meta_info.routed_experts
    if not sent:
        return had
    try:
        experts = base64.b64decode(sent, validate=True)
    except binascii.Error as error:
        raise EngineProtocolError(output.meta_info.id, f"routed_experts is not base64: {error}") from error
    if len(experts) % 4:
        raise EngineProtocolError(output.meta_info.id, f"routed_experts has {len(experts)} bytes, which are no int32")
    return had + experts[len(had) :]
