"""The one way to ask engines: `sample`, `stream` and `chunks` for answers, `score` for log-probs of given tokens.

Generation, evaluation, teachers, judges and whoever asks next name a policy; which engine answers, and what becomes of
a request that is lost, late or cut up by an update (stages/sampling/partial_rollouts.py), is settled in here.

Invariant: a lost request is sent again at most `--max-retries` times, or until its deadline if it has one; a request
that timed out but brought tokens is no loss.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from configs.schema import Config
from models.engines.errors import EngineError, EngineTimeout, EngineUnreachable
from models.engines.protocol import GenerateRequest
from stages.ports import Topic
from stages.sampling.attempt import Attempt, Progress, Reports
from stages.sampling.engine_directory import EngineDirectory
from stages.sampling.partial_rollouts import LOSSES, Call, Emit, Losses, PartialRollouts, UnknownPolicy
from stages.sampling.requests import (
    DRAINED,
    OUT_OF_TIME,
    Chunk,
    Members,
    SampleRequest,
    SampleResult,
    ScoreRequest,
    failed,
    on_the_wire,
    told_each,
    worth_a_stream,
)
from stages.sampling.routes import Route, RouteRequest, Routes
from stages.topic_values import POLICY

log = logging.getLogger("sluice.sampler")

T = TypeVar("T", SampleResult, SampleResult | Chunk)


class Sampler:
    """A client of all engines of the run, one of `replicas` of its kind. `follow` it beside its use."""

    def __init__(
        self,
        config: Config,
        *,
        replica: str,
        index: int = 0,
        replicas: int = 1,
        stage: str = "",
        policies: Sequence[str] = (POLICY,),
        vocab_size: int | None = None,
        extra: dict[str, float] | None = None,
    ) -> None:
        """
        Args:
            replica: names this client to the engines and in statistics.
            stage: of which the topic tells how many replicas there are.
            policies: names that may be asked for.
            vocab_size: token ids from this on are refused before they are sent, for they end a real SGLang.
            extra: where to count what was lost and saved.
        """
        self.rollout, self.policies = config.rollout, tuple(policies)
        self.directory = EngineDirectory(config.rollout, replicas=replicas, stage=stage, vocab_size=vocab_size)
        self.routes = Routes(config, self.directory, index=index)
        self.reports = Reports(replica, self.directory, self.routes, {} if extra is None else extra)
        self.retries = 0
        # SGLang 0.5.23 aborts the id of every stream again two seconds after its end: no id may come twice, also not
        # from a client that was started anew or from another run on the same engines.
        self._origin = f"{replica}-{uuid.uuid4().hex[:8]}"
        self._serial = itertools.count()
        sglang = config.engine.engine == "sglang"
        # Tokens as they are made, so that they survive their engine. Ours would pay too much for it on a CPU: they tell
        # of a member when it has ended, and only to requests of several is that worth a stream.
        self._tokens_come = sglang and config.health.stream_interval > 0
        self._ends_come = not sglang

    @property
    def draining(self) -> bool:
        """Nothing is sent to the policy's engines any more."""
        return self.directory.draining

    async def follow(self, topic: Topic) -> None:
        """Waits for the topic, and tells it how often requests were retracted; runs until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.directory.follow(topic))
            tasks.create_task(self.reports.run(topic))

    async def ready(self) -> None:
        """Waits for the first engine that carries published weights and can be sent to, or for a drain."""
        while not (self.draining or self.routes.ready()):
            changed = self.directory.changed()
            if not (self.draining or self.routes.ready()):
                await changed.wait()

    async def close(self) -> None:
        await self.directory.close()

    # ------------------------------------------------------------------ what is asked

    @asynccontextmanager
    async def stream(
        self, request: SampleRequest, had: Sequence[SampleResult] = (), progress: Progress | None = None
    ) -> AsyncIterator[Members[SampleResult]]:
        """The members of the request as they end, to iterate over inside the block. Leaving it ends the rest.

        `had`: what each member has already, of requests that another process sent. It is gone on from as from what a
        lost engine left; a member that had ended is given back as it is.
        """
        members = Members[SampleResult](request.n)
        losses = Losses.until(request.deadline_s)
        async with self._answering(Call(request, losses, members.put, had=had, progress=progress), members):
            yield members

    @asynccontextmanager
    async def chunks(self, request: SampleRequest) -> AsyncIterator[Members[SampleResult | Chunk]]:
        """As `stream`, with the tokens of each member as they come, `stream_interval` of its parameters at a time
        (default 1), before its result, which has all of them. Tokens whose version is not certain yet come with the
        result alone. Raises ValueError for a text: behind tokens that were told of, only tokens can be continued.
        """
        if request.text:
            raise ValueError("chunks of a text cannot be continued at another engine; give its token ids")
        interval = request.params.stream_interval or 1
        params = msgspec.structs.replace(request.params, stream_interval=interval)
        members = Members[SampleResult | Chunk](request.n)
        call = Call(replace(request, params=params), Losses.until(request.deadline_s), members.put, members.put)
        async with self._answering(call, members):
            yield members

    async def sample(self, request: SampleRequest) -> tuple[SampleResult, ...]:
        """All members, in their order."""
        async with self.stream(request) as members:
            found = {index: result async for index, result in members}
        return tuple(found[index] for index in range(request.n))

    async def score(self, request: ScoreRequest) -> npt.NDArray[np.float32]:
        """[n - start] log-probs. Raises the engine's error: there is nothing that could be kept."""
        if request.policy not in self.policies:
            raise UnknownPolicy(request.policy, self.policies)
        losses = Losses.until(request.deadline_s)
        need = RouteRequest(request.session, request.token_ids.tobytes(), 1, request.policy, goes_on=True)
        while True:
            try:
                return await self._score(request, self._again(need, losses, request.deadline_s), losses)
            except EngineError as error:
                if not await self.survives(request, losses, error, progress=False):
                    raise

    async def _score(self, request: ScoreRequest, need: RouteRequest, losses: Losses) -> npt.NDArray[np.float32]:
        async with self.routes.place(need) as route:
            try:
                async with asyncio.timeout(losses.left_s), route.flight.under_way():
                    scores = await route.client.score(request.token_ids, request.start, temperature=request.temperature)
            except TimeoutError:
                raise EngineTimeout(route.client.base_url, request.deadline_s or 0.0) from None
            except LOSSES:
                self._lost(route, losses)
                raise
            if not route.flight.why:
                return scores
            self._lost(route, losses)
            raise EngineUnreachable(route.client.base_url, route.flight.why)

    # ------------------------------------------------------------------ one request

    @asynccontextmanager
    async def _answering(self, call: Call, members: Members[T]) -> AsyncIterator[None]:
        if call.request.policy not in self.policies:
            for index in range(call.request.n):
                call.emit(index, failed(SampleResult(), UnknownPolicy(call.request.policy, self.policies)))
            yield
            return
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(PartialRollouts(self, keeps_partial=self.rollout.partial_rollout).answer(call))
            yield
            if members.left:
                task.cancel()

    async def ask(self, call: Call, index: int, results: Sequence[SampleResult], ended: Emit) -> Attempt:
        """One request for members that have the same tokens so far, the first of them `index`. `ended` is told of each
        that ends; the others are in the attempt, with its error."""
        request, tell = call.request, call.tell
        keeps = self.rollout.partial_rollout or tell is not None
        attempt = Attempt(request, list(results), ended, keeps, least_per_s=self.rollout.min_tokens_per_sec)
        if tell is not None:
            attempt.grew = lambda place, chunk: tell(index + place, chunk)
        if (progress := call.progress) is not None:
            attempt.progress = replace(progress, tell=lambda place, result: progress.tell(index + place, result))
        first = results[0]
        left_s = None if request.engine_s is None else request.engine_s - max(r.spent_s for r in results)
        budget = request.params.max_new_tokens or 0
        if self.drains(request):
            attempt.end_all("aborted", DRAINED)
        elif left_s is not None and left_s <= 0:
            attempt.end_all("aborted", OUT_OF_TIME)
        elif len(first.token_ids) >= budget > 0:
            attempt.end_all("length")
        else:
            try:
                rid = f"{self._origin}-{next(self._serial):09d}"
                wire = on_the_wire(request, rid, index, len(results), first.token_ids)
                await self._send(attempt, wire, call.losses, left_s)
            except EngineError as error:  # no place for it
                attempt.error = error
        return attempt

    async def _send(self, attempt: Attempt, wire: GenerateRequest, losses: Losses, left_s: float | None) -> None:
        """Take a place, send, and have the attempt told how it ended. Raises what keeps it from being sent."""
        request = attempt.request
        ours, told = request.policy == POLICY, attempt.grew is not None
        streams = told or attempt.progress is not None
        prompt = np.asarray(request.token_ids[: request.prompt_length or None], dtype=np.int32).tobytes()
        need = RouteRequest(
            key=request.session,
            prompt=prompt or request.text.encode(),
            n=wire.samples,
            policy=request.policy,
            goes_on=request.returning or attempt.had[0].finish == "aborted",
            order=request.order,
            direct=ours and bool(self.routes.lost_fields(wire)),
            pinned_version=request.pinned_version,
        )
        async with self.routes.place(self._again(need, losses, request.deadline_s)) as route:
            if ours:
                # The engine's prefix cache is keyed by this: what one version computed must not serve another. Of
                # weights that are not certain to be one version, nothing may be cached under a name used twice.
                wire = msgspec.structs.replace(wire, extra_key=route.label or f"{wire.rid}~")
            if attempt.progress is not None and not self._tokens_come:
                wire = told_each(wire, attempt.progress.tokens)
            self.reports.note(route)
            await attempt.run(
                route,
                wire,
                streamed=streams or (ours and (self._tokens_come or (self._ends_come and worth_a_stream(request)))),
                tokens_come=told or self._tokens_come,
                left_s=left_s,
                late_s=losses.left_s,
                workers=self.routes.workers(route),
            )
        self.reports.retractions += attempt.retractions if ours else 0
        self.reports.add("reused_tokens", attempt.reused)
        self.reports.judge(route, attempt)
        if isinstance(attempt.error, LOSSES):
            self._lost(route, losses)

    # ------------------------------------------------------------------ losses

    def _again(self, need: RouteRequest, losses: Losses, deadline_s: float | None) -> RouteRequest:
        """What is wanted of the next place after the losses so far."""
        return msgspec.structs.replace(
            need, again=losses.count > 0, lost=losses.engine, deadline=losses.deadline, deadline_s=deadline_s
        )

    def _lost(self, route: Route, losses: Losses) -> None:
        losses.engine = route.target.name
        self.routes.lost(route.target)

    async def survives(
        self, request: SampleRequest | ScoreRequest, losses: Losses, error: Exception, *, progress: bool
    ) -> bool:
        """Whether the call goes on after a failed request; if so, waits a little, longer each time."""
        if not losses.count_in(error, progress=progress):
            return False
        if self.draining:
            return self.drains(request)  # the next try gives back what there is
        if not losses.may_go_on(self.rollout.max_retries):
            return False
        self.retries += 1
        self.reports.add("engine_retries", 1)
        log.info("a request is sent again: %s", error)
        await asyncio.sleep(losses.pause_s)
        return True

    def drains(self, request: SampleRequest | ScoreRequest) -> bool:
        """In a drain the policy is asked nothing more; frozen engines still serve what was generated before it."""
        return self.draining and request.policy == POLICY
