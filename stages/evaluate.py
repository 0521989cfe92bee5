"""The evaluate stage: held-out prompts at a known weights version, while training goes on.

The trainer pins a version. When every engine has applied it, the held-out prompts pass through the same generate,
tool and reward stages as training prompts. Engines hold the pinned version until `eval/released` names it, so an
answer cannot mix versions. If an engine restarts in between and an answer does mix them, it is counted as mixed and
the result says `complete: false`.

pass@k, best@k and mean@n are unbiased. With n rollouts of a prompt, c of them correct, the chance that k of them
drawn without replacement hold a correct one is 1 - C(n - c, k) / C(n, k) (Chen et al., arXiv:2107.03374). For rewards
that are not verdicts the same draw gives the expected maximum. k runs over the powers of two up to n; a prompt with
fewer than k rollouts is left out of that k. maj@n is of the answer that most of the n rollouts give. Each estimate and
each score has a 95 % interval over prompts.

Invariant: every pinned version ends in exactly one EvalDone and one release, also at a deadline or a drain.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Final

import msgspec
import numpy as np

from models.slime_arguments import slime_arguments
from stages.base import Stage, StageContext, beside
from stages.messages import EVAL_BASE, EvalDone, PromptGroup, RolloutSlice, Sample
from stages.ports import Lease, Ports, wait_at_most
from stages.prompts.stage import sampling_seed
from stages.rollouts import closing, raw_rewards, rollouts, verdicts
from stages.slime.convert import Evaluated
from stages.slime.hooks import eval_data, eval_log, logged
from stages.topic_values import EVALUATION, KEYS, PINNED, POLICY, RELEASED, carrying, released


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Probability that k of n rollouts, `correct` of them right, hold a right one. Needs 1 <= k <= n."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def best_at_k(rewards: Sequence[float], k: int) -> float:
    """Expected maximum of k rewards drawn without replacement. Needs 1 <= k <= n.

    The i-th smallest of n is the maximum of C(i - 1, k - 1) of the C(n, k) draws.
    """
    draws = math.comb(len(rewards), k)
    return sum(math.comb(i, k - 1) / draws * reward for i, reward in enumerate(sorted(rewards)))


def powers_of_two(n: int) -> list[int]:
    """1, 2, 4, ... up to n."""
    return [1 << i for i in range(n.bit_length())] if n > 0 else []


def estimates(groups: Iterable[Sequence[Sample]]) -> dict[str, float]:
    """The means of `by_prompt`."""
    return {name: fmean(values) for name, values in by_prompt(groups).items()}


def by_prompt(groups: Iterable[Sequence[Sample]]) -> dict[str, list[float]]:
    """An estimate's value for each group. `pass@k`, `mean@n` and `maj@n` over the groups whose rollouts all have a
    verdict; `best@k` and `mean@n` if none has.

    n is the size of the largest group; `maj@n` needs answers. Groups without rollouts are left out.
    """
    judged: list[list[Sample]] = []
    scores: list[Sequence[float]] = []
    for samples in groups:
        ends = closing(samples)
        if ends and len(verdicts(samples)) == len(ends):
            judged.append(ends)
        elif ends:
            scores.append(raw_rewards(samples).tolist())
    if judged:
        passes = [(len(ends), sum(bool(s.is_correct) for s in ends)) for ends in judged]
        largest = max(n for n, _ in passes)
        found = {f"pass@{k}": [pass_at_k(n, c, k) for n, c in passes if n >= k] for k in powers_of_two(largest)}
        found[f"mean@{largest}"] = [c / n for n, c in passes]
        if largest > 1 and any(sample.answer is not None for ends in judged for sample in ends):
            found[f"maj@{largest}"] = list(map(majority, judged))
        return found
    largest = max(map(len, scores), default=0)
    found = {f"best@{k}": [best_at_k(s, k) for s in scores if len(s) >= k] for k in powers_of_two(largest)}
    return found | ({f"mean@{largest}": list(map(fmean, scores))} if scores else {})


def majority(rollouts: Iterable[Sample]) -> float:
    """How often the most frequent answer is right, 0 or 1: the mean over answers that are equally frequent.

    Answers are the same if their text is, spaces aside. A rollout without one has no vote; without any vote it is 0.
    """
    votes: dict[str, list[float]] = {}
    for sample in rollouts:
        if sample.answer is not None:
            votes.setdefault("".join(sample.answer.split()), []).append(float(bool(sample.is_correct)))
    most = max(map(len, votes.values()), default=0)
    return fmean([fmean(found) for found in votes.values() if len(found) == most]) if votes else 0.0


Z: Final = 1.959964  # of a normal distribution, 95 % lie within so many standard deviations


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % confidence interval of the mean over prompts, one value for each.

    Wilson's where all lie between 0 and 1 (JASA 22, 1927): they vary no more than zeros and ones of the same mean, so
    it is not too narrow for shares. Else the percentiles of a bootstrap of 1000 draws with a fixed seed.
    """
    n, mean = len(values), fmean(values)
    if min(values) >= 0 and max(values) <= 1:
        centre, scale = mean + Z * Z / (2 * n), 1 + Z * Z / n
        half = Z * math.sqrt(max(mean * (1 - mean), 0.0) / n + (Z / (2 * n)) ** 2)
        return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)
    draw, array = np.random.default_rng(0), np.array(values)
    means = [array[draw.integers(0, n, n)].mean() for _ in range(1000)]
    low, high = np.quantile(means, [0.025, 0.975]).tolist()
    return low, high


Rollout = tuple[Sample, ...]  # its sequences
SENDS_AT_ONCE = 64


class EvaluateStage(Stage):
    """Runs an evaluation for each pinned version."""

    def __init__(self, context: StageContext) -> None:
        super().__init__(context)
        self.released = -1
        self._answers: dict[int, dict[tuple[str, int, int], Rollout]] = {}  # by version; (data set, prompt, sample)
        self._held: dict[int, list[Lease[RolloutSlice]]] = {}  # until the result is in the ledger's stream
        self._changed = asyncio.Event()
        self._places = asyncio.Semaphore(0)  # of rollouts that may still be sent before others are answered
        self._policy = EVALUATION if context.config.eval.apart else POLICY  # whose engines answer
        self._function = context.config.eval.eval_function_path is not None

    async def setup(self) -> None:
        from stages.data.prompt_set import load_eval_prompts

        self.sets = {name: load_eval_prompts(self.config, name, path) for name, path in self.config.eval.data_sets}

    async def run(self, ports: Ports) -> None:
        async with beside(self._follow_pins(ports)):
            await self._collect(ports)

    async def _collect(self, ports: Ports) -> None:
        """Waits for evaluated rollouts; ends with the inlet."""
        while (lease := await ports.inlets["in"].receive()) is not None:
            group = lease.message.group
            self.activity.items_in += 1
            if group.pinned_version <= self.released or group.dataset not in self.sets:
                lease.done()
                continue
            answers = self._answers.setdefault(group.pinned_version, {})
            for parts in rollouts(lease.message.samples):
                key = group.dataset, group.prompt_index, parts[0].index
                if parts[-1].sequence == parts[-1].sequences - 1 and key not in answers:  # the graded end is here
                    answers[key] = parts
                    self._places.release()
            self._held.setdefault(group.pinned_version, []).append(lease)
            self._changed.set()

    async def _follow_pins(self, ports: Ports) -> None:
        """Waits for a pinned version (topic `weights/pinned/<version>`) to land, oldest first; runs until cancelled."""
        revision, limit_s = 0, self.config.eval.eval_deadline_s
        waiting: tuple[int, float] = (-1, 0.0)  # for which version, and since when
        while True:
            changed = ports.topic.wait(revision, PINNED, RELEASED, "drain", *KEYS)
            # Only a wait for engines of its own has an end; all else is a change of the topic.
            look_s = 1.0 if self._policy == EVALUATION and waiting[0] > self.released else None
            revision = await wait_at_most(look_s, changed) or revision
            self.released = max(self.released, released(ports.topic))
            pinned = sorted(int(key.removeprefix(PINNED)) for key in ports.topic.items(PINNED))
            for version in [v for v in pinned if v > self.released]:
                carried = [entry.version for entry in carrying(ports.topic, self._policy).values()]
                waiting = waiting if waiting[0] == version else (version, time.monotonic())
                # Engines of the rollouts are waited for as long as the run goes on: without them it stands still.
                lost = self._policy == EVALUATION and time.monotonic() - waiting[1] > limit_s
                if ports.topic.get("drain") is None and not (carried and min(carried) >= version) and not lost:
                    break
                await self._evaluate(ports, version, lost)

    async def _evaluate(self, ports: Ports, version: int, lost: bool) -> None:
        """`lost`: nobody would answer."""
        started = time.monotonic()
        wanted = 1 if self._function else sum(len(self.sets[name]) * self._samples(name) for name in self.sets)
        most = self.config.eval.eval_max_in_flight or wanted
        self._places = asyncio.Semaphore(max(most, *map(self._samples, self.sets)))
        with self.activity.working(), self.span("evaluate", detail=f"version {version}"):
            late = f"no engine was ready for it within --eval-deadline-s {self.config.eval.eval_deadline_s:g}"
            if not lost:
                async with beside(self._send_all(ports, version)):
                    late = await self._await_results(ports, version, wanted, started)
        metrics, complete = self._function_score(version) if self._function else self._score(version)
        metrics["eval/time_s"] = time.monotonic() - started
        failure = next((parts[-1].error for parts in self._answers.get(version, {}).values() if self._function), None)
        detail = "" if complete else late or failure or "some answers are missing or of another version"
        if (path := self.config.observe.custom_eval_rollout_log_function_path) is not None:
            graded = {name: self._graded(version, name) for name in self.sets}
            given = self._function_found(version).data if self._function else eval_data(graded)
            call = ("--custom-eval-rollout-log-function-path", eval_log(path), version, slime_arguments(self.config))
            await logged(*call, given, dict(metrics))
        self.released = version
        await ports.outlets["settle"].send(EvalDone(version, metrics, complete, detail), f"eval/{version}")
        await ports.topic.publish(RELEASED, str(version).encode())
        for old in [v for v in self._held if v <= version]:
            self._answers.pop(old, None)
            for lease in self._held.pop(old):
                lease.done()
        self.activity.items_out += 1

    async def _await_results(self, ports: Ports, version: int, wanted: int, started: float) -> str:
        """Waits for all answers; unblocked by each arrival, by a drain or by the deadline. Returns why it gave up."""
        while len(self._answers.get(version, ())) < wanted:
            if ports.topic.get("drain") is not None:
                return "drained"
            left = self.config.eval.eval_deadline_s - (time.monotonic() - started)
            if left <= 0:
                return f"--eval-deadline-s {self.config.eval.eval_deadline_s:g} passed"
            self._changed.clear()
            await wait_at_most(min(left, 1.0), self._changed.wait())
        return ""

    async def _send_all(self, ports: Ports, version: int) -> None:
        """Waits for the hub's acceptance, a window of prompts at a time."""
        window = asyncio.Semaphore(SENDS_AT_ONCE)

        async def send(group: PromptGroup) -> None:
            try:
                await ports.outlets["out"].send(group, group.key)
            finally:
                window.release()

        if self._function:  # one call for all sets; the group only carries the version
            name, prompts = next(iter(self.sets.items()))
            fresh = prompts.get(0).group(EVAL_BASE, 0, 1, sampling_seed(self.config.run.seed + 1, 0))
            carrier = msgspec.structs.replace(fresh, purpose="eval", dataset=name, pinned_version=version)
            await ports.outlets["out"].send(carrier, carrier.key)
            return
        async with asyncio.TaskGroup() as sends:
            for name, prompts in self.sets.items():
                grader = self.config.eval.own(name).rm_type
                for index in range(len(prompts)):
                    for _ in range(self._samples(name)):
                        await self._places.acquire()
                    await window.acquire()
                    seed = sampling_seed(self.config.run.seed + 1, index)
                    fresh = prompts.get(index).group(EVAL_BASE + index, index, self._samples(name), seed)
                    graded = fresh.metadata
                    if grader is not None:  # a row's own grader stays
                        graded = msgspec.json.encode({"rm_type": grader} | fresh.row_metadata).decode()
                    pinned = {"purpose": "eval", "dataset": name, "pinned_version": version, "metadata": graded}
                    sends.create_task(send(msgspec.structs.replace(fresh, **pinned)))

    def _samples(self, name: str) -> int:
        """Rollouts of each prompt of a data set."""
        return self.config.eval.of(name).n_samples_per_eval_prompt

    def _graded(self, version: int, name: str) -> list[RolloutSlice]:
        """The answers to a data set, with their prompts."""
        n = self._samples(name)
        return [
            RolloutSlice(self.sets[name].get(prompt).group(prompt, prompt, n, 0), parts[-1:])
            for (dataset, prompt, _), parts in sorted(self._answers.get(version, {}).items(), key=lambda item: item[0])
            if dataset == name
        ]

    def _score(self, version: int) -> tuple[dict[str, float], bool]:
        metrics: dict[str, float] = {}
        complete = True
        answers = dict(sorted(self._answers.get(version, {}).items()))  # sums do not depend on who came first
        for name, prompts in self.sets.items():
            given = [parts for (dataset, _, _), parts in answers.items() if dataset == name]
            n = len(prompts) * self._samples(name)
            pure = [parts[-1] for parts in given if _is_of(parts, version)]
            complete &= len(pure) == n
            if not pure:
                continue
            groups = _by_prompt(answers, name, version)
            metrics[f"eval/{name}"] = sum(s.reward or 0.0 for s in pure) / len(pure)
            metrics[f"eval/{name}-prompts"] = float(len(groups))
            metrics[f"eval/{name}-truncated_ratio"] = sum(s.status == "truncated" for s in pure) / len(pure)
            metrics[f"eval/{name}-failed_ratio"] = sum(s.status == "failed" for s in pure) / len(pure)
            metrics[f"eval/{name}-response_len"] = sum(s.response_length for s in pure) / len(pure)
            metrics[f"eval/{name}-mixed_versions"] = float(len(given) - len(pure))
            found = by_prompt(groups)
            metrics |= {f"eval/{name}-{estimate}": fmean(values) for estimate, values in found.items()}
            rewards = [fmean([sample.reward or 0.0 for sample in samples]) for samples in groups]
            for label, values in {name: rewards, **{f"{name}-{key}": found[key] for key in found}}.items():
                metrics[f"eval/{label}-ci_low"], metrics[f"eval/{label}-ci_high"] = interval(values)
        return metrics, complete

    def _function_found(self, version: int) -> Evaluated:
        """What `--eval-function-path` returned; nothing if it failed."""
        left = [parts[-1].left for parts in self._answers.get(version, {}).values() if parts[-1].left]
        return msgspec.json.decode(left[0], type=Evaluated) if left else Evaluated()

    def _function_score(self, version: int) -> tuple[dict[str, float], bool]:
        found = self._function_found(version)
        metrics = {f"eval_function/{name}": value for name, value in found.metrics.items()}
        for name, one in found.data.items():
            metrics[f"eval/{name}"] = fmean(one["rewards"])
            metrics[f"eval/{name}-prompts"] = float(len(one["rewards"]))
            if one["truncated"]:
                metrics[f"eval/{name}-truncated_ratio"] = fmean(one["truncated"])
        return metrics, bool(found.data) and set(found.versions) <= {version}


def _is_of(parts: Rollout, version: int) -> bool:
    """Whether the model made all of a rollout with these weights."""
    return all(made == version for part in parts for made in part.model_versions)


def _by_prompt(answers: Mapping[tuple[str, int, int], Rollout], name: str, version: int) -> list[list[Sample]]:
    """The answers of the version to each prompt of a data set; a failed one counts as wrong."""
    found: dict[int, list[Sample]] = {}
    for (dataset, prompt, _), parts in answers.items():
        if dataset == name and _is_of(parts, version):
            found.setdefault(prompt, []).append(parts[-1])
    if not any(sample.is_correct is not None for samples in found.values() for sample in samples):
        return list(found.values())
    return [
        [msgspec.structs.replace(s, is_correct=False) if s.status == "failed" else s for s in samples]
        for samples in found.values()
    ]
