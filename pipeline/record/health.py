"""Whether training goes wrong, from figures that a run records anyway: alarms with cause, figures and cure. And lines
for the user about a run that stands still, or about environments that are down.

Each figure is a `Curve`, smoothed over the last steps. An alarm needs a change that is large against what the figure
has reached, and against its own noise. Short responses and a low entropy are right where the reward has risen with
them, so they are alarms only where it is low.

A run stands still while no group ends and no batch is trained. That may be right (a batch takes long on slow hardware),
so it is reported each minute and kept for the summary. `limit_s` is another clock: it runs while no message moves
between the stages either, and ends the run. Outages of environments come from the agents stage over the topic; they are
reported, and summed up at the end.

Invariants: alarms see no I/O and no clock, so that they are a function of the figures; a healthy noisy curve raises
none; an alarm is reported when it begins, and again after `PAUSE_STEPS` steps while it lasts.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from statistics import fmean
from typing import Final

import msgspec
from msgspec import Struct

from configs.schema import Config
from configs.schema.algorithm import GROUP_RELATIVE
from pipeline.facts.run_log import PROGRAM
from stages.agents.hosting import OutageNotice
from stages.ports import Readable

WINDOW: Final = 16  # steps of a mean
NOISE_WINDOW: Final = 4 * WINDOW
IDLE_BATCHES: Final = 20  # without a difference between rewards, or as many groups without a batch
PAUSE_STEPS: Final = 50
SIGMAS: Final = 10  # of the noise of a mean
SMALLEST_SET: Final = 64  # rows that an evaluation is taken to have: decides how much an accuracy may vary

REWARD: Final = "reward/mean"
LENGTH: Final = "rollout/response_len/mean"
TRUNCATED: Final = "rollout/truncated_ratio"
ENTROPY: Final = "train/entropy_loss"
CURES: Final = {
    "reward": "go back to a checkpoint before, with a lower --lr or with --use-kl-loss",
    "length": f"{PROGRAM} samples RUN shows them; check what the grader gives for them, and lower --lr",
    "truncated": "raise --rollout-max-response-len, or set --overlong-buffer-len",
    "entropy": "lower --lr; against a low entropy raise --eps-clip-high or --entropy-coef, against a high one set "
    "--use-kl-loss",
    "eval": "go back to the best version, with a lower --lr or with --use-kl-loss",
    "ess": "the policy is far from the policy that sampled; lower --async-buffer-size or --lr, or bound the weights "
    "more tightly with --tis-clip",
    "signal": f"if all are right, the data is learnt; if not, check the grader on {PROGRAM} samples RUN, or "
    "choose prompts that the model sometimes solves",
    "untrained": f"{PROGRAM} samples RUN --untrained shows them; check the grader and the filters; "
    "--max-filter-rounds ends the run",
}


class Alarm(Struct, frozen=True):
    """Something that goes wrong. Part of `summary.json`."""

    what: str
    since: int  # step
    figures: str

    @property
    def cure(self) -> str:
        return CURES[self.what.partition(" ")[0]]

    @property
    def sentence(self) -> str:
        return f"{self.what}: {self.figures}, since step {self.since}; {self.cure}"


class Curve:
    """A figure by step, as means over `WINDOW` steps. `first`, `low` and `high` are such means, NaN until there is
    one; `least` is the smallest single value."""

    def __init__(self) -> None:
        self._last = deque[float](maxlen=WINDOW)
        self._squares = deque[float](maxlen=NOISE_WINDOW)  # of the newest differences from step to step
        self.recent = self.first = self.low = self.high = self.least = math.nan
        self.high_step = 0

    def add(self, step: int, value: float) -> None:
        if not math.isfinite(value):
            return
        if self._last:
            self._squares.append((value - self._last[-1]) ** 2)
        self._last.append(value)
        self.least = min(value, self.least)
        if len(self._last) < WINDOW:
            return
        mean = self.recent = fmean(self._last)
        self.first = mean if math.isnan(self.first) else self.first
        self.low = min(mean, self.low)  # of a NaN in the second place the mean
        if not mean <= self.high:
            self.high, self.high_step = mean, step

    @property
    def noise(self) -> float:
        """Standard deviation of the difference of two means, were all changes from step to step noise."""
        return math.sqrt(fmean(self._squares or (0.0,)) / WINDOW)

    def fallen(self, share: float) -> bool:
        """Whether the mean is below its best by this share of the size or the range of the figure, and by more than
        noise."""
        size = max(abs(self.high), self.high - self.least)
        return self.high - self.recent > max(SIGMAS * self.noise, share * size, 1e-9)

    @property
    def suffers(self) -> bool:
        """Whether the mean is far below its best, or at the smallest value that there was."""
        return self.fallen(0.4) or self.recent <= self.least + 1e-9


class HealthWatch:
    """Fed with steps, evaluations and ends of groups in their order. Each call returns the alarms to report now."""

    def __init__(self, config: Config) -> None:
        self._ess_warn = config.correction.ess_warn
        self._idle_groups = IDLE_BATCHES * config.rollout.rollout_batch_size
        estimator = config.algorithm.advantage_estimator
        # A teacher's log-probs, or labels, teach where rewards are equal.
        taught = config.distill.use_opd or estimator == "on_policy_distillation"
        self._by_reward = not taught and config.train.loss_type != "sft_loss"
        self._by_group = estimator in GROUP_RELATIVE
        self._curves = {name: Curve() for name in (REWARD, LENGTH, TRUNCATED, ENTROPY)}
        self._equal = 0  # steps in a row
        self._ess = math.nan
        self._evals: dict[str, list[tuple[int, float]]] = {}
        self._ended = Counter[str]()  # groups since the last step, by outcome and reason
        self.at = 0
        self.active: dict[str, Alarm] = {}
        self._reported: dict[str, int] = {}

    def step(self, step: int, metrics: Mapping[str, float]) -> list[Alarm]:
        """A batch was trained."""
        self.at = step
        self._ended.clear()
        for name, curve in self._curves.items():
            curve.add(step, metrics.get(name, math.nan))
        equal = metrics.get("rollout/zero_std_frac") == 1 if self._by_group else metrics.get("train/reward_std") == 0
        self._equal = self._equal + 1 if equal and self._by_reward else 0
        self._ess = metrics.get("train/ess", math.nan)
        return self._judge()

    def evaluated(self, dataset: str, version: int, score: float) -> list[Alarm]:
        """An evaluation is complete."""
        self.at = max(self.at, version)
        if math.isfinite(score):
            self._evals.setdefault(dataset, []).append((version, score))
        return self._judge()

    def ended(self, outcome: str, detail: str) -> list[Alarm]:
        """A group ended."""
        self._ended[f"{outcome}: {detail}"] += outcome in ("filtered", "failed")
        if not self._ended.total() or self._ended.total() % self._idle_groups:
            return []
        self._reported.pop("untrained", None)  # no step ends that would count the pause
        return self._judge()

    def _judge(self) -> list[Alarm]:
        before = self.active
        self.active = {
            what: Alarm(what, before[what].since if what in before else self.at, figures)
            for what, figures in self._findings()
        }
        due = [a for a in self.active.values() if self.at - self._reported.get(a.what, -PAUSE_STEPS) >= PAUSE_STEPS]
        self._reported |= {alarm.what: self.at for alarm in due}
        return due

    def _findings(self) -> Iterator[tuple[str, str]]:
        """What goes wrong now, with its figures."""
        reward, length, truncated, entropy = self._curves.values()
        if reward.fallen(0.5):
            best = f"its best was {reward.high:.3f} (step {reward.high_step})"
            yield "reward", f"the reward collapsed to {reward.recent:.3f}, {best}"
        if length.recent < 0.2 * length.high and reward.suffers:
            before = f"they had {length.high:.1f} (step {length.high_step})"
            yield "length", f"responses collapsed to {length.recent:.1f} tokens, {before}"
        if truncated.recent >= max(0.5, truncated.low + 0.3):
            before = f"once {truncated.low:.0%}"
            yield "truncated", f"{truncated.recent:.0%} of the responses reach their length limit, {before}"
        low, high = min(0.05 * entropy.first, 0.05), entropy.first + max(1.0, entropy.first)
        if (0 <= entropy.recent < low or entropy.recent > high) and reward.suffers:
            change = "collapsed" if entropy.recent < low else "rose"
            yield "entropy", f"the entropy {change} to {entropy.recent:.4f} nats, it began with {entropy.first:.3f}"
        for name, points in self._evals.items():
            if fallen := fallen_score(points):
                yield f"eval {name}", f"eval {name} fell to {fallen}"
        if self._ess < self._ess_warn:
            yield "ess", f"train/ess is {self._ess:.2f}, below --ess-warn {self._ess_warn:g}"
        if self._equal >= IDLE_BATCHES:
            where = "of no group" if self._by_group else "of no batch"
            mean = f"mean {reward.recent:.3f}"
            yield "signal", f"the rewards {where} differ for {self._equal} batches ({mean}), so they teach nothing"
        if (count := self._ended.total()) >= self._idle_groups:
            (reason, most), *_ = self._ended.most_common(1)
            yield "untrained", f"{count} groups ended and no batch was trained ({most} {reason})"


def fallen_score(points: Sequence[tuple[int, float]]) -> str:
    """The figures of a score that is far below its best, empty if it is not. `points`: (version, score) in order.

    Two evaluations in a row are compared with the best two in a row; of an extreme fall one is enough.
    """
    values = [score for _, score in points]
    if len(values) < 2:
        return ""
    best = max([(a + b) / 2 for a, b in pairwise(values[:-1])], default=values[0])
    falls = [min(b - a, 0.0) ** 2 for a, b in pairwise(values[:-2])]
    noise = math.sqrt(fmean(falls)) if falls else 0.0
    if all(0 <= value <= 1 for value in values):
        noise = max(noise, math.sqrt(best * (1 - best) / SMALLEST_SET))
    limit = max(0.4 * max(abs(best), best - min(values)), 4 * noise)
    twice = len(values) > 2 and best - max(values[-2:]) > limit
    if not twice and best - values[-1] <= 1.8 * limit:
        return ""
    version, score = max(points, key=itemgetter(1))
    return f"{values[-1]:.3f} at version {points[-1][0]}, its best was {score:.3f} at version {version}"


MOST_KEPT: Final = 100  # stalls in the summary; the longest


class Stall(Struct, frozen=True):
    """A time in which nothing was trained. Part of `summary.json`."""

    began_s: float  # after the start of the reinforcement learning
    seconds: float
    waits: str  # what waited for what, by the newest report


class StallWatch:
    """Fed with looks at the run, a few per second.

    Args:
        notice_s: after how long a stall is reported, and the interval of further reports.
        limit_s: after how long without any message between stages `over` is set.
        started_s: when the run began, by the clock of the looks.
    """

    def __init__(self, notice_s: float, limit_s: float, started_s: float) -> None:
        self.notice_s, self.limit_s = notice_s, limit_s
        self.over: str | None = None  # why the run is to be ended
        self._started_s = self._since_s = self._moved_s = started_s
        self._done: Hashable = None
        self._moved: Hashable = None
        self._reports = 0  # of this stall
        self._waits = ""
        self._past: list[Stall] = []

    def look(self, now_s: float, done: Hashable, moved: Hashable, waits: Callable[[float], str]) -> str | None:
        """The line for the user now, if any.

        `done`: changes with each end of a group and each batch. `moved`: with each message between stages. `waits`:
        makes the sentence from the seconds since the last progress.
        """
        if done != self._done:
            line = f"there is progress again, after {now_s - self._since_s:.0f} s" if self._reports else None
            self._close(now_s)
            self._done, self._moved = done, moved
            self._since_s = self._moved_s = now_s
            return line
        if moved != self._moved:
            self._moved, self._moved_s = moved, now_s
        quiet_s = now_s - self._since_s
        if self.over is None and now_s - self._moved_s > self.limit_s:
            self.over = f"nothing has moved for --stall-limit-s {self.limit_s:g}: {waits(quiet_s)}"
        if quiet_s < (self._reports + 1) * self.notice_s:
            return None
        self._reports = int(quiet_s // self.notice_s)
        self._waits = waits(quiet_s)
        return f"nothing was trained for {quiet_s:.0f} s: {self._waits}"

    @property
    def waits(self) -> str:
        """The newest report, if nothing was trained since."""
        return self._waits if self._reports else ""

    def stalls(self, now_s: float) -> tuple[Stall, ...]:
        """All reported stalls in their order, the present stall included."""
        self._close(now_s)
        return tuple(self._past)

    def _close(self, now_s: float) -> None:
        if not self._reports:
            return
        seconds = round(now_s - self._since_s, 1)
        self._past.append(Stall(round(self._since_s - self._started_s, 1), seconds, self._waits))
        self._reports = 0
        if len(self._past) > MOST_KEPT:
            self._past.remove(min(self._past, key=lambda stall: stall.seconds))


ENVIRONMENT: Final = "environment/"


class OutageSummary(Struct, frozen=True):
    """Of one environment in all replicas. Part of `summary.json`."""

    outages: int
    seconds: float  # of the replica that waited longest
    reason: str  # of the newest


class OutageWatch:
    """Fed with looks at the topic."""

    def __init__(self) -> None:
        self._newest: dict[str, OutageNotice] = {}  # by replica and environment
        self._since: dict[str, float] = {}
        self._seconds: dict[str, float] = {}

    def look(self, topic: Readable) -> Iterator[str]:
        """The lines for the user now."""
        for key, value in topic.items(ENVIRONMENT).items():
            notice = msgspec.msgpack.decode(value, type=OutageNotice)
            if notice == self._newest.get(key):
                continue
            self._newest[key] = notice
            name, replica = notice.environment, key.rpartition("/")[2]
            if notice.out:
                self._since[key] = time.monotonic()
                yield (
                    f"environment {name} is out of order ({notice.reason}): {replica} pauses its episodes, and tries "
                    "again after growing waits"
                )
            else:
                began = self._since.pop(key, None)
                self._seconds[key] = self._seconds.get(key, 0.0) + notice.lasted_s
                if began is not None:  # else it was over before it was seen; the summary counts it
                    yield f"environment {name} works again, after {notice.lasted_s:.0f} s; {replica} continues"

    def summary(self) -> dict[str, OutageSummary]:
        """The outages until now, by environment."""
        now, summaries = time.monotonic(), dict[str, OutageSummary]()
        for key, notice in self._newest.items():
            seconds = self._seconds.get(key, 0.0) + (now - self._since[key] if key in self._since else 0.0)
            before = summaries.get(notice.environment, OutageSummary(0, 0.0, ""))
            count = before.outages + notice.count
            summaries[notice.environment] = OutageSummary(count, round(max(before.seconds, seconds), 1), notice.reason)
        return summaries
