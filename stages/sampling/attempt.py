"""One HTTP request at one engine: sent, ended by its deadline, and split into the results of its members.

`Reports` publishes the figures of a sampler: requests in flight, retractions, and engines that the engines stage
should check.

Invariants: a member returns its slot when it ends, whatever the other members do; of a member that did not end only
the certain prefix is kept; an attempt has an error if it left members for another attempt.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import msgspec
from msgspec.structs import replace

from models.engines.answers import AnswerLimits
from models.engines.client import EngineClient
from models.engines.protocol import GenerateOutput, GenerateRequest, LogprobEntry
from models.engines.streamed import PartialOutputs
from models.errors import EngineError, EngineProtocolError, EngineTimeout, EngineUnreachable
from stages.ports import Topic
from stages.sampling.engine_directory import EngineDirectory
from stages.sampling.requests import OUT_OF_TIME, Chunk, SampleRequest, SampleResult, Sent, extended, failed, with_saved
from stages.sampling.routes import RetryState, Route, Routes
from stages.topic_values import ASKED, RETRACTED, SLOW, Complaint

STOP_GRACE_S: Final = 5.0  # for the answer to a request that was aborted at a deadline


class Progress(msgspec.Struct, frozen=True):
    """A callback that receives what a member has so far, each time `tokens` more tokens of it are certain."""

    tokens: int
    tell: Callable[[int, SampleResult], None]


Emit = Callable[[int, SampleResult], None]


@dataclass(frozen=True)
class Call:
    """One call of the sampler, and the callbacks that receive its results. Members are named by their index."""

    request: SampleRequest
    retries: RetryState
    emit: Emit  # called once for each member, when it has ended
    tell: Callable[[int, Chunk], None] | None = None  # called with the tokens of each member as they arrive
    had: Sequence[SampleResult] = ()  # results of earlier requests that the members continue from; empty: from nothing
    progress: Progress | None = None
    keeps_partial: bool = True  # a member whose request was lost continues behind its partial output


@dataclass(eq=False)
class Attempt:
    """One request for the members of `had`, which have the same tokens so far; `index` is that of the first."""

    call: Call
    index: int
    had: Sequence[SampleResult]
    ended: Emit  # called when a member ends, with its place in `had`
    left: dict[int, SampleResult] = field(init=False)  # members that have not ended, with the tokens kept of each
    error: Exception | None = None
    refused: Exception | None = None  # the fault in a member's answer, if any
    out_of_time: bool = False  # the caller's deadline passed, not the request's
    least_per_s: float = 0.0  # tokens per second of a member, below which a timed-out request counts as lost
    reused: int = 0  # tokens saved from a lost request
    recomputed: int = 0  # tokens that the engine had to read again to continue responses
    retractions: int = 0
    first_version: int = 0  # of its first token, or the newest that this can be
    stopped: str = ""  # why this client stopped it
    # Ends the members now, for this reason, with what they have; does nothing when they have ended.
    stop: Callable[[str], None] = lambda reason: None
    _route: Route | None = None
    _limits: AnswerLimits | None = None
    _started: float = 0.0
    _partial: PartialOutputs | None = None
    _reported: dict[int, int] = field(default_factory=dict)  # tokens last passed to `progress`, by place
    made: Counter[int] = field(default_factory=Counter)  # tokens by version

    def __post_init__(self) -> None:
        self.request, self.left = self.call.request, dict(enumerate(self.had))

    @property
    def left_s(self) -> float | None:
        """Seconds that engines may still work on the members."""
        limit_s = self.request.engine_s
        return None if limit_s is None else limit_s - max(result.spent_s for result in self.had)

    @property
    def crawled(self) -> bool:
        """The request timed out and returned next to nothing.

        Without this rule an engine that sends a token a minute would keep its client waiting until the last token.
        """
        return isinstance(self.error, EngineTimeout) and self.reused < max(1.0, self.least_per_s * self._spent_s)

    def end_all(self, finish: Literal["aborted", "length"], reason: str = "") -> None:
        """End every open member with what it has."""
        for place, result in list(self.left.items()):
            self._settle(place, replace(result, finish=finish, reason=reason))

    async def run(
        self, route: Route, wire: GenerateRequest, *, streamed: bool, tokens_come: bool, workers: Sequence[EngineClient]
    ) -> None:
        """Waits for the answer; unblocked by it, by the loss of the engine, or by a deadline.

        Args:
            streamed: the answer arrives as a stream, each member as it ends.
            tokens_come: the stream also brings tokens before a member ends.
            workers: clients of the engines that may hold the request.
        """
        self._started, self._route = time.perf_counter(), route
        self._limits = AnswerLimits.of(wire, route.target.client.vocab_size)
        partial: PartialOutputs | None = None
        if streamed:
            grown = None if self.call.tell is None else self._grow
            counted = None if self.call.progress is None else self._count
            partial = self._partial = PartialOutputs(route.label, self._land, grown, counted)
        outputs: list[GenerateOutput] | None = None
        async with asyncio.TaskGroup() as tasks:
            asked = workers if wire.samples == 1 or not tokens_come else ()

            def stop(reason: str, after_s: float = 0.0) -> None:
                timers.append(tasks.create_task(self._end_at(after_s, reason, route, str(wire.rid), asked)))

            timers: list[asyncio.Task[None]] = []
            self.stop = stop
            if self.left_s is not None:
                stop(OUT_OF_TIME, self.left_s)
            try:
                async with asyncio.timeout(self.call.retries.left_s), route.flight.under_way():
                    outputs = await route.target.client.generate(wire, partial=partial, headers=route.headers)
            except TimeoutError:
                self.error = EngineTimeout(route.target.client.base_url, self.request.deadline_s or 0.0)
                self.out_of_time = True
            except (EngineError, ValueError) as error:
                self.error = error
            finally:
                self.stop = lambda reason: None
                for timer in timers:
                    timer.cancel()
        if outputs is not None:
            if len(outputs) != len(self.had):
                wrong = ValueError(f"the engine sent {len(outputs)} answers for {len(self.had)} samples")
                for place, result in list(self.left.items()):
                    self._settle(place, failed(result, wrong))
            for place, output in enumerate(outputs):
                self._land(place, output)
            return
        if self.error is None and not self.stopped:
            self.error = EngineUnreachable(route.target.client.base_url, route.flight.why)
        self._save(partial.certain() if partial is not None else [])
        if self.stopped:
            self.error = None
            self.end_all("aborted", self.stopped)

    async def _end_at(
        self, left_s: float, reason: str, route: Route, rid: str, workers: Sequence[EngineClient]
    ) -> None:
        """Waits `left_s`, then makes the engine return what it has; failing that, closes the connection.

        SGLang gives each sample of a joint request its own id, so the request's id cannot abort it. Of a streamed
        request the tokens that have arrived are kept.
        """
        await asyncio.sleep(left_s)
        self.stopped = self.stopped or reason
        if workers:
            with contextlib.suppress(TimeoutError):  # the engine has not answered
                async with asyncio.timeout(STOP_GRACE_S), asyncio.TaskGroup() as tasks:
                    for client in workers:
                        tasks.create_task(_abort(client, rid))
                    await asyncio.Event().wait()  # until the answer arrives, which cancels this
        route.flight.end(self.stopped)

    def _grow(self, place: int, entries: Sequence[LogprobEntry]) -> None:
        if self.call.tell is not None and place in self.left:
            self.call.tell(self.index + place, Chunk(tuple(e[1] for e in entries), tuple(e[0] or 0.0 for e in entries)))

    def _count(self, place: int, tokens: int) -> None:
        """`tokens` tokens of the answer are certain now."""
        progress = self.call.progress
        if progress is None or self._partial is None or place not in self.left:
            return
        if tokens - self._reported.get(place, 0) < progress.tokens:
            return
        self._reported[place] = tokens
        output = self._partial.certain_of(place)
        result = with_saved(self.request, self.left[place], output, self._spent_s, self._known, lost=False)
        if result.finish != "failed":
            progress.tell(self.index + place, result)

    def _land(self, place: int, output: GenerateOutput) -> None:
        """Record a member that the engine has ended."""
        if place not in self.left:
            return  # the end of the stream repeats members that ended before
        result = extended(self.request, self.left[place], output, self._spent_s, self._known)
        if result.error is not None:
            self.refused = result.error
        if result.finish == "aborted" and self.stopped:
            result = replace(result, reason=self.stopped)
        self._settle(place, result)

    def _save(self, saved: Sequence[GenerateOutput | None]) -> None:
        """Keep the certain tokens of a request that was lost or stopped. A member that had ended in it is complete."""
        for place, had in list(self.left.items()):
            output = saved[place] if saved else None
            if output is not None and output.meta_info.finish_reason is not None:
                self._land(place, output)
                continue
            if not self.stopped and not self.call.keeps_partial:
                output = None
            kept = with_saved(self.request, had, output, self._spent_s, self._known, lost=not self.stopped)
            self.reused += kept.reused_tokens - had.reused_tokens
            self._note(had, kept)
            self.left[place] = kept
            if kept.finish == "failed":
                self._settle(place, kept)

    def _settle(self, place: int, result: SampleResult) -> None:
        had, context = self.had[place], len(self.request.token_ids)
        self._note(self.left[place], result)
        self.retractions += result.retractions - had.retractions
        if had.token_ids and len(result.token_ids) > len(had.token_ids):  # it was continued
            cached = result.cached_tokens - had.cached_tokens
            self.recomputed += max(0, context + len(had.token_ids) - cached)
        del self.left[place]
        if self._route is not None:
            self._route.release()
        self.ended(place, result)

    def _note(self, before: SampleResult, now: SampleResult) -> None:
        """Count the tokens that a member has now and had not before."""
        for sign, result in ((1, now), (-1, before)):
            for run in result.runs:
                self.made[run.version] += sign * run.n_tokens

    @property
    def _known(self) -> Sent:
        """The facts that the answer is checked against, read when it has arrived."""
        route = self._route
        assert route is not None, "an answer has come over a route"
        return Sent(self._limits, route.label, route.generation, route.oldest, route.newest())

    @property
    def _spent_s(self) -> float:
        return time.perf_counter() - self._started


async def _abort(client: EngineClient, rid: str) -> None:
    with contextlib.suppress(EngineError):  # an engine that is down holds nothing
        await client.abort(rid)


log = logging.getLogger("sluice.sampler")

REPORT_INTERVAL_S: Final = 1.0


class Reports:
    """Figures of one sampler. `extra`: the counters of its stage."""

    def __init__(self, replica: str, directory: EngineDirectory, routes: Routes, extra: dict[str, float]) -> None:
        self.replica, self.directory, self.routes, self.extra = replica, directory, routes, extra
        self.retractions = 0
        self._complaints: dict[str, Complaint] = {}  # of engines whose answers are refused or crawl, by topic key

    def add(self, name: str, n: float) -> None:
        self.extra[name] = self.extra.get(name, 0.0) + n

    def note(self) -> None:
        """Record how many requests engines may hold and do hold, just before a request is sent."""
        router = self.directory.router
        targets = [router] if self.routes.routed and router is not None else self.directory.serving()
        self.extra["in_flight_limit"] = float(sum(target.slots.limit for target in targets))
        self.extra["in_flight_samples"] = float(sum(target.slots.taken for target in targets))

    def judge(self, route: Route, attempt: Attempt) -> None:
        """Judge an answer, and complain about its engine if it is wrong.

        Next to no tokens within the whole time-out is a wrong answer too, unless the engine stood still for the trainer
        or the caller stopped waiting.
        """
        crawled = attempt.crawled and not attempt.out_of_time and self.directory.turn_s < route.flight.began_s
        if crawled and not route.target.crawled:
            route.target.crawled = True  # reported once per incarnation
            limit = f"--request-timeout-secs {self.directory.timeout_s:g}"
            why = f"{attempt.reused} new tokens came of a request in {limit}"
            self._complaints[f"{SLOW}{route.target.name}"] = Complaint(route.target.name, route.target.incarnation, why)
        nonsense = crawled or isinstance(attempt.error, EngineProtocolError)
        refused = attempt.error if nonsense else attempt.refused
        if refused is None and attempt.error is not None:
            return  # the engine did not answer
        if refused is not None:
            self.add("refused_answers", 1)
            log.warning("an answer of %s is refused: %s", route.target.name, refused)
        complaint = self.routes.answered(route.target, refused)
        if complaint is not None:
            self._complaints[f"complaint/{complaint.engine}"] = complaint

    async def run(self, topic: Topic) -> None:
        """Publish figures every second; waits for the clock. Answers are the only source of retractions."""
        published = 0
        while True:
            await asyncio.sleep(REPORT_INTERVAL_S)
            for key in [key for key in self.extra if key.endswith(ASKED)]:
                del self.extra[key]
            self.extra |= {f"{name}{ASKED}": seconds for name, seconds in self.directory.oldest_request_s().items()}
            if self.retractions != published:
                published = self.retractions
                await topic.publish(f"{RETRACTED}{self.replica}", str(published).encode())
            while self._complaints:
                key, complaint = self._complaints.popitem()
                await topic.publish(key, msgspec.msgpack.encode(complaint))
