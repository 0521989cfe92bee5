"""`summary.json`: what a run did, in numbers; and the text at its end: where everything is and what to do next.

Invariants: every number is computed from counts of the run, by the small functions here; the file appears
whole or not at all, and decodes into the same struct again.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import platform
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from models.disk import read_file
from pipeline.errors import UsageError
from pipeline.facts.run_log import PROGRAM
from pipeline.facts.stats import Changed, GoodputFigures, LedgerCounts
from pipeline.observe.table import duration, failed_text, goodput_text, largest, number, quantity
from pipeline.record.health import Alarm, OutageSummary, Stall
from stages.train.batch_metrics import quantile

PACKAGES = ("torch", "transformers", "pyzmq", "msgspec", "safetensors", "numpy", "ray", "megatron-core", "sglang")


NEWEST: Final = 5  # changes that are shown
RESUMED: Final = "engines, weights, tokens/s, efficiency, goodput, failed rollouts, stalls, outages and restarts"


class StalenessSummary(Struct, frozen=True):
    """Of all trained tokens, in versions; None if nothing was trained."""

    mean: float | None = None
    p99: int | None = None
    max: int | None = None
    bound: int | None = None


class RewardSummary(Struct, frozen=True):
    """Mean training reward over the first and the last tenth of the steps, at least five."""

    first: float | None = None
    last: float | None = None


class SetSummary(Struct, frozen=True):
    """Scores of one held-out data set by version."""

    first: float
    last: float
    best: float
    best_version: int
    evaluations: int


class EvalSummary(Struct, frozen=True):
    """The first data set's scores, and those of all by name. None if nothing was evaluated."""

    first: float | None = None
    last: float | None = None
    best: float | None = None
    sets: dict[str, SetSummary] = {}


class WeightVersions(Struct, frozen=True):
    """Weights that were published in this run."""

    first: int = 0
    last: int = 0
    published: int = 0
    transport: str = ""  # route to the engines; empty where there are none
    delta_ratio: float | None = None  # bytes of the weights by bytes of a difference, mean over the steps


class EngineSummary(Struct, frozen=True):
    """The engines that generated. `version`: as the servers reported it; several if they differ."""

    kind: str = ""  # embedded, simulated, sglang
    version: str = ""
    count: int = 0
    restarts: int = 0
    reused_tokens: int = 0  # saved from engines that were lost while they generated


class RouterSummary(Struct, frozen=True):
    """The router in front of them."""

    kind: str = "none"  # sglang, smg
    version: str = ""  # empty for one that was not started by the run


class RunSummary(Struct, frozen=True, kw_only=True):
    """All of `summary.json`."""

    mode: str
    exit_reason: str  # completed, interrupted, deadline, failed: ...
    steps: int
    wall_s: float  # of all starts
    resumed_from: int | None = None  # the step from which the last start went on; see RESUMED
    groups: LedgerCounts
    staleness: StalenessSummary
    reward: RewardSummary
    eval: EvalSummary = EvalSummary()
    best: str = ""  # version by evaluation, with its checkpoint
    alarms: tuple[Alarm, ...] = ()  # what goes wrong with the training at the end
    tokens_per_s: float = 0.0  # trained
    generated_tokens_per_s: float = 0.0
    effective_training_time: float | None = None  # share of the wall clock of all starts that ended in a step
    efficiency_vs_bound: float | None = None
    busiest_stage: str = ""
    goodput: GoodputFigures = GoodputFigures()
    wasted_tokens: int = 0  # generated for groups that were not trained
    wasted_share: float = 0.0  # of all tokens generated for settled groups
    failed_rollouts: dict[str, int] = {}  # by reason: of a grader, an environment, an engine
    weight_versions: WeightVersions = WeightVersions()
    engine: EngineSummary = EngineSummary()
    router: RouterSummary = RouterSummary()
    restarts: dict[str, int] = {}  # by replica
    faults_injected: dict[str, int] = {}  # on purpose, by stage and kind, in all starts of the run
    uncertain_calls: int = 0  # calls that change the world, with an unknown result
    environment_outages: dict[str, OutageSummary] = {}  # by environment
    changes: tuple[Changed, ...] = ()  # by the user, or by --autoscale, while the run went on
    advice: str = ""  # which stage to scale, as measured last
    stalls: tuple[Stall, ...] = ()  # times in which nothing was trained for longer than --stall-notice-s
    seed: int = 0
    config_hash: str = ""
    versions: dict[str, str] = {}  # of python and packages


def summarise_staleness(histogram: Mapping[int, int], bound: int | None) -> StalenessSummary:
    """From trained tokens by staleness. p99 is the smallest staleness that covers 99 % of the tokens."""
    total = sum(histogram.values())
    if total == 0:
        return StalenessSummary(bound=bound)
    mean = sum(lag * count for lag, count in histogram.items()) / total
    largest = max(lag for lag, count in histogram.items() if count)
    return StalenessSummary(mean=round(mean, 6), p99=quantile(histogram, 0.99), max=largest, bound=bound)


def summarise_reward(rewards: Sequence[float]) -> RewardSummary:
    """From the mean reward of each step, in order; values that are not finite are left out."""
    finite = [value for value in rewards if math.isfinite(value)]
    if not finite:
        return RewardSummary()
    n = min(len(finite), max(5, round(len(finite) / 10)))
    return RewardSummary(first=sum(finite[:n]) / n, last=sum(finite[-n:]) / n)


def summarise_evals(evals: Iterable[tuple[str, int, float]]) -> EvalSummary:
    """From (data set, version, score) in the order of evaluation; higher is better."""
    by_set: dict[str, list[tuple[int, float]]] = {}
    for dataset, version, score in evals:
        by_set.setdefault(dataset, []).append((version, score))
    sets: dict[str, SetSummary] = {}
    for dataset, points in by_set.items():
        best_version, best = max(points, key=lambda point: point[1])
        sets[dataset] = SetSummary(
            first=points[0][1], last=points[-1][1], best=best, best_version=best_version, evaluations=len(points)
        )
    if not sets:
        return EvalSummary()
    main = next(iter(sets.values()))
    return EvalSummary(first=main.first, last=main.last, best=main.best, sets=sets)


def package_versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that decide what a run computes."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def read_summary(path: Path) -> RunSummary:
    """The summary that a run has written. Raises UsageError."""
    try:
        return msgspec.json.decode(read_file(path), type=RunSummary)
    except FileNotFoundError as error:
        raise UsageError(f"{path} does not exist: the run has not ended, or not by itself; see its log") from error
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is no run summary ({error}); it was edited or is of another version") from error


def closing_text(summary: RunSummary, places: Mapping[str, Path], tensorboard: Path | None, resume: str | None) -> str:
    """What is shown when a run has ended: its results in a few lines, then where everything is and what to do next.

    `places`: the run's directory first, then the files made in it; `checkpoint` is a Hugging Face directory. `resume`:
    the command that continues the run.
    """
    lines = [f"{summary.exit_reason}: {summary.steps} steps in {duration(summary.wall_s)} ({summary.mode})", ""]
    lines += _aligned(_results(summary))
    lines += ["", *_aligned([(name, str(path)) for name, path in places.items()])]
    following = _next_steps(places, tensorboard, resume)
    if following:
        lines += ["", "Next:", *_aligned(following)]
    return "\n".join(lines)


def _aligned(rows: Sequence[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in rows) + 2
    return [f"  {name:<{width}}{value}" for name, value in rows]


def _results(summary: RunSummary) -> list[tuple[str, str]]:
    rows = [("reward", f"{number(summary.reward.first)} -> {number(summary.reward.last)}")]
    for name, found in summary.eval.sets.items():
        best = f" (best {number(found.best)} at version {found.best_version})" if found.best > found.last else ""
        rows.append((f"eval {name}", f"{number(found.first)} -> {number(found.last)}{best}"))
    if summary.best:
        rows.append(("best", summary.best))
    rows += [("alarm", alarm.sentence) for alarm in summary.alarms]
    staleness = summary.staleness
    if staleness.mean is not None:
        bound = "" if staleness.bound is None else f", bound {staleness.bound}"
        rows.append(("staleness", f"mean {staleness.mean:.2f}, p99 {staleness.p99}, max {staleness.max}{bound}"))
    engine = summary.engine
    if engine.count:
        version = "" if "+" in engine.version else f" {engine.version}"  # the project's own name that of the protocol
        router = summary.router
        behind = f" behind router {router.kind} {router.version}" if router.kind != "none" else ""
        lost = f", {engine.restarts} restarts, {engine.reused_tokens} tokens saved" if engine.restarts else ""
        rows.append(("engines", f"{engine.count} x {engine.kind}{version}{behind}{lost}".rstrip()))
    weights = summary.weight_versions
    if weights.transport:
        saved = "" if weights.delta_ratio is None else f", differences of 1/{weights.delta_ratio:.1f} of the bytes"
        rows.append(("weights", f"{weights.published} versions by {weights.transport}{saved}"))
    generated = quantity(summary.generated_tokens_per_s)
    rows.append(("tokens/s", f"{quantity(summary.tokens_per_s)} trained, {generated} generated"))
    if summary.efficiency_vs_bound is not None:
        busy = f"busiest stage ({summary.busiest_stage}) at work {summary.efficiency_vs_bound:.0%} of the time"
        rows.append(("efficiency", busy))
    if summary.advice:
        rows.append(("advice", summary.advice))
    if summary.effective_training_time is not None:
        share = f"{summary.effective_training_time:.1%}"
        rows.append(("effective", f"{share} of the wall clock ended in a step that counts"))
    if summary.goodput.goodput is not None:
        rows.append(("goodput", goodput_text(summary.goodput)))
    wasted = ", ".join(f"{cause.replace('_', ' ')} {quantity(n)}" for cause, n in largest(summary.goodput.waste))
    rows.append(("wasted", f"{summary.wasted_share:.1%} of the generated tokens" + (f" ({wasted})" if wasted else "")))
    counts = summary.groups
    groups = f"{counts.trained} trained, {counts.filtered} filtered, {counts.stale} stale, {counts.failed} failed"
    rows.append(("groups", f"{groups}, {counts.discarded} discarded, {counts.open} in flight"))
    if summary.failed_rollouts:
        rows.append(("failed rollouts", failed_text(summary.failed_rollouts)))
    if summary.resumed_from is not None:
        rows.append(("resumed", f"from step {summary.resumed_from}; {RESUMED} count from there"))
    if summary.stalls:
        longest = max(stall.seconds for stall in summary.stalls)
        rows.append(("stalls", f"{len(summary.stalls)}, the longest of {duration(longest)}; see summary.json"))
    if summary.faults_injected:
        rows.append(("faults on purpose", ", ".join(f"{name} {n}" for name, n in summary.faults_injected.items())))
    if summary.uncertain_calls:
        rows.append(("uncertain", f"{summary.uncertain_calls} calls that may or may not have taken effect"))
    for name, outage in summary.environment_outages.items():
        rows.append(("outages", f"{name} {outage.outages}, {duration(outage.seconds)} in all: {outage.reason}"))
    if summary.changes:
        more = f", and {n} before, see summary.json" if (n := len(summary.changes) - NEWEST) > 0 else ""
        changes = ", ".join(
            f"{change.what} {change.value}".rstrip() + f" (step {change.step})" for change in summary.changes[-NEWEST:]
        )
        rows.append(("changed", changes + more))
    if any(summary.restarts.values()):
        rows.append(("restarts", ", ".join(f"{stage} {n}" for stage, n in summary.restarts.items() if n)))
    return rows


def _next_steps(places: Mapping[str, Path], tensorboard: Path | None, resume: str | None) -> list[tuple[str, str]]:
    steps: list[tuple[str, str]] = []
    if "checkpoint" in places:
        steps.append(("use the model", f"AutoModelForCausalLM.from_pretrained({str(places['checkpoint'])!r})"))
    if tensorboard is not None:
        steps.append(("see all metrics", f"tensorboard --logdir {tensorboard}"))
    if "samples" in places:
        steps.append(("read samples", f"{PROGRAM} samples {shlex.quote(str(places['run']))}"))
    if "trace" in places:
        steps.append(("follow a sample through the stages", f"open {places['trace']} in https://ui.perfetto.dev"))
    if resume is not None:
        steps.append(("continue this run", resume))
    return steps
