"""One turn of a group's rollouts: asked of an engine together or alone, saved from a lost engine, ended by deadlines.

Samples that share all their tokens so far are one request; whatever breaks it up (an abort for an update, a lost
engine, a deadline), each unfinished sample then goes on alone, from what it has.

Invariants:
- a token is in a sample once: of a lost request only the certain prefix is kept, and the next request begins after it;
- a sample that finished in a broken stream is whole and is not asked again;
- a turn is sent again at most `--max-retries` times after a loss; a request that timed out but brought tokens is none;
- a sample that cannot be generated fails alone, with the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from configs.schema import Config
from models.engines.client import EngineClient
from models.engines.errors import EngineAborted, EngineError, EngineRefused, EngineTimeout, EngineUnreachable
from models.engines.partial import PartialOutputs
from models.engines.protocol import GenerateOutput, GenerateRequest
from stages.base import Activity
from stages.messages import PromptGroup, Sample
from stages.sampling.append_output import VersionLabelError, append_output, append_saved
from stages.sampling.dispatch import Dispatcher, Route, RouteRequest
from stages.sampling.requests import Deadline, Requests, session_key
from stages.sequences import cut

log = logging.getLogger("sluice.turn")

STOP_GRACE_S = 5.0  # for the answer to a request that was aborted at a deadline
TRANSIENT_STATUS = (408, 425, 429)  # refusals that are no fault of the request
UNFINISHED = ("pending", "aborted")
LOSSES = (EngineUnreachable, EngineTimeout, EngineAborted)
PER_SAMPLE_ERRORS = (EngineError, VersionLabelError, ValueError)


@dataclass
class Losses:
    """Of one sample in one turn."""

    count: int = 0
    engine: str = ""  # that was lost last


@dataclass
class RequestOutcome:
    """How a request ended."""

    place: Route
    spent_s: float = 0.0
    outputs: list[GenerateOutput] | None = None
    saved: list[GenerateOutput | None] = field(default_factory=list)  # without outputs: what is certain
    error: EngineError | ValueError | None = None
    stopped: bool = False  # by its deadline


class Turns:
    """Generates turns for one replica."""

    def __init__(
        self, config: Config, requests: Requests, dispatcher: Dispatcher, activity: Activity, replica: str
    ) -> None:
        self.rollout, self.requests, self.dispatcher = config.rollout, requests, dispatcher
        self.activity = activity
        # SGLang 0.5.23 aborts the id of every stream again two seconds after its end: no id may come twice, also not
        # from a replica that was started anew or from another run on the same engines.
        self._origin = f"{replica}-{uuid.uuid4().hex[:8]}"
        self.streams = config.engine.engine == "sglang" and config.health.stream_interval > 0
        self._serial = itertools.count()

    async def take(self, group: PromptGroup, samples: tuple[Sample, ...]) -> tuple[Sample, ...]:
        """The samples after one more turn. Every sample comes back finished, failed, or aborted by a drain."""
        losses = Losses()
        fresh = all(s.turns == 0 and s.response_length == 0 and s.sequences == 1 for s in samples)
        before = {(s.index, s.sequence): s for s in samples}
        if fresh:
            samples = await self._together(group, samples, losses)
        async with asyncio.TaskGroup() as tasks:
            turns = [
                tasks.create_task(self._alone(group, before[s.index, s.sequence], s, counted_on(losses), asked=fresh))
                for s in samples
            ]
        return tuple(msgspec.structs.replace(task.result(), turns=task.result().turns + 1) for task in turns)

    async def _together(self, group: PromptGroup, samples: tuple[Sample, ...], losses: Losses) -> tuple[Sample, ...]:
        """One request for all; sent again as it is while nothing at all has come of it."""
        while True:
            asked, error = await self._ask(group, samples, losses)
            if error is None:
                return asked
            if not await self._survives(losses, error, progress=False):
                return tuple(self._failed(s, error) if s.status in UNFINISHED else s for s in asked)
            if any(s.response_length or s.status not in UNFINISHED for s in asked):
                return asked
            samples = asked

    async def _alone(
        self, group: PromptGroup, before: Sample, sample: Sample, losses: Losses, *, asked: bool
    ) -> Sample:
        """Requests for one sample until it has finished. `asked`: its status tells of a request of this turn."""
        while not asked or sample.status in UNFINISHED:
            if asked and self.dispatcher.draining:
                return msgspec.structs.replace(sample, status="aborted")
            if asked:
                sample = self._again(before, sample)
            had = sample.response_length
            (sample,), error = await self._ask(group, (sample,), losses)
            asked = True
            if error is not None and not await self._survives(losses, error, progress=sample.response_length > had):
                return self._failed(sample, error) if sample.status in UNFINISHED else sample
        return sample

    def _again(self, before: Sample, sample: Sample) -> Sample:
        """What an aborted turn goes on from: its partial output, or the beginning of the turn."""
        if sample.status != "aborted":
            return sample
        kept = sample
        if not self.rollout.partial_rollout:
            kept = msgspec.structs.replace(before, generate_s=sample.generate_s, replaced=sample.replaced)
        return msgspec.structs.replace(kept, resumed=sample.resumed + 1)

    async def _survives(self, losses: Losses, error: EngineError | ValueError, *, progress: bool) -> bool:
        """Whether the turn goes on after a failed request; if so, waits a little, longer each time."""
        transient = isinstance(error, EngineRefused) and error.status in TRANSIENT_STATUS
        if not transient and not isinstance(error, LOSSES):
            return False
        if not (isinstance(error, EngineTimeout) and progress):
            losses.count += 1
        if losses.count > self.rollout.max_retries or self.dispatcher.draining:
            return self.dispatcher.draining
        self._add("engine_retries", 1)
        log.info("a request is sent again: %s", error)
        await asyncio.sleep(min(0.1 * 2**losses.count, 5.0))
        return True

    def _failed(self, sample: Sample, error: Exception) -> Sample:
        self.activity.failures += 1
        return msgspec.structs.replace(sample, status="failed", error=f"{type(error).__name__}: {error}")

    def _add(self, name: str, n: float) -> None:
        self.activity.extra[name] = self.activity.extra.get(name, 0.0) + n

    async def _ask(
        self, group: PromptGroup, samples: tuple[Sample, ...], losses: Losses
    ) -> tuple[tuple[Sample, ...], EngineError | ValueError | None]:
        """One request for samples that share their tokens so far: the samples after it, and why it failed if it did."""
        if self.dispatcher.draining:
            return tuple(msgspec.structs.replace(s, status="aborted") for s in samples), None
        first = samples[0]
        budget, deadline = self.requests.budget(group, first), self.requests.deadline(group, first)
        if budget <= 0:
            cuts = tuple(msgspec.structs.replace(cut(s, s.length + budget), status="truncated") for s in samples)
            return cuts, None
        if deadline is not None and deadline.left_s <= 0:
            return tuple(self._stop(s, deadline) for s in samples), None
        request = GenerateRequest(
            rid=f"{self._origin}-{group.group_id:013d}-{first.index:04d}-{next(self._serial):09d}",
            input_ids=first.token_ids.tolist(),
            sampling_params=self.requests.params(group, first, budget, len(samples)),
            return_logprob=True,
        )
        try:
            landing = await self._send(group, request, samples, losses, deadline)
        except EngineUnreachable as error:  # no place for it
            return samples, error
        landed = self._land(samples, landing, deadline)
        return landed, landing.error

    async def _send(
        self,
        group: PromptGroup,
        request: GenerateRequest,
        samples: Sequence[Sample],
        losses: Losses,
        deadline: Deadline | None,
    ) -> RequestOutcome:
        """Take a place, send, and tell how it ended. Raises `EngineUnreachable` if there is no place."""
        first = samples[0]
        need = RouteRequest(
            key=session_key(group),
            prompt=first.token_ids[: first.prompt_length].tobytes(),
            n=len(samples),
            goes_on=first.response_length > 0 or first.replaced > 0,
            direct=bool(self.dispatcher.lost_fields(request)),
            again=losses.count > 0,
            lost=losses.engine,
        )
        async with self.dispatcher.place(need) as place:
            # Of weights that are not certain to be one version, nothing may be cached under a name used twice.
            key = place.label or f"{request.rid}~"
            request = msgspec.structs.replace(request, extra_key=key)
            landing = await self._fly(place, request, deadline)
        if isinstance(landing.error, LOSSES):
            losses.engine = place.name
            self.dispatcher.lost(place)
        return landing

    async def _fly(self, place: Route, request: GenerateRequest, deadline: Deadline | None) -> RequestOutcome:
        """Waits for the answer; unblocked by it, by the loss of the engine, or by the deadline."""
        landing = RequestOutcome(place)
        partial = PartialOutputs(place.label) if self.streams else None
        started = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            timer = None
            if deadline is not None:
                timer = tasks.create_task(self._end_at(deadline.left_s, landing, request, partial is not None))
            try:
                async with place.flight:
                    landing.outputs = await place.client.generate(request, partial=partial, headers=place.headers)
            except (EngineError, ValueError) as error:
                landing.error = error
            finally:
                if timer is not None:
                    timer.cancel()
        landing.spent_s = time.perf_counter() - started
        if landing.outputs is None:
            landing.saved = partial.certain() if partial is not None else []
            if landing.error is None and not landing.stopped:
                landing.error = EngineUnreachable(place.client.base_url, place.flight.why)
        return landing

    async def _end_at(self, left_s: float, landing: RequestOutcome, request: GenerateRequest, streamed: bool) -> None:
        """Waits for the deadline, then has the engine give back what it has; failing that, closes the connection.

        SGLang gives each sample of a joint request an id of its own: of one that is streamed, what has arrived is kept.
        """
        await asyncio.sleep(left_s)
        landing.stopped = True
        if request.samples == 1 or not streamed:
            with contextlib.suppress(TimeoutError):  # it has not answered
                async with asyncio.timeout(STOP_GRACE_S), asyncio.TaskGroup() as tasks:
                    for client in self.dispatcher.workers(landing.place):
                        tasks.create_task(_abort(client, str(request.rid)))
                    await asyncio.Event().wait()  # for the answer, whose arrival cancels this
        landing.place.flight.end("its deadline passed")

    def _land(
        self, samples: tuple[Sample, ...], landing: RequestOutcome, deadline: Deadline | None
    ) -> tuple[Sample, ...]:
        """The samples with what a request brought them."""
        if landing.outputs is not None and len(landing.outputs) != len(samples):
            error = ValueError(f"the engine sent {len(landing.outputs)} answers for {len(samples)} samples")
            return tuple(self._failed(s, error) for s in samples)
        landed: list[Sample] = []
        saved = landing.saved or [None] * len(samples)
        for place, sample in enumerate(samples):
            try:
                if landing.outputs is not None:
                    after = append_output(sample, landing.outputs[place], landing.spent_s)
                else:
                    after = self._save(sample, saved[place], landing)
            except PER_SAMPLE_ERRORS as error:
                landed.append(self._failed(sample, error))
                continue
            self.dispatcher.watch.note_retractions(after.retractions - sample.retractions)
            if landing.stopped and deadline is not None and after.status in UNFINISHED:
                after = self._stop(after, deadline)
            landed.append(after)
        return tuple(landed)

    def _save(self, sample: Sample, output: GenerateOutput | None, landing: RequestOutcome) -> Sample:
        """What is left of a sample whose request was lost or stopped."""
        finished = output is not None and output.meta_info.finish_reason is not None
        if not finished and not landing.stopped and not self.rollout.partial_rollout:
            output = None
        after = append_saved(sample, output, landing.spent_s)
        if landing.stopped:  # by us: nothing was lost
            return msgspec.structs.replace(after, reused_tokens=sample.reused_tokens)
        self._add("reused_tokens", after.reused_tokens - sample.reused_tokens)
        return after

    def _stop(self, sample: Sample, deadline: Deadline) -> Sample:
        stopped = self.requests.stopped(sample, deadline)
        replaced = stopped.replaced > sample.replaced
        self._add("deadline_replaced" if replaced else "deadline_truncated", 1)
        self._add("deadline_tokens_dropped", sample.response_length if replaced else 0)
        return stopped


async def _abort(client: EngineClient, rid: str) -> None:
    with contextlib.suppress(EngineError):  # an engine that is down holds nothing
        await client.abort(rid)


def counted_on(losses: Losses) -> Losses:
    """Each sample counts on from what the joint request lost."""
    return Losses(losses.count, losses.engine)
