"""The learning curve of a run as a PNG: reward, evaluations with their versions, and staleness below.

matplotlib is imported when a plot is drawn, not before, with the Agg canvas: no display is needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pipeline.record.metrics import VERSION, scores

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _GRID = "#1f2933", "#d9dee3"
_REWARD, _MAX, _MEAN = "#1f77b4", "#e0a458", "#7a5195"
_EVALS: Final = ("#d1495b", "#2a9d5c", "#8d6a9f", "#c77d1e")


_LEAST_SPAN: Final = 0.1  # of the reward axis: below it, noise would fill the picture and look like learning


@dataclass
class Curve:
    """The series of one run, by training step. Lists that belong together have equal lengths."""

    title: str = ""
    steps: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    evals: dict[str, list[tuple[float, float, float]]] = field(default_factory=dict)  # (step, version, value)
    staleness: list[tuple[float, float, float]] = field(default_factory=list)  # (step, mean, max)
    staleness_bound: float | None = None


def curve_from_rows(
    rows: Iterable[Mapping[str, float]], *, title: str = "", staleness_bound: float | None = None
) -> Curve:
    """Pick the series out of metrics rows: `reward/mean`, `staleness/mean`, `staleness/max`, `eval/<set>` beside
    `eval/version`."""
    curve = Curve(title=title, staleness_bound=staleness_bound)
    for row in rows:
        step = row["step"]
        if "reward/mean" in row:
            curve.steps.append(step)
            curve.rewards.append(row["reward/mean"])
        if "staleness/mean" in row:
            curve.staleness.append((step, row["staleness/mean"], row.get("staleness/max", math.nan)))
        for dataset, version, value in scores(row, int(row[VERSION])) if VERSION in row else ():
            curve.evals.setdefault(dataset, []).append((step, version, value))
    return curve


def plot_learning_curve(curve: Curve, out: Path) -> Path:
    """Draw the curve into `out` (PNG, 1500 x 1050 pixels), whole or not at all, and return `out`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(10, 7), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [3, 1]})
    _draw_reward(top, curve)
    _draw_staleness(bottom, curve)
    for axes in (top, bottom):
        _style(axes)
    bottom.set_xlabel("training step (rollout batches)", color=_INK)
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    if curve.title:
        top.set_title(curve.title, loc="left", color=_INK, fontsize=12, fontweight="bold")
    out.parent.mkdir(parents=True, exist_ok=True)
    draft = out.with_name(f".{out.name}.draft")
    figure.savefig(draft, format="png")
    draft.replace(out)
    return out


def smooth(values: Sequence[float], span: float) -> list[float]:
    """Exponential moving average with the bias of its start removed; a value that is not finite is passed over.

    `span` values have about the weight of a plain mean over as many (alpha = 2 / (span + 1)).
    """
    alpha = 2.0 / (span + 1.0)
    total, weight = 0.0, 0.0
    result: list[float] = []
    for value in values:
        if math.isfinite(value):
            total += alpha * (value - total)
            weight += alpha * (1.0 - weight)
        result.append(total / weight if weight else math.nan)
    return result


def _draw_reward(axes: Axes, curve: Curve) -> None:
    if curve.rewards:
        raw = "o-" if len(curve.rewards) < 30 else "-"  # few points vanish without markers
        label = "training reward, each step"
        axes.plot(curve.steps, curve.rewards, raw, color=_REWARD, alpha=0.28, linewidth=1.0, markersize=4, label=label)
        span = max(5.0, len(curve.rewards) / 15)
        smoothed = smooth(curve.rewards, span)
        axes.plot(curve.steps, smoothed, color=_REWARD, linewidth=2.2, label=f"smoothed over {span:.0f} steps")
    for (name, points), colour in zip(curve.evals.items(), cycle(_EVALS), strict=False):
        steps, _, scores = zip(*points, strict=True)
        style: dict[str, Any] = {"linewidth": 1.4, "markersize": 6, "markeredgecolor": "white", "label": f"eval {name}"}
        axes.plot(steps, scores, "o-", color=colour, **style)
        _label_versions(axes, points, colour)
    if not curve.rewards and not curve.evals:
        axes.text(0.5, 0.5, "no training step was finished", transform=axes.transAxes, ha="center", color=_INK)
        axes.set_yticks([])
        return
    axes.set_ylabel("mean reward", color=_INK)
    axes.margins(y=0.12)
    low, high = axes.get_ylim()
    if high - low < _LEAST_SPAN:
        middle = (low + high) / 2
        axes.set_ylim(middle - _LEAST_SPAN / 2, middle + _LEAST_SPAN / 2)
    axes.legend(loc="best", frameon=True, framealpha=0.9, edgecolor=_GRID, fontsize=9)


def _label_versions(axes: Axes, points: list[tuple[float, float, float]], colour: str) -> None:
    """Write the version beside at most eight evaluation points, first and last always."""
    from matplotlib.patheffects import withStroke

    every = max(1, math.ceil((len(points) - 1) / 7))
    outline = [withStroke(linewidth=2.5, foreground="white")]
    place: dict[str, Any] = {"xytext": (0, 8), "textcoords": "offset points", "ha": "center", "path_effects": outline}
    for i, (step, version, value) in enumerate(points):
        if (i % every == 0 and len(points) - 1 - i >= every / 2) or i == len(points) - 1:
            axes.annotate(f"v{version:.0f}", (step, value), fontsize=8, color=colour, **place)


def _draw_staleness(axes: Axes, curve: Curve) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_ylabel("staleness of trained\ntokens (versions)", color=_INK)
    if not curve.staleness and curve.staleness_bound is None:
        return
    if curve.staleness:
        steps, means, largest = zip(*curve.staleness, strict=True)
        axes.plot(steps, largest, drawstyle="steps-mid", color=_MAX, linewidth=1.2, label="max")
        axes.plot(steps, means, color=_MEAN, linewidth=1.8, label="mean")
    if curve.staleness_bound is not None:
        label = f"bound {curve.staleness_bound:g}"
        axes.axhline(curve.staleness_bound, color=_INK, linewidth=1.0, linestyle="--", label=label)
    finite = [point[2] for point in curve.staleness if math.isfinite(point[2])]
    top = max([1.0, curve.staleness_bound or 0.0, *finite])
    axes.set_ylim(-0.06 * top, top * 1.15)
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, frameon=False, fontsize=9, borderaxespad=0.1)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))


def _style(axes: Axes) -> None:
    axes.grid(visible=True, color=_GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_GRID)
    axes.tick_params(colors=_INK, labelsize=9)
