"""What happens to a request that an update or the loss of its engine breaks up: each member continues from what it has.

A request for n answers is one HTTP request; each member is handed on as it ends. If the request breaks, each member
that has not ended continues alone, behind its partial output (`--partial-rollout`) or from the beginning.
`RetryState` bounds how often, by a count and by the deadline.

Invariants:
- a token is in a result once: of a lost request only the certain prefix is kept, and the next request begins after
  it;
- a member that ended in a broken stream is complete and is not requested again;
- a stop string ends a member even where the request was cut inside it: an engine looks only at what it generates;
- a member that cannot be generated fails alone, with the reason; no exception is raised for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import msgspec

from models.engines.text import ends_within_stop
from models.errors import (
    EngineAborted,
    EngineError,
    EngineProtocolError,
    EngineRefused,
    EngineTimeout,
    EngineUnreachable,
)
from stages.sampling.attempt import Attempt, Progress
from stages.sampling.requests import Chunk, SampleRequest, SampleResult, failed

TRANSIENT_STATUS: Final = (408, 425, 429)  # refusals that are no fault of the request
LOSSES: Final = (EngineUnreachable, EngineTimeout, EngineAborted, EngineProtocolError)
FIRST_PAUSE_S: Final = 0.2  # before a lost request is sent again, doubled at each loss
LONGEST_PAUSE_S: Final = 5.0


class UnknownPolicy(EngineError):
    """A policy name that no engine of this sampler serves."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        super().__init__(name, tuple(known))
        self.name, self.known = name, tuple(known)

    def __str__(self) -> str:
        return f"no engine is called {self.name!r} here; the known names are {', '.join(self.known) or 'none'}"


@dataclass
class RetryState:
    """The retry budget of one member in one call: failed requests so far, and the deadline."""

    deadline: float | None  # by the monotonic clock
    count: int = 0
    engine: str = ""  # the engine that was lost last

    @classmethod
    def until(cls, deadline_s: float | None) -> RetryState:
        return cls(None if deadline_s is None else time.monotonic() + deadline_s)

    @property
    def left_s(self) -> float | None:
        return None if self.deadline is None else self.deadline - time.monotonic()

    @property
    def pause_s(self) -> float:
        """Seconds to wait before the next attempt."""
        return min(FIRST_PAUSE_S * 2.0 ** min(max(self.count - 1, 0), 10), LONGEST_PAUSE_S)

    def record(self, error: Exception, *, progress: bool) -> bool:
        """Record a failed request. False if sending it again cannot help.

        A request that timed out but returned tokens is no loss: the next request begins after them.
        """
        transient = isinstance(error, EngineRefused) and error.status in TRANSIENT_STATUS
        if not transient and not isinstance(error, LOSSES):
            return False
        if not (isinstance(error, EngineTimeout) and progress):
            self.count += 1
        return True

    def may_retry(self, max_retries: int) -> bool:
        """With a deadline: until then, so that a killed engine costs time and no answers. Without: a count."""
        left_s = self.left_s
        return self.count <= max_retries if left_s is None else self.pause_s < left_s


Emit = Callable[[int, SampleResult], None]


@dataclass(frozen=True)
class Call:
    """One call of the sampler, and the callbacks that receive its results."""

    request: SampleRequest
    retries: RetryState
    emit: Emit  # called once for each member, when it has ended
    tell: Callable[[int, Chunk], None] | None = None  # called with the tokens of each member as they arrive
    had: Sequence[SampleResult] = ()  # results of earlier requests that the members continue from; empty: from nothing
    progress: Progress | None = None


class RequestSender(Protocol):
    """Sends single requests: the sampler."""

    async def ask(self, call: Call, index: int, results: Sequence[SampleResult], ended: Emit) -> Attempt: ...
    async def wait_to_retry(
        self, request: SampleRequest, retries: RetryState, error: Exception, *, progress: bool
    ) -> bool: ...
    def drains(self, request: SampleRequest) -> bool: ...


class PartialRollouts:
    """`answer` emits each member of a call exactly once."""

    def __init__(self, sender: RequestSender, *, keeps_partial: bool) -> None:
        self._sender, self._keeps_partial = sender, keeps_partial

    async def answer(self, call: Call) -> None:
        had = list(call.had) or [SampleResult()] * call.request.n
        async with asyncio.TaskGroup() as tasks:

            def go_on(index: int, result: SampleResult) -> None:
                # Each member continues the retry count of the joint request.
                tasks.create_task(self._alone(replace(call, retries=replace(call.retries)), index, result))

            if call.request.n > 1 and all(result.finish == "pending" for result in had):
                await self._together(call, had, go_on)
                return
            for index, result in enumerate(had):
                if result.finish == "pending" or goes_on(result):
                    go_on(index, result)
                else:
                    call.emit(index, result)

    async def _together(self, call: Call, results: list[SampleResult], go_on: Emit) -> None:
        """One request for all members, sent again unchanged while it has returned nothing at all.

        A member that an update aborted continues at once, whatever the other members do.
        """

        def ended(index: int, result: SampleResult) -> None:
            (go_on if goes_on(result) else call.emit)(index, result)

        while True:
            attempt = await self._sender.ask(call, 0, results, ended)
            if attempt.error is None:
                return
            left = attempt.left
            if not await self._sender.wait_to_retry(call.request, call.retries, attempt.error, progress=False):
                for index, result in left.items():
                    call.emit(index, failed(result, attempt.error))
                return
            if len(left) < call.request.n or any(result.token_ids for result in left.values()):
                for index, result in left.items():
                    go_on(index, result)
                return
            results = list(left.values())

    async def _alone(self, call: Call, index: int, result: SampleResult) -> None:
        """Send requests for one member until it has ended."""
        while True:
            if result.finish == "aborted" and not self._sender.drains(call.request):
                result = self._from_where(call, result)
            ended: list[SampleResult] = []

            def take(_: int, result: SampleResult, ended: list[SampleResult] = ended) -> None:
                ended.append(result)

            attempt = await self._sender.ask(call, index, [result], take)
            if attempt.error is not None and not ended:
                [result] = attempt.left.values()
                progress = not attempt.crawled
                if not await self._sender.wait_to_retry(call.request, call.retries, attempt.error, progress=progress):
                    ended.append(failed(result, attempt.error))
            elif goes_on(ended[0]):
                [result] = ended
                continue
            if ended:
                call.emit(index, ended[0])
                return

    def _from_where(self, call: Call, result: SampleResult) -> SampleResult:
        """What an aborted member continues from: its partial output, or the beginning of the request.

        It starts over in two cases. Only the engine knows the tokens of a text prompt, so none can be appended to it.
        After the first half of a stop string none can be appended either: the engine would not see it completed.
        Tokens that were already reported to the caller are always kept.
        """
        kept, stop = result, call.request.params.stop or ()
        within = ends_within_stop(result.text, [stop] if isinstance(stop, str) else stop)
        if (not call.tell and (within or not self._keeps_partial)) or call.request.text:
            kept = SampleResult("aborted", resumed=result.resumed, spent_s=result.spent_s)
        return msgspec.structs.replace(kept, resumed=result.resumed + 1)


def goes_on(result: SampleResult) -> bool:
    """Whether a member must be continued: the engine aborted it, and this client did not request that."""
    return result.finish == "aborted" and not result.reason
