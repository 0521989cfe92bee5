"""What becomes of a request that an update or the loss of its engine cuts up: each member goes on from what it has.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from models.engines.text import ends_within_stop
from stages.sampling.attempt import Attempt, Progress
from stages.sampling.losses import Losses
from stages.sampling.requests import SampleRequest
from stages.sampling.results import Chunk, SampleResult, failed

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
