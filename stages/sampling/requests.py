"""What a caller may ask of engines: a sampled answer, or log-probs of tokens that are there. No engine is named in it.

Invariant: a request says whose weights it wants (`policy`), never which engine: it may be answered by several, one
after the other, each of which gets it with what the ones before it made (`on_the_wire`).

From engines' answers to one result: tokens, log-probs and versions of the pieces joined. Pure.

Invariants: token ids, log-probs and versions are the engine's; all have one length; neighbouring runs of one version
are one run.

The members of a request, handed over one by one.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Generic, Literal, TypeVar

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from models.engines.answers import AnswerLimits
from models.engines.errors import EngineProtocolError
from models.engines.noise import sample_seed
from models.engines.protocol import GenerateOutput, GenerateRequest, SamplingParams
from stages.messages import VersionRun
from stages.rollouts import join_runs
from stages.sampling.engine_choice import FIRST_COME
from stages.topic_values import POLICY

SHORT_RESPONSE: Final = 16  # tokens; the members of a request for so few end within milliseconds of each other


@dataclass(frozen=True)
class SampleRequest:
    """`params.n` answers to one context, the members of the request. A partial answer that the caller has already is
    part of `token_ids`.

    With `engine_s` a member is given back as it is when engines have worked on it for so long; waiting for one does not
    count. With `deadline_s` the whole call, waiting included, fails at that time, and until then is sent again as often
    as it is lost; without, losses are counted.
    """

    params: SamplingParams  # max_new_tokens and sampling_seed are those of the request, whatever pieces it comes in
    token_ids: Sequence[int] = ()
    text: str = ""  # instead of token ids, for an engine to tokenise
    prompt_length: int = 0  # tokens that all requests of a prompt have in common; 0: all
    policy: str = POLICY
    session: str = ""  # requests of one session go to one engine, where the policy of routing heeds it
    returning: bool = False  # it has been here before, and goes before those that have not
    order: tuple[int, int] = FIRST_COME  # smaller ones go first, among those that are alike in this
    log_probs: bool = True
    pinned_version: int = -1  # engines with this version come first
    priority: int | None = None  # in the engine's queue
    engine_s: float | None = None
    deadline_s: float | None = None

    @property
    def n(self) -> int:
        return self.params.n


@dataclass(frozen=True)
class ScoreRequest:
    """Log-probs of `token_ids[start:]`, each given all tokens before it, of log_softmax(logits / temperature)."""

    token_ids: npt.NDArray[np.int32]
    start: int
    temperature: float = 1.0
    policy: str = POLICY
    session: str = ""
    deadline_s: float | None = None


def on_the_wire(request: SampleRequest, rid: str, index: int, n: int, made: Sequence[int]) -> GenerateRequest:
    """The request as an engine gets it for the `n` members from `index` on, which have the tokens `made` so far. A
    member that goes on alone draws what it would have drawn among all."""
    params = request.params
    budget = None if params.max_new_tokens is None else params.max_new_tokens - len(made)
    seed = params.sampling_seed
    if n == 1 and seed is not None:
        seed = sample_seed(seed, index)
    return GenerateRequest(
        rid=rid,
        input_ids=None if request.text else [*request.token_ids, *made],
        text=request.text or None,
        sampling_params=replace(params, n=n, max_new_tokens=budget, sampling_seed=seed),
        return_logprob=request.log_probs,
        priority=request.priority,
    )


def told_each(wire: GenerateRequest, tokens: int) -> GenerateRequest:
    """The request to an engine that would tell of a member only when it has ended."""
    params = wire.sampling_params
    if isinstance(params, list):
        return wire
    return replace(wire, sampling_params=replace(params, stream_interval=tokens))


def worth_a_stream(request: SampleRequest) -> bool:
    """Whether hearing of each member when it ends, instead of all at the end, gives slots back in time that counts."""
    budget = request.params.max_new_tokens
    return request.n > 1 and (budget is None or budget > SHORT_RESPONSE)


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


T = TypeVar("T", SampleResult, SampleResult | Chunk)


class Members(Generic[T]):
    """The members of a request, in the order in which they end; with chunks, what comes of them before that too."""

    def __init__(self, n: int) -> None:
        self.left = n
        self._queue: asyncio.Queue[tuple[int, T]] = asyncio.Queue()

    def put(self, index: int, item: T) -> None:
        self._queue.put_nowait((index, item))

    def __aiter__(self) -> Members[T]:
        return self

    async def __anext__(self) -> tuple[int, T]:
        if not self.left:
            raise StopAsyncIteration
        index, item = await self._queue.get()
        self.left -= isinstance(item, SampleResult)
        return index, item
