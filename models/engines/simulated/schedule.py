"""Continuous batching as a latency model, in virtual time. No I/O, no clock: the caller passes the times.

One step of b running requests takes `a + c b`, plus the prefill of requests that enter at its beginning; each running
request gets one token at its end. Requests enter only between steps.

Invariants:
- between changes of membership nothing is counted token by token: the next event is computed, and `advance` jumps;
- event times do not depend on when `advance` is called, so a late timer delays a delivery and shifts nothing;
- a request for no token (a scoring) takes part in one step, that of its prefill, and ends with it;
- the KV cache never holds more than its capacity: when the next step would not fit, the newest requests are retracted
  (cache dropped, output kept, back to the head of the queue, recomputed when they enter again).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from configs.schema.rollout import SimulatedEngineConfig
from models.engines.core import ABORTED, Completion, Totals
from models.engines.protocol import FinishReason, PauseMode
from models.engines.simulated.responses import PrefixIndex, Writer

_EPSILON = 1e-9  # seconds: an event this close has happened


@dataclass(eq=False, slots=True)
class _Job:
    """A running completion. Its output has `done` tokens at step `since` and `goal` at its end."""

    completion: Completion
    goal: int
    natural: bool  # it ends by itself at `goal`
    done: int = 0
    since: int = 0
    order: int = 0  # of admission

    @property
    def scores(self) -> bool:
        """Whether the request wants scores only, no token."""
        return self.goal == 0


@dataclass
class Schedule:
    """All requests of one simulated engine. Times in seconds of one clock, never going back."""

    config: SimulatedEngineConfig
    slots: int
    prefix_cache: bool
    label: str
    model_path: str = ""
    paused: bool = False
    holding: bool = False  # admit nothing: an update waits for the running requests
    totals: Totals = field(default_factory=Totals)

    def __post_init__(self) -> None:
        self._scale = self.config.time_scale / 1000.0  # milliseconds of the configuration to seconds
        self._waiting: deque[_Job] = deque()
        self._running: dict[int, _Job] = {}  # by id of the completion, in order of admission
        self._ends: list[tuple[int, int, _Job]] = []  # heap of (step, order, job); dead entries are skipped
        self._orders = itertools.count()
        self._base = 0.0  # time of the last step boundary
        self._first = 0.0  # seconds of the next step, prefill included
        self._kv = 0  # tokens in the cache
        self._finished: list[Completion] = []
        self._streaming: dict[int, _Job] = {}  # the running jobs that stream
        self._prefixes = PrefixIndex(self.config.kv_tokens)
        self._writer = Writer(self.config, self.model_path)
        self._scoring = 0  # running jobs that make no token

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def used_tokens(self) -> int:
        return self._kv

    def submit(self, now: float, completions: Iterable[Completion]) -> None:
        self.advance(now)
        for completion in completions:
            goal, natural = self._writer.plan(completion)
            self._waiting.append(_Job(completion, goal, natural))
        self._settle(now)

    def cancel(self, now: float, completions: Sequence[Completion]) -> None:
        """End completions as aborted, with the output of the whole steps they have seen."""
        self.advance(now)
        doomed = {id(c) for c in completions if c.finish is None}
        for job in [job for key, job in self._running.items() if key in doomed]:
            self._leave(job)
            self._end(job, ABORTED)
        for job in self._waiting:
            if id(job.completion) in doomed:
                self._end(job, ABORTED)
        self._waiting = deque(job for job in self._waiting if id(job.completion) not in doomed)
        self._settle(now)

    def cancel_all(self, now: float) -> None:
        self.cancel(now, [job.completion for job in (*self._running.values(), *self._waiting)])

    def pause(self, now: float, mode: PauseMode) -> None:
        """Stop between steps; the current step begins again at the end of the pause."""
        self.advance(now)
        self.paused = True
        if mode == "abort":
            self.cancel_all(now)
        elif mode == "retract":
            for job in list(self._running.values())[::-1]:
                self._retract(job)

    def resume(self, now: float) -> None:
        """Continue. Requests enter at `now`."""
        self.advance(now)
        self.paused = False
        self._base = max(self._base, now)
        self._admit(now)

    def release(self, now: float) -> None:
        """End a hold: an update is done, and requests enter again from `now` on."""
        self.holding = False
        self._base = max(self._base, now)
        self._settle(now)

    def relabel(self, now: float, label: str) -> None:
        """Call the weights `label` from the next token on; prefixes of other weights are forgotten."""
        self.advance(now)
        self.label = label
        self._prefixes.flush()
        for job in self._running.values():
            job.completion.mark_version(label, self._produced(job))

    def flush(self) -> bool:
        """Forget the prefixes; False if requests are running."""
        if self._running:
            return False
        self._prefixes.flush()
        return True

    def take_finished(self) -> list[Completion]:
        finished, self._finished = self._finished, []
        return finished

    def next_event(self) -> float | None:
        """Time of the next event without a call from outside; None if there is none."""
        if self.paused or not self._running:
            return None
        return self._base + self._first + (self._steps_to_event() - 1) * self._step_s

    def next_chunk(self) -> float | None:
        """When the next chunk of a stream is due, if no request enters or leaves before; None if none streams."""
        if self.paused or not self._streaming:
            return None
        steps = max(1, min(_next_shown(job) - self._produced(job) for job in self._streaming.values()))
        return self._base + self._first + (steps - 1) * self._step_s

    def take_chunks(self) -> list[Completion]:
        """Completions that stream and have enough for a chunk, with their outputs as far as they go."""
        due = [job for job in self._streaming.values() if self._produced(job) >= _next_shown(job)]
        for job in due:
            self._writer.extend(job.completion, self._produced(job))
        return [job.completion for job in due]

    def advance(self, now: float) -> None:
        """Process all events until `now`."""
        while (event := self.next_event()) is not None and event <= now + _EPSILON:
            self._apply(self._steps_to_event(), event)
            self._admit(event)
        self._skip_whole_steps(now)

    @property
    def _step_s(self) -> float:
        return (self.config.a_ms + self.config.c_ms * len(self._running)) * self._scale

    def _steps_to_event(self) -> int:
        """Steps until the membership changes: a request ends or enters, or the cache is full."""
        while self._ends and not self._alive(self._ends[0]):
            heapq.heappop(self._ends)
        steps = self._ends[0][0] - self.totals.engine_steps
        if self._waiting and self._fits(self._waiting[0]):
            steps = 1
        return max(1, min(steps, (self.config.kv_tokens - self._kv) // len(self._running)))

    def _apply(self, steps: int, end: float) -> None:
        """Make `steps` steps that end at time `end`."""
        self.totals.busy_s += end - self._base
        self.totals.engine_steps += steps
        self.totals.generation_tokens += steps * (len(self._running) - self._scoring)
        self._kv += steps * (len(self._running) - self._scoring)
        self._base = end
        self._first = self._step_s
        while self._ends and self._ends[0][0] <= self.totals.engine_steps:
            entry = heapq.heappop(self._ends)
            if self._alive(entry):
                job = entry[2]
                self._leave(job)
                self._end(job, self._reason(job))
        while self._running and self._kv + len(self._running) > self.config.kv_tokens:
            self._retract(next(reversed(self._running.values())))
        self._first = self._step_s

    def _skip_whole_steps(self, now: float) -> None:
        """Count the steps that have ended by `now`, so that what comes next begins at the next boundary."""
        if self.paused or not self._running or now < self._base + self._first:
            return
        step = self._step_s
        steps = 1 + (math.floor((now - self._base - self._first) / step + _EPSILON) if step > 0 else 0)
        steps = min(steps, self._steps_to_event() - 1)
        if steps > 0:
            self._apply(steps, self._base + self._first + (steps - 1) * step)

    def _settle(self, now: float) -> None:
        """After a change from outside: an idle engine admits at once, a busy one at the next step boundary."""
        if not self._running:
            self._base = max(self._base, now)
            self._admit(now)

    def _fits(self, job: _Job) -> bool:
        if self.holding or len(self._running) >= self.slots:
            return False
        context = job.completion.prompt_tokens + job.done
        return self._kv + context + len(self._running) + 1 <= self.config.kv_tokens

    def _admit(self, now: float) -> None:
        """Let requests enter at a boundary; their prefill makes the next step longer."""
        prefill = 0
        entered: list[Completion] = []
        while not self.paused and self._waiting and self._fits(self._waiting[0]):
            job = self._waiting.popleft()
            completion = job.completion
            context = completion.prompt_tokens + job.done
            cached = self._prefixes.cached(completion) if self.prefix_cache and not job.done else 0
            if completion.to_score:
                cached = min(cached, completion.score_from)
            if not completion.retractions:
                completion.cached_tokens = cached
            self.totals.prompt_tokens += context
            self.totals.cached_tokens += cached
            self.totals.computed_prompt_tokens += context - cached
            prefill += context - cached
            self._kv += context
            completion.admitted_s = completion.admitted_s or now
            completion.mark_version(self.label, job.done)
            job.since, job.order = self.totals.engine_steps, next(self._orders)
            self._running[id(completion)] = job
            if completion.stream:
                self._streaming[id(completion)] = job
            self._scoring += job.scores
            entered.append(completion)
            heapq.heappush(self._ends, (job.since + max(job.goal - job.done, 1), job.order, job))
        if prefill or not self._first:
            self._first = self._step_s + prefill * self.config.prefill_ms_per_token * self._scale
        for completion in entered:
            completion.first_token_s = completion.first_token_s or now + self._first

    def _alive(self, entry: tuple[int, int, _Job]) -> bool:
        """False for the entry of a job that has left, also if it has entered again since."""
        _, order, job = entry
        return id(job.completion) in self._running and job.order == order

    def _produced(self, job: _Job) -> int:
        running = self._running.get(id(job.completion)) is job and not job.scores
        return job.done + (self.totals.engine_steps - job.since if running else 0)

    def _leave(self, job: _Job) -> None:
        """Take a running job out of the batch, and its tokens out of the cache and into its record."""
        job.done = self._produced(job)
        del self._running[id(job.completion)]
        self._streaming.pop(id(job.completion), None)
        self._scoring -= job.scores
        self._kv -= job.completion.prompt_tokens + job.done

    def _retract(self, job: _Job) -> None:
        self._leave(job)
        job.completion.retractions += 1
        self.totals.num_retractions += 1
        self._waiting.appendleft(job)
        self._first = self._step_s

    def _reason(self, job: _Job) -> FinishReason:
        if job.natural:
            return FinishReason(type="stop", matched=job.completion.stop_ids[0])
        return FinishReason(type="length", length=job.completion.max_new)

    def _end(self, job: _Job, reason: FinishReason) -> None:
        completion = job.completion
        self._writer.write(completion, job.done, reason)
        if self.prefix_cache and job.done:
            self._prefixes.remember(completion)
        self.totals.num_requests += 1
        self.totals.num_aborted_requests += reason.type == "abort"
        completion.close(reason)
        self._finished.append(completion)


def _next_shown(job: _Job) -> int:
    """Output tokens with which the next chunk of a stream is due: one, and then by its interval."""
    shown = len(job.completion.output_ids)
    return shown + job.completion.stream_interval if shown else 1
