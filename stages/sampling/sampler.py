"""The client of all engines: `sample`, `stream` and `chunks` for answers, `score` for log-probs of given tokens.

Callers (generation, evaluation, teachers, judges) name a policy. The sampler decides which engine answers, and handles
requests that are lost, late or broken up by an update (stages/sampling/partial_rollouts.py).

Invariant: a lost request is sent again at most `--max-retries` times, or until its deadline if it has one; a request
that timed out but brought tokens is no loss.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace

import msgspec
import numpy as np
import numpy.typing as npt

from models.engines.protocol import GenerateRequest
from models.errors import LOSSES, EngineError, EngineTimeout, EngineUnreachable
from stages.base import GenerateOptions, StageContext, side_by_side
from stages.ports import Readable, Topic, read_value
from stages.sampling.attempt import Attempt, Call, Emit, Progress, Reports
from stages.sampling.engine_directory import EngineDirectory
from stages.sampling.partial_rollouts import UnknownPolicy, answer
from stages.sampling.requests import (
    DRAINED,
    OUT_OF_TIME,
    SUPERFLUOUS,
    TOO_OLD,
    Chunk,
    Members,
    SampleRequest,
    SampleResult,
    ScoreRequest,
    T,
    failed,
    on_the_wire,
    with_stream_interval,
)
from stages.sampling.routes import RetryState, RouteRequest, Routes
from stages.topic_values import DECIDED, EVALUATION, TRAINED, newest_settings

log = logging.getLogger("sluice.sampler")
Counters = dict[str, float]


class Sampler:
    """A client of all engines of the run, for one replica of a stage. `follow` it beside its use."""

    def __init__(
        self, context: StageContext, stage: str = "", policies: Sequence[str] = TRAINED, extra: Counters | None = None
    ) -> None:
        """
        Args:
            stage: whose number of replicas is on the topic.
            policies: names that requests may carry.
            extra: counters for lost requests and saved tokens.
        """
        config, replica = context.config, context.replica  # it names this client to the engines and in statistics
        # Token ids from this on are refused before they are sent, because they crash a real SGLang.
        vocab_size = context.given(GenerateOptions).vocab_size
        self.rollout, self.policies = config.rollout, tuple(policies)
        self._bound = config.asynchrony.max_staleness
        self._topic: Readable | None = None  # settings that the user changes during the run
        self.directory = EngineDirectory(config.rollout, context.replicas, stage, vocab_size)
        self.routes = Routes(config, self.directory, index=context.index)
        self.reports = Reports(replica, self.directory, self.routes, {} if extra is None else extra)
        self.retries, self._spans = 0, context.spans
        # SGLang 0.5.23 aborts the id of every stream again two seconds after its end: no id may repeat, not even from a
        # restarted client or from another run on the same engines.
        self._origin = f"{replica}-{uuid.uuid4().hex[:8]}"
        self._serial = itertools.count()
        self._cancellable: set[Attempt] = set()  # at engines, and ended early where nothing can come of them
        self._decided: set[str] = set()  # keys of groups whose outcome is known
        sglang = config.engine.engine == "sglang"
        # SGLang streams tokens as they are generated, so that they survive their engine. On a CPU our engines would pay
        # too much for that: they report a member when it ends, which only a request for several members needs.
        self._tokens_come = sglang and config.health.stream_interval > 0
        self._ends_come = not sglang

    @property
    def draining(self) -> bool:
        """Nothing is sent to the policy's engines any more."""
        return self.directory.draining

    @property
    def oldest(self) -> int:
        """The oldest version that later batches may train."""
        changed = None if self._topic is None else newest_settings(self._topic)
        bound = self._bound if changed is None else changed.max_staleness
        return max((self.directory.published or 0) - (bound or 0), self.directory.floor)

    async def follow(self, topic: Topic) -> None:
        """Follow the topic and publish figures on it. Waits for the topic; runs until cancelled."""
        self._topic = topic
        cancels = self._cancel_stale(), self._cancel_decided(topic)
        await side_by_side((self.directory.follow(topic), self.reports.run(topic), *cancels))

    async def _cancel_stale(self) -> None:
        """Waits for new versions; runs until cancelled. Stops what no later batch may train."""
        while True:
            changed, oldest = self.directory.changed(), self.oldest
            stale = [a for a in self._cancellable if a.request.cancel_stale and a.first_version < oldest]
            self._stop(stale, TOO_OLD)
            await changed.wait()

    async def _cancel_decided(self, topic: Topic) -> None:
        """Waits for groups that lost a rollout for good or that a filter drops; runs until cancelled. Stops their
        other rollouts."""
        revision = 0
        while True:
            keys = ("dead", *topic.items(DECIDED))
            self._decided = {group for key in keys for group in read_value(topic, key, tuple[str, ...]) or ()}
            self._stop([a for a in self._cancellable if self._superfluous(a.request)], SUPERFLUOUS)
            revision = await topic.wait(revision, "dead", DECIDED)

    def _superfluous(self, request: SampleRequest) -> bool:
        return request.cancel_decided and request.session in self._decided

    def _stop(self, attempts: Sequence[Attempt], why: str) -> None:
        for attempt in attempts:
            self._cancellable.discard(attempt)
            attempt.stop(why)

    async def ready(self) -> None:
        """Waits for the first engine that carries published weights and can be sent to, or for a drain."""
        while not (self.draining or self.routes.ready()):  # nothing is awaited in between, so that no change is missed
            await self.directory.changed().wait()

    async def close(self) -> None:
        await self.directory.close()

    # ------------------------------------------------------------------ calls

    def stream(
        self, request: SampleRequest, had: Sequence[SampleResult] = (), progress: Progress | None = None
    ) -> AbstractAsyncContextManager[Members[SampleResult]]:
        """The members of the request as they end, to iterate over inside the block. Leaving it ends the rest.

        `had`: what each member already has from requests of another process. The sampler continues from it as from the
        output of a lost engine; a member that had ended is returned unchanged.
        """
        members = Members[SampleResult](request.n)
        retries, keeps = RetryState.until(request.deadline_s), self.rollout.partial_rollout
        call = Call(request, retries, members.put, had=had, progress=progress, keeps_partial=keeps)
        return self._answering(call, members)

    def chunks(self, request: SampleRequest) -> AbstractAsyncContextManager[Members[SampleResult | Chunk]]:
        """As `stream`, with the tokens of each member as they arrive, `stream_interval` tokens at a time (default 1).

        The result follows with all tokens. Tokens whose version is not certain yet come with the result alone. Raises
        ValueError for a text prompt: after reported tokens only token ids can be continued.
        """
        if request.text:
            raise ValueError("chunks of a text cannot be continued at another engine; give its token ids")
        interval = request.params.stream_interval or 1
        params = msgspec.structs.replace(request.params, stream_interval=interval)
        members = Members[SampleResult | Chunk](request.n)
        call = Call(replace(request, params=params), RetryState.until(request.deadline_s), members.put, members.put)
        return self._answering(call, members)

    async def sample(self, request: SampleRequest) -> tuple[SampleResult, ...]:
        """All members, in their order."""
        async with self.stream(request) as members:
            found = {index: result async for index, result in members}
        return tuple(found[index] for index in range(request.n))

    async def score(self, request: ScoreRequest) -> npt.NDArray[np.float32]:
        """[n - start] log-probs. Raises the engine's error, since no partial answer exists."""
        if request.policy not in self.policies:
            raise self._unknown(request.policy)
        retries = RetryState.until(request.deadline_s)
        prompt = request.token_ids.tobytes()
        need = RouteRequest(request.session, prompt, 1, request.policy, goes_on=True, retries=retries)
        while True:
            try:
                return await self._score(request, need)
            except EngineError as error:
                if not await self.wait_to_retry(request, retries, error, progress=False):
                    raise

    async def _score(self, request: ScoreRequest, need: RouteRequest) -> npt.NDArray[np.float32]:
        retries = need.retries
        async with self.routes.place(need) as route:
            client = route.target.client
            try:
                async with asyncio.timeout(retries.left_s), route.flight.under_way():
                    scores = await client.score(request.token_ids, request.start, temperature=request.temperature)
            except TimeoutError:
                raise EngineTimeout(client.base_url, request.deadline_s or 0.0) from None
            except LOSSES:
                self.routes.lost(route.target, retries)
                raise
            if not route.flight.why:
                return scores
            self.routes.lost(route.target, retries)
            raise EngineUnreachable(client.base_url, route.flight.why)

    def _unknown(self, policy: str) -> UnknownPolicy:
        known = ", ".join(name for name in self.policies if name != EVALUATION) or "none"
        return UnknownPolicy(f"no engine is called {policy!r} here; the known names are {known}")

    # ------------------------------------------------------------------ one request

    @asynccontextmanager
    async def _answering(self, call: Call, members: Members[T]) -> AsyncIterator[Members[T]]:
        if call.request.policy not in self.policies:
            for index in range(call.request.n):
                call.emit(index, failed(SampleResult(), self._unknown(call.request.policy)))
            yield members
            return
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(answer(self, call))
            yield members
            if members.left:
                task.cancel()

    async def ask(self, call: Call, index: int, results: Sequence[SampleResult], ended: Emit) -> Attempt:
        """Send one request for members that have the same tokens so far, the first of them `index`.

        `ended` is called for each that ends; the remaining members are in the attempt, with its error.
        """
        request, first = call.request, results[0]
        attempt = Attempt(call, index, results, ended, least_per_s=self.rollout.min_tokens_per_sec)
        left_s = attempt.left_s
        budget = request.params.max_new_tokens or 0
        versions = [run.version for run in first.runs]
        if self.drains(request):
            attempt.end_all("aborted", DRAINED)
        elif left_s is not None and left_s <= 0:
            attempt.end_all("aborted", OUT_OF_TIME)
        elif request.cancel_stale and versions and min(versions) < self.oldest:
            attempt.end_all("aborted", TOO_OLD)
        elif self._superfluous(request):
            attempt.end_all("aborted", SUPERFLUOUS)
        elif len(first.token_ids) >= budget > 0:
            attempt.end_all("length")
        else:
            try:
                rid = f"{self._origin}-{next(self._serial):09d}"
                wire = on_the_wire(request, rid, index, len(results), first.token_ids)
                await self._send(attempt, wire)
            except EngineError as error:  # no place for it
                attempt.error = error
        return attempt

    async def _send(self, attempt: Attempt, wire: GenerateRequest) -> None:
        """Take a route, send, and let the attempt record how it ended. Raises if the request could not be sent."""
        request, progress = attempt.request, attempt.call.progress
        trained, chunked = request.policy in TRAINED, attempt.call.tell is not None
        prompt = np.asarray(request.token_ids[: request.prompt_length or None], dtype=np.int32).tobytes()
        log.debug("%s: %d samples continue %d tokens", wire.rid, wire.samples, len(request.token_ids))
        need = RouteRequest(
            key=request.session,
            prompt=prompt or request.text.encode(),
            n=wire.samples,
            policy=request.policy,
            goes_on=request.returning or attempt.had[0].finish == "aborted",
            order=request.order,
            direct=trained and bool(self.routes.lost_fields(wire)),
            pinned_version=request.pinned_version,
            retries=attempt.call.retries,
        )
        async with self.routes.place(need) as route:
            if trained:
                # The key of the engine's prefix cache: entries of one version must not serve another. While the version
                # is uncertain, the key must be unique.
                wire = msgspec.structs.replace(wire, extra_key=route.label or f"{wire.rid}~")
            if progress is not None and not self._tokens_come:
                wire = with_stream_interval(wire, progress.tokens)
            self.reports.note()
            if request.cancel_stale or request.cancel_decided:
                # No engine can make the first token with weights that are not published yet.
                attempt.first_version = min(
                    (run.version for run in attempt.had[0].runs), default=self.directory.published or 0
                )
                self._cancellable.add(attempt)
            start_s, clock = time.time(), time.perf_counter()
            try:
                await attempt.run(
                    route,
                    wire,
                    streamed=chunked
                    or progress is not None
                    or (trained and (self._tokens_come or (self._ends_come and request.worth_a_stream))),
                    tokens_come=chunked or self._tokens_come,
                    workers=[target.client for target in self.routes.behind(route.target)],  # aborts bypass the router
                )
            finally:
                self._cancellable.discard(attempt)
                if request.group >= 0:
                    made = (f"{n} tokens of version {version}" for version, n in sorted(attempt.made.items()) if n > 0)
                    detail = ", ".join((route.target.name, *made))
                    spent_s = time.perf_counter() - clock
                    self._spans.add("request", start_s, spent_s, group=request.group, detail=detail)
        self.reports.retractions += attempt.retractions if trained else 0
        self.reports.add("reused_tokens", attempt.reused)
        self.reports.add("recomputed_tokens", attempt.recomputed)
        self.reports.judge(route, attempt)
        if isinstance(attempt.error, LOSSES):
            self.routes.lost(route.target, need.retries)

    # ------------------------------------------------------------------ lost requests

    async def wait_to_retry(
        self, request: SampleRequest | ScoreRequest, retries: RetryState, error: Exception, *, progress: bool
    ) -> bool:
        """Whether the call continues after a failed request; if so, sleeps first, longer each time."""
        if not retries.record(error, progress=progress):
            return False
        if self.draining:
            return self.drains(request)  # the next attempt returns what there is
        # With a deadline: until then, so that a killed engine costs time and no answers. Without: a count.
        left_s = retries.left_s
        if retries.count > self.rollout.max_retries if left_s is None else retries.pause_s >= left_s:
            return False
        self.retries += 1
        self.reports.add("engine_retries", 1)
        log.info("sending a request again: %s", error)
        await asyncio.sleep(retries.pause_s)
        return True

    def drains(self, request: SampleRequest | ScoreRequest) -> bool:
        """In a drain the policy gets no more requests; frozen engines still serve what was generated before it."""
        return self.draining and request.policy in TRAINED
