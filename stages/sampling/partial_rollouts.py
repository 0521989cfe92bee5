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
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import msgspec

from models.engines.text import ends_within_stop
from models.errors import EngineError
from stages.sampling.attempt import Attempt, Call, Emit
from stages.sampling.requests import SampleRequest, SampleResult, failed
from stages.sampling.routes import RetryState


class UnknownPolicy(EngineError):
    """A policy name that no engine of this sampler serves."""


class RequestSender(Protocol):
    """Sends single requests: the sampler."""

    async def ask(self, call: Call, index: int, results: Sequence[SampleResult], ended: Emit) -> Attempt: ...
    async def wait_to_retry(
        self, request: SampleRequest, retries: RetryState, error: Exception, *, progress: bool
    ) -> bool: ...
    def drains(self, request: SampleRequest) -> bool: ...


async def answer(sender: RequestSender, call: Call) -> None:
    """Emit each member of the call exactly once."""
    had = list(call.had) or [SampleResult()] * call.request.n
    async with asyncio.TaskGroup() as tasks:

        def go_on(index: int, result: SampleResult) -> None:
            # Each member continues the retry count of the joint request.
            tasks.create_task(_alone(sender, replace(call, retries=replace(call.retries)), index, result))

        if call.request.n > 1 and all(result.finish == "pending" for result in had):
            await _together(sender, call, had, go_on)
            return
        for index, result in enumerate(had):
            (go_on if result.finish == "pending" or goes_on(result) else call.emit)(index, result)


async def _together(sender: RequestSender, call: Call, results: list[SampleResult], go_on: Emit) -> None:
    """One request for all members, sent again unchanged while it has returned nothing at all.

    A member that an update aborted continues at once, whatever the other members do.
    """

    def ended(index: int, result: SampleResult) -> None:
        (go_on if goes_on(result) else call.emit)(index, result)

    while True:
        attempt = await sender.ask(call, 0, results, ended)
        if attempt.error is None:
            return
        left = attempt.left
        if not await sender.wait_to_retry(call.request, call.retries, attempt.error, progress=False):
            for index, result in left.items():
                call.emit(index, failed(result, attempt.error))
            return
        if len(left) < call.request.n or any(result.token_ids for result in left.values()):
            for index, result in left.items():
                go_on(index, result)
            return
        results = list(left.values())


async def _alone(sender: RequestSender, call: Call, index: int, result: SampleResult) -> None:
    """Send requests for one member until it has ended."""
    while True:
        if result.finish == "aborted" and not sender.drains(call.request):
            result = _from_where(call, result)
        ended: dict[int, SampleResult] = {}
        attempt = await sender.ask(call, index, [result], ended.__setitem__)
        if attempt.error is not None and not ended:
            [result] = attempt.left.values()
            progress = not attempt.crawled
            if await sender.wait_to_retry(call.request, call.retries, attempt.error, progress=progress):
                continue
            result = failed(result, attempt.error)
        else:
            [result] = ended.values()
            if goes_on(result):
                continue
        call.emit(index, result)
        return


def _from_where(call: Call, result: SampleResult) -> SampleResult:
    """What an aborted member continues from: its partial output, or the beginning of the request.

    It starts over in two cases. Only the engine knows the tokens of a text prompt, so none can be appended to it.
    After the first half of a stop string none can be appended either: the engine would not see it completed.
    Tokens that were already reported to the caller are always kept.
    """
    kept, stop = result, call.request.params.stop or ()
    within = ends_within_stop(result.text, [stop] if isinstance(stop, str) else stop)
    if (not call.tell and (within or not call.keeps_partial)) or call.request.text:
        kept = SampleResult("aborted", resumed=result.resumed, spent_s=result.spent_s)
    return msgspec.structs.replace(kept, resumed=result.resumed + 1)


def goes_on(result: SampleResult) -> bool:
    """Whether a member must be continued: the engine aborted it, and this client did not request that."""
    return result.finish == "aborted" and not result.reason
