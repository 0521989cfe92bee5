"""What a caller requests of engines and what it gets: a sampled answer, or log-probs of given tokens.

Invariants:
- a request names the policy whose weights it wants, never an engine. Several engines may answer it in turn; each gets
  it with the tokens of the previous engines appended (`on_the_wire`);
- token ids, log-probs and versions are the engine's; all have one length; neighbouring runs of one version are one
  run.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic, Literal, TypeVar

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from models.engines.answers import AnswerLimits
from models.engines.noise import sample_seed
from models.engines.protocol import GenerateOutput, GenerateRequest, SamplingParams
from models.errors import EngineProtocolError
from stages.messages import VersionRun
from stages.rollouts import join_runs
from stages.sampling.engine_choice import FIRST_COME
from stages.topic_values import POLICY, TRAINED

SHORT_RESPONSE: Final = 16  # tokens; the members of a request for so few end within milliseconds of each other


@dataclass(frozen=True)
class SampleRequest:
    """`params.n` answers to one context: the members of the request. A partial answer that the caller already has is
    part of `token_ids`.

    `engine_s` limits the seconds that engines work on a member, waiting excluded; then the member is returned as it is.
    `deadline_s` limits the whole call, waiting included; until then a lost request is sent again without a count.
    Without a deadline lost requests are counted.
    """

    params: SamplingParams  # max_new_tokens and sampling_seed of the whole request, however many pieces it takes
    token_ids: Sequence[int] = ()
    text: str = ""  # instead of token ids, for an engine to tokenise
    prompt_length: int = 0  # tokens that all requests of a prompt share; 0: all
    policy: str = POLICY
    session: str = ""  # requests of one session go to one engine, if the routing policy uses sessions
    group: int = -1  # for the trace, which has no requests without a group
    returning: bool = False  # a later turn: it precedes first turns in the queue
    order: tuple[int, int] = FIRST_COME  # smaller first, among first turns or among later turns
    log_probs: bool = True
    pinned_version: int = -1  # prefer engines with this version
    priority: int | None = None  # in the engine's queue
    engine_s: float | None = None
    deadline_s: float | None = None
    cancel_stale: bool = False  # end it when later batches may not train its tokens any more
    cancel_decided: bool = False  # end it when the outcome of the group that `session` names is known

    @property
    def n(self) -> int:
        return self.params.n

    @property
    def worth_a_stream(self) -> bool:
        """Whether a stream, which returns each member's slot as it ends, pays for itself."""
        budget = self.params.max_new_tokens
        return self.n > 1 and (budget is None or budget > SHORT_RESPONSE)


class ScoreRequest(Struct, frozen=True):
    """Log-probs of `token_ids[start:]`, each given all tokens before it, of log_softmax(logits / temperature)."""

    token_ids: npt.NDArray[np.int32]
    start: int
    temperature: float = 1.0
    policy: str = POLICY
    session: str = ""
    deadline_s: float | None = None


def on_the_wire(request: SampleRequest, rid: str, index: int, n: int, made: Sequence[int]) -> GenerateRequest:
    """The engine request for the `n` members from `index` on, which have the tokens `made` so far.

    A member that continues alone draws the same samples that it would have drawn among all members.
    """
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


def with_stream_interval(wire: GenerateRequest, tokens: int) -> GenerateRequest:
    """The request with a report every `tokens` tokens, for an engine that otherwise reports only a member's end."""
    params = wire.sampling_params
    return wire if isinstance(params, list) else replace(wire, sampling_params=replace(params, stream_interval=tokens))


Finish = Literal["pending", "stop", "length", "aborted", "failed"]
FINISH_OF: Final[dict[str, Finish]] = {"stop": "stop", "length": "length", "abort": "aborted"}
OUT_OF_TIME: Final = "engines have worked on it for engine_s"
DRAINED: Final = "the run is stopping"
TOO_OLD: Final = "later batches may not train its tokens"
SUPERFLUOUS: Final = "its group is dropped whatever it would have been"


class VersionLabelError(Exception):
    """An engine reported weights that this run did not publish."""


def label_version(label: str) -> int:
    """`run_generation.version` -> version."""
    _, separator, version = label.partition(".")
    if not separator or not (version.isascii() and version.isdigit() and len(version) < 10):
        raise VersionLabelError(
            f"weights label {label[:80]!r} is not of the form generation.version; has someone else updated the engine?"
        )
    return int(version)


class SampleResult(Struct, frozen=True):
    """One member of a request, complete or so far. Counts are sums over all requests that produced it."""

    finish: Finish = "pending"
    token_ids: tuple[int, ...] = ()  # [R]
    log_probs: tuple[float, ...] = ()  # [R], or empty if the request did not want them
    runs: tuple[VersionRun, ...] = ()  # over all R tokens; version -1 for frozen weights
    text: str = ""
    reason: str = ""  # why it was aborted
    error: Exception | None = None  # why it failed
    cached_tokens: int = 0
    retractions: int = 0
    resumed: int = 0  # how often a further request continued it
    reused_tokens: int = 0  # saved from lost requests
    spec_proposed: int = 0
    spec_accepted: int = 0
    routed_experts: bytes = b""  # of all tokens but the last, starting with the context
    spent_s: float = 0.0  # seconds that engines worked on it
    figures: dict[str, float] = {}  # of the engines, see `summed`


class Chunk(Struct, frozen=True):
    """Further tokens of a member. They are final: the result holds them, even if the engine is lost."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]  # zeros if the request did not want them


def failed(had: SampleResult, error: Exception) -> SampleResult:
    return replace(had, finish="failed", error=error)


class Sent(Struct, frozen=True):
    """Facts about a sent request that its answers are checked against."""

    limits: AnswerLimits | None = None
    met: str | None = None  # label of the engine's weights at the time, if certain
    generation: str = ""  # of the weights of this run, "" before any
    oldest: int = -1  # lowest version that the engine can have had
    newest: int | None = None  # highest version that it can have now, if known

    def version(self, label: str) -> int:
        """The version of a label. Raises VersionLabelError for weights that the engine cannot have used."""
        prefix, _, _ = label.partition(".")
        version = label_version(label)
        if self.generation and prefix != self.generation:
            raise VersionLabelError(f"weights {label!r} are of another run; this run's are called {self.generation}.N")
        if self.met is not None and version < label_version(self.met):
            raise VersionLabelError(f"weights {label!r} are older than {self.met}, which the engine had at the request")
        if version < self.oldest:
            raise VersionLabelError(f"weights {label!r} are older than {self.oldest}, which it had at the request")
        if self.newest is not None and version > self.newest:
            raise VersionLabelError(f"weights {label!r} are newer than any that were published (up to {self.newest})")
        return version


UNCHECKED: Final = Sent()
FIRST_TOKEN: Final = "rollout/time_to_first_token"
QUEUED: Final = "rollout/queue_time"
PREFILL: Final = "rollout/prefill_tokens"


def summed(had: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    """The figures of all requests of a rollout: sums, but of the time to the first token that of the first request."""
    return {**more, **had} | {name: had[name] + n for name, n in more.items() if name in had and name != FIRST_TOKEN}


def extended(
    request: SampleRequest, had: SampleResult, output: GenerateOutput, spent_s: float, sent: Sent = UNCHECKED
) -> SampleResult:
    """The result with one answer appended; failed, without the answer, if the answer does not fit the request."""
    reason = output.meta_info.finish_reason
    finish = FINISH_OF.get(reason.type if reason else "")
    if finish is not None:
        return _appended(request, had, output, spent_s, finish, sent)
    error = EngineProtocolError(output.meta_info.id, f"engine finished with {reason.type if reason else 'no reason'}")
    return failed(_appended(request, had, output, spent_s, "failed", sent), error)


def with_saved(
    request: SampleRequest, had: SampleResult, output: GenerateOutput | None, spent_s: float, sent: Sent, *, lost: bool
) -> SampleResult:
    """The result with the certain part of an unfinished answer: aborted. `lost`: the engine did not return it."""
    if output is None:
        return replace(had, finish="aborted", spent_s=had.spent_s + spent_s)
    kept = _appended(request, had, output, spent_s, "aborted", sent)
    return replace(kept, reused_tokens=had.reused_tokens + len(kept.token_ids) - len(had.token_ids)) if lost else kept


def _appended(
    request: SampleRequest, had: SampleResult, output: GenerateOutput, spent_s: float, finish: Finish, sent: Sent
) -> SampleResult:
    meta, ids = output.meta_info, output.output_ids
    named = request.policy in TRAINED  # frozen weights carry the name of their checkpoint, not a label
    spent_s += had.spent_s
    measured = {FIRST_TOKEN: meta.first_token_latency, QUEUED: meta.queue_time, PREFILL: meta.prompt_tokens}
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
        figures=summed(had.figures, {name: value for name, value in measured.items() if value is not None}),
    )


def _joined_experts(had: bytes, output: GenerateOutput) -> bytes:
    """Choices of experts for all tokens but the last, starting with the context.

    Every answer repeats its context. The first choice of a token counts, because it produced the tokens.
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
    """The members of a request in the order in which they end; with chunks, also their tokens before that."""

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
