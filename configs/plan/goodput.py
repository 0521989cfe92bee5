"""How much of what the engines could make is trained: a pure simulation of gate, slots and trainer. No I/O, no clock.

    goodput = trained tokens within the staleness bound / tokens that the slots can make in the same time

It knows lengths, slots, batch, N, the rule for stale tokens and the speed of the trainer, and nothing that costs time
beyond these: no transport, no weight update. So it gives the share that a perfect scheduler would attain. The planners,
`--async-buffer-size auto`, a running run and `bench.modes` use the same function.

Time is counted in decode steps of full engines: a running rollout makes one token per step. A response that lives for
many batches is the reason why a small N costs goodput: the gate lets (N + 1) B groups out, each of which waits for its
longest member, and what is older than N versions is not trained.
"""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Mapping
from functools import lru_cache
from statistics import NormalDist, fmean
from typing import Final

import msgspec
from msgspec import Struct

from configs.graph import replicas
from configs.plan.run_estimate import EngineMemory
from configs.schema import Config
from configs.schema.rollout import AUTO_MOST

BATCHES: Final = 64  # that a simulation counts, after a quarter as many for its beginning
LEAST_GAIN: Final = 0.03  # of goodput, for a larger N in a running run
ROLLOUTS: Final = 64  # of a batch that are simulated
SIGMA: Final = 0.8  # of the logarithm of lengths that nobody has measured; their mean is a quarter of the longest
UNMEASURED_AHEAD: Final = 2  # the most that `auto` starts with before it has measured lengths
STEP_BYTES: Final = 0.007 * 0.8 * 3.35e12  # that an H100 could read in the part of a decode step that is always there
TOLERANCE: Final = 0.02  # of goodput, that a smaller N may cost: fresher tokens learn better


class Workload(Struct, frozen=True, kw_only=True):
    """`lengths`: of responses in tokens, from which the simulation draws. `slots`: rollouts that all engines decode at
    once. `train_ratio`: W_t / W_g, the trainer's time per batch by that of full engines for as many rollouts.
    `growth`: share of the time of a full decode step that grows with the running rollouts; 0: a step takes always as
    long. `masked`: stale tokens are masked, instead of dropping their groups. `wait`: mean decode steps that a rollout
    waits for tools or its grader, without a slot; exponential, and put behind its tokens. `filtered`: share
    of the groups that are not trained, for their rewards are equal. `streams`: groups are trained as they arrive, and
    not when the batch is complete. `cancels`: groups too old for every later batch leave their slots."""

    lengths: tuple[int, ...]
    slots: int
    groups: int
    members: int
    train_ratio: float = 1.0
    growth: float = 0.0
    interval: int = 1
    masked: bool = False
    wait: float = 0.0
    filtered: float = 0.0
    streams: bool = False
    cancels: bool = False


class Attained(Struct, frozen=True, kw_only=True):
    """`stale`: share of the made tokens that were too old. `staleness`: mean versions of trained tokens."""

    goodput: float
    stale: float
    staleness: float


class _Simulation:
    def __init__(self, work: Workload, ahead: int, seed: int) -> None:
        self.work, self.bound = work, ahead + work.interval - 1
        self._random = random.Random(seed)
        self.now = self._tokens = 0.0  # decode steps of full engines; tokens that a rollout running since 0 would have
        self._landed = [0.0]  # such tokens when each version reached the engines
        self._versions = [0]
        self._queue: deque[tuple[int, int]] = deque()  # (group, length)
        self._running: list[tuple[float, float, int]] = []  # (end, start, group), both in such tokens
        self._waiting: list[tuple[float, float, float, int]] = []  # (until, start, end, group); the first in steps
        self._spans: list[list[tuple[float, float]]] = []  # of the ended members of each group
        self._ended: deque[int] = deque()  # groups of which all members have ended
        self._open = 0
        self._batch: list[dict[int, float]] = []  # trained tokens of each group by age
        self.batches = 0
        self.trained: dict[int, float] = {}  # tokens by age
        self.stale = 0.0
        self._batch_tokens = work.groups * work.members * sum(work.lengths) / len(work.lengths)
        self._train_s = work.train_ratio * self._batch_tokens / work.slots
        self._ahead = 0.0  # until when the trainer works on groups of a batch that is not complete
        self._until = math.inf  # the end of the batch in training

    def run(self, batches: int) -> None:
        """Until so many batches are trained in all."""
        while self.batches < batches:
            self._admit()
            if self._until == math.inf and self._take():
                self._until = max(self._ahead, self.now) + (0.0 if self.work.streams else self._train_s)
            step = 1 - self.work.growth * (1 - len(self._running) / self.work.slots)
            end = self.now + (self._running[0][0] - self._tokens) * step if self._running else math.inf
            ready = self._waiting[0][0] if self._waiting else math.inf
            self._tokens += (min(self._until, ready, end) - self.now) / step if self._running else 0.0
            self.now = min(self._until, ready, end)
            if self._until == self.now:
                self._until = math.inf
                self._train()
            elif ready == self.now:
                _, start, end, group = heapq.heappop(self._waiting)
                self._end(start, end, group)
            else:
                self._tokens, start, group = heapq.heappop(self._running)
                if self.work.wait:
                    until = self.now + self._random.expovariate(1 / self.work.wait)
                    heapq.heappush(self._waiting, (until, start, self._tokens, group))
                else:
                    self._end(start, self._tokens, group)

    def _end(self, start: float, end: float, group: int) -> None:
        self._spans[group].append((start, end))
        if len(self._spans[group]) == self.work.members:
            self._ended.append(group)

    def _admit(self) -> None:
        work = self.work
        while self._open < (self._versions[-1] + self.bound + 1 - self.batches) * work.groups:
            self._open += 1
            self._queue += [(len(self._spans), self._random.choice(work.lengths)) for _ in range(work.members)]
            self._spans.append([])
        while self._queue and len(self._running) < work.slots:
            group, length = self._queue.popleft()
            heapq.heappush(self._running, (self._tokens + length, self._tokens, group))

    def _take(self) -> bool:
        """Whether the next batch is complete, after it has taken what has ended."""
        while self._ended and len(self._batch) < self.work.groups:
            ages: dict[int, float] = {}
            for start, end in self._spans[self._ended.popleft()]:
                self._add_ages(ages, start, end)
            fresh = {age: tokens for age, tokens in ages.items() if age <= self.bound}
            if not self.work.masked and len(fresh) < len(ages):
                fresh = {}
            self.stale += sum(ages.values()) - sum(fresh.values())
            if fresh and not (self.work.filtered and self._random.random() < self.work.filtered):
                self._batch.append(fresh)
                if self.work.streams:
                    share = sum(ages.values()) / self._batch_tokens
                    self._ahead = max(self._ahead, self.now) + share * self._train_s
            else:
                self._open -= 1
                self._admit()
        return len(self._batch) == self.work.groups

    def _add_ages(self, ages: dict[int, float], start: float, end: float) -> None:
        place = bisect_right(self._landed, start) - 1
        while start < end:
            until = min(end, self._landed[place + 1]) if place + 1 < len(self._landed) else end
            age = self.batches - self._versions[place]
            ages[age] = ages.get(age, 0.0) + until - start
            start, place = until, place + 1

    def _train(self) -> None:
        for ages in self._batch:
            for age, tokens in ages.items():
                self.trained[age] = self.trained.get(age, 0.0) + tokens
        self._open -= len(self._batch)
        self._batch.clear()
        self.batches += 1
        if self.batches % self.work.interval == 0:
            self._versions.append(self.batches)
            self._landed.append(self._tokens)
            if self.work.cancels and not self.work.masked:
                self._cancel()

    def _cancel(self) -> None:
        """Take the groups out that no later batch may train."""
        kept = self._landed[bisect_left(self._versions, self.batches - self.bound)]
        gone = {group for _, start, group in self._running if start < kept}
        for _, start, group in self._running:
            if group in gone:
                self._spans[group].append((start, self._tokens))
        self.stale += sum(end - start for group in gone for start, end in self._spans[group])
        self._running = [running for running in self._running if running[2] not in gone]
        heapq.heapify(self._running)
        self._waiting = [waiting for waiting in self._waiting if waiting[3] not in gone]
        heapq.heapify(self._waiting)
        self._queue = deque(queued for queued in self._queue if queued[0] not in gone)
        self._open -= len(gone)


@lru_cache(32)
def attainable(work: Workload, ahead: int, *, batches: int = BATCHES, seed: int = 0) -> Attained:
    """What is attainable with N = `ahead`. Takes 5 to 10 ms on one core, once. A larger batch is simulated by a part
    of its groups and of the slots, which changes the result by about 0.02."""
    groups = min(work.groups, max(8, ROLLOUTS // work.members))
    slots = max(1, round(work.slots * groups / work.groups))
    work = msgspec.structs.replace(work, groups=groups, slots=slots)
    simulation = _Simulation(work, ahead, seed)
    simulation.run(batches // 4)
    before_s, before, stale = simulation.now, dict(simulation.trained), simulation.stale
    simulation.run(batches // 4 + batches)
    ages = {age: tokens - before.get(age, 0.0) for age, tokens in simulation.trained.items()}
    trained, made = sum(ages.values()), (simulation.now - before_s) * work.slots
    return Attained(
        goodput=trained / made,
        stale=(simulation.stale - stale) / (trained + simulation.stale - stale),
        staleness=sum(age * tokens for age, tokens in ages.items()) / trained,
    )


def choose_ahead(work: Workload, most: int = AUTO_MOST) -> tuple[int, dict[int, Attained]]:
    """The smallest N of 1 to `most` whose goodput is within `TOLERANCE` of the best, and what each N attains."""
    found = {ahead: attainable(work, ahead) for ahead in range(1, most + 1)}
    best = max(one.goodput for one in found.values())
    return min(ahead for ahead, one in found.items() if one.goodput >= best - TOLERANCE), found


def chosen_line(work: Workload, found: Mapping[int, Attained], now: int, ahead: int) -> str | None:
    """What a change from N = `now` to `ahead` brings; None where it is not worth one. Going down must cost nothing."""
    before, after = found.get(now) or attainable(work, now), found[ahead]
    least = LEAST_GAIN if ahead > now else -LEAST_GAIN / 3
    if ahead == now or after.goodput - before.goodput < least:
        return None
    return (
        f"--async-buffer-size auto: N {now} to {ahead}, attainable goodput {before.goodput:.2f} to {after.goodput:.2f}"
        f"; trained tokens {before.staleness:.1f} to {after.staleness:.1f} versions old on average, too old "
        f"{before.stale:.0%} to {after.stale:.0%} (responses of {fmean(work.lengths):.0f} tokens on average, "
        f"{max(work.lengths)} at most; training takes {work.train_ratio:.2f} times as long as generation)"
    )


def planned_workload(config: Config, engine: EngineMemory | None = None) -> Workload:
    """Before anything was measured: lognormal lengths (`SIGMA`) with a quarter of the longest response as mean, or
    those of the simulated engine; a trainer as fast as the engines. `engine`: of SGLang on H100, where fewer rollouts
    decode faster, for less of the KV cache is read."""
    rollout, model = config.rollout, config.engine.simulated
    longest, growth = rollout.rollout_max_response_len, 0.0
    lengths = lognormal_lengths(longest / 4, SIGMA, longest)
    slots = min(config.engine.engine_slots, rollout.server_concurrency)
    if config.engine.engine == "simulated":
        lengths = lognormal_lengths(model.length_mean, model.length_sigma, min(longest, model.length_cap))
        growth = model.c_ms * slots / max(model.a_ms + model.c_ms * slots, 1e-9)
    elif config.engine.engine == "sglang" and engine is not None:
        # Tokens in the cache of a running rollout, mean over its time.
        context = (config.data.rollout_max_prompt_len or 0) + fmean(n * n for n in lengths) / fmean(lengths) / 2
        slots = max(1, min(slots, int(engine.kv_tokens / context)))
        cache = engine.kv_bytes_per_token * context * slots
        growth = cache / (cache + engine.weights + STEP_BYTES)
    return Workload(
        lengths=lengths,
        slots=slots * max(1, replicas(config).get("engine", 1)),
        groups=rollout.rollout_batch_size,
        members=rollout.n_samples_per_prompt,
        growth=growth,
        interval=config.asynchrony.update_weights_interval,
        masked=config.asynchrony.async_unused_samples_handler == "train_masked",
        cancels=config.asynchrony.cancel_stale_rollouts,
    )


def lognormal_lengths(mean: float, sigma: float, cap: int, count: int = 512) -> tuple[int, ...]:
    """Quantiles of a lognormal whose mean before the cap is `mean`; `sigma`: of its logarithm."""
    mu = math.log(max(mean, 1.0)) - sigma * sigma / 2
    normal = NormalDist()
    values = (mu + sigma * normal.inv_cdf((place + 0.5) / count) for place in range(count))
    return tuple(min(cap, max(1, round(math.exp(value)))) for value in values)
