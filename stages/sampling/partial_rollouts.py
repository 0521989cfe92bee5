"""What a call has lost so far, and whether it goes on: a bounded number of times, or until its deadline.

What becomes of a request that an update or the loss of its engine cuts up: each member goes on from what it has.

A request for n answers is one HTTP request, of which each member is handed on as it ends. Whatever breaks it up, each
member that has not ended then goes on alone, behind its partial output (`--partial-rollout`) or from the beginning.

Invariants:
- a token is in a result once: of a lost request only the certain prefix is kept, and the next request begins after it;
- a member that ended in a broken stream is whole and is not asked again;
- a stop string ends a member wherever it was cut up: an engine looks for it in what it makes itself;
- a member that cannot be generated fails alone, with the reason: nothing is raised for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import msgspec

from models.engines.errors import (
    EngineAborted,
    EngineError,
    EngineProtocolError,
    EngineRefused,
    EngineTimeout,
    EngineUnreachable,
)
from models.engines.text import ends_within_stop
from stages.sampling.attempt import Attempt, Progress
from stages.sampling.requests import Chunk, SampleRequest, SampleResult, failed

TRANSIENT_STATUS: Final = (408, 425, 429)  # refusals that are no fault of the request
LOSSES: Final = (EngineUnreachable, EngineTimeout, EngineAborted, EngineProtocolError)
FIRST_PAUSE_S: Final = 0.2  # before a lost request is sent again, doubled at each loss
LONGEST_PAUSE_S: Final = 5.0


class UnknownPolicy(EngineError):
    """A name that none of the models asked here has."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        super().__init__(name, tuple(known))
        self.name, self.known = name, tuple(known)

    def __str__(self) -> str:
        return f"no engine is called {self.name!r} here; the known names are {', '.join(self.known) or 'none'}"


@dataclass
class Losses:
    """Of one member in one call, and until when the call may go on."""

    deadline: float | None  # by the monotonic clock
    count: int = 0
    engine: str = ""  # that was lost last

    @classmethod
    def until(cls, deadline_s: float | None) -> Losses:
        return cls(None if deadline_s is None else time.monotonic() + deadline_s)

    @property
    def left_s(self) -> float | None:
        return None if self.deadline is None else self.deadline - time.monotonic()

    @property
    def pause_s(self) -> float:
        """How long to wait before the next try."""
        return min(FIRST_PAUSE_S * 2.0 ** min(max(self.count - 1, 0), 10), LONGEST_PAUSE_S)

    def count_in(self, error: Exception, *, progress: bool) -> bool:
        """Take note of a failed request. False if sending it again cannot help.

        A request that took too long but brought tokens has lost nothing: the next one begins after them.
        """
        transient = isinstance(error, EngineRefused) and error.status in TRANSIENT_STATUS
        if not transient and not isinstance(error, LOSSES):
            return False
        if not (isinstance(error, EngineTimeout) and progress):
            self.count += 1
        return True

    def may_go_on(self, max_retries: int) -> bool:
        """Who has a deadline tries until then: a killed engine costs time, not answers. Others count."""
        left_s = self.left_s
        return self.count <= max_retries if left_s is None else self.pause_s < left_s


Emit = Callable[[int, SampleResult], None]


@dataclass(frozen=True)
class Call:
    """One call of a caller, and who is told what comes of it."""

    request: SampleRequest
    losses: Losses
    emit: Emit  # of each member, when it has ended
    tell: Callable[[int, Chunk], None] | None = None  # of each member's tokens as they come
    had: Sequence[SampleResult] = ()  # what each member begins with, of requests that somebody else sent; none: nothing
    progress: Progress | None = None


class RequestSender(Protocol):
    """What sends single requests: the sampler."""

    async def ask(self, call: Call, index: int, results: Sequence[SampleResult], ended: Emit) -> Attempt: ...
    async def survives(self, request: SampleRequest, losses: Losses, error: Exception, *, progress: bool) -> bool: ...
    def drains(self, request: SampleRequest) -> bool: ...


class PartialRollouts:
    """`answer` has each member of a call emitted once."""

    def __init__(self, sender: RequestSender, *, keeps_partial: bool) -> None:
        self._sender, self._keeps_partial = sender, keeps_partial

    async def answer(self, call: Call) -> None:
        had = list(call.had) or [SampleResult()] * call.request.n
        async with asyncio.TaskGroup() as tasks:

            def go_on(index: int, result: SampleResult) -> None:
                # Each member counts on from what the joint request lost.
                tasks.create_task(self._alone(replace(call, losses=replace(call.losses)), index, result))

            if call.request.n > 1 and all(result.finish == "pending" for result in had):
                await self._together(call, had, go_on)
                return
            for index, result in enumerate(had):
                if result.finish == "pending" or goes_on(result):
                    go_on(index, result)
                else:
                    call.emit(index, result)

    async def _together(self, call: Call, results: list[SampleResult], go_on: Emit) -> None:
        """One request for all; sent again as it is while nothing at all has come of it. What an update aborted goes on
        at once, whatever the others do."""

        def ended(index: int, result: SampleResult) -> None:
            (go_on if goes_on(result) else call.emit)(index, result)

        while True:
            attempt = await self._sender.ask(call, 0, results, ended)
            if attempt.error is None:
                return
            left = attempt.left
            if not await self._sender.survives(call.request, call.losses, attempt.error, progress=False):
                for index, result in left.items():
                    call.emit(index, failed(result, attempt.error))
                return
            if len(left) < call.request.n or any(result.token_ids for result in left.values()):
                for index, result in left.items():
                    go_on(index, result)
                return
            results = list(left.values())

    async def _alone(self, call: Call, index: int, result: SampleResult) -> None:
        """Requests for one member until it has ended."""
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
                if not await self._sender.survives(call.request, call.losses, attempt.error, progress=progress):
                    ended.append(failed(result, attempt.error))
            elif goes_on(ended[0]):
                [result] = ended
                continue
            if ended:
                call.emit(index, ended[0])
                return

    def _from_where(self, call: Call, result: SampleResult) -> SampleResult:
        """What an aborted member goes on from: its partial output, or the beginning of the request. The tokens of a
        text are the engine's to know, so that none can be put behind it. Behind the first half of a stop string none
        can either, for the engine would not see it completed. What was told of is always kept."""
        kept, stop = result, call.request.params.stop or ()
        within = ends_within_stop(result.text, [stop] if isinstance(stop, str) else stop)
        if (not call.tell and (within or not self._keeps_partial)) or call.request.text:
            kept = SampleResult("aborted", resumed=result.resumed, spent_s=result.spent_s)
        return msgspec.structs.replace(kept, resumed=result.resumed + 1)


def goes_on(result: SampleResult) -> bool:
    """Whether a member that an engine gave back is to be continued: it was aborted, and not by us."""
    return result.finish == "aborted" and not result.reason
