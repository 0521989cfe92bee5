"""`python launch.py compare FLAGS`: short segments of sync and of async with several N on one configuration.

`compare RUN RUN ...` shows runs that were made side by side, and starts nothing.

Each segment is a run of its own from the same weights, with the same prompts and seeds. The modes take turns, round by
round, so that another load of the machine falls on all of them. A warm start is made once, before the first segment.
The command says which mode to take, and why; it changes nothing.

The choice: the mode with the most trained rollouts per second. If an evaluation is configured and another mode scores
higher at equal time by more than the rounds differ, that is said as well.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Final

from msgspec import Struct

from configs.command_line import parse
from configs.load import load_arguments, with_work
from configs.rules.validate import checked
from configs.schema import Config
from models.checkpoint import latest_checkpoint
from models.disk import write_json
from pipeline.errors import UsageError
from pipeline.facts.run_log import PROJECT, show
from pipeline.facts.stats import GoodputFigures
from pipeline.observe.compare_runs import compare_runs, names_runs
from pipeline.observe.summary import read_summary
from pipeline.observe.table import duration, goodput_text, number
from pipeline.record.metrics import evaluations, read_metrics

WARM_UP: Final = 3  # batches of a segment that are not counted
WORTH: Final = 1.05  # of sync's rollouts per second, from which asynchrony pays
OWN: Final = ("run.mode", "run.run_dir", "run.resume", "rollout.num_rollout", "asynchrony.async_buffer_size")


class Segment(Struct, frozen=True, kw_only=True):
    """One run. `scores`: (seconds since the first weights, score) of its evaluations of the first data set."""

    mode: str
    rollouts_per_s: float
    staleness: float
    wasted: float
    goodput: GoodputFigures
    scores: list[tuple[float, float]]

    def score_at(self, seconds: float) -> float | None:
        """By linear interpolation; None outside of the evaluations."""
        for (start, before), (end, after) in zip(self.scores, self.scores[1:], strict=False):
            if start <= seconds <= end:
                return before + (after - before) * (seconds - start) / max(end - start, 1e-9)
        return None


def main(argv: Sequence[str], program: str = str(PROJECT / "launch.py")) -> int:
    """Compare; returns the exit code. Raises UsageError and ConfigError."""
    if names_runs(argv):
        return compare_runs(argv)
    own, flags = _parser().parse_known_args(argv)
    if own.batches <= WARM_UP + 1 or own.rounds < 1:
        raise UsageError(f"--batches {own.batches} --rounds {own.rounds}: at least {WARM_UP + 2} batches and one round")
    if wrong := [text for text in own.buffers if text != "auto" and not text.isdecimal()]:
        raise UsageError(f"--buffers {wrong[0]}: each must be a whole number or auto")
    given = parse(flags)
    taken = [label for key, label in given.layer.labels.items() if key in OWN]
    if taken:
        raise UsageError(f"{', '.join(taken)} is what is compared; leave it out (see --batches, --buffers, --output)")
    recipes = with_work(given)[0].config
    if len(recipes) > len(given.config):  # a segment names a model, so it would not get the quickstart's recipe itself
        flags = ["--config", *recipes[: len(recipes) - len(given.config)], *flags]
    loaded = load_arguments(parse([*flags, "--num-rollout", str(own.batches)]))
    config = checked(loaded.config, loaded.given)[0]
    flags += ["--no-live", "--no-use-tensorboard", "--no-use-plot", "--no-trace"]
    with tempfile.TemporaryDirectory(prefix="sluice-compare-") as temporary:
        home = own.output or Path(temporary)
        if config.warm_start.warm_start_steps:
            flags += ["--hf-checkpoint", _warm_start(program, flags, home / "warm-start"), "--warm-start-steps", "0"]
        flags += ["--num-rollout", str(own.batches)]
        if config.eval.eval_prompt_data:
            flags += ["--eval-interval", str(max(1, own.batches // 3))]
        segments = []
        for turn in range(own.rounds):
            for buffer in ("sync", *own.buffers):
                mode = ["sync"] if buffer == "sync" else ["async", "--async-buffer-size", buffer]
                name = buffer if buffer == "sync" else f"async N={buffer}"
                _run(program, ["--mode", *mode, *flags], home / f"{turn + 1}-{buffer}", f"round {turn + 1}: {name}")
                segments.append(_measured(name, home / f"{turn + 1}-{buffer}", config))
        lines = report(segments)
        show("\n".join(lines), {"segments": segments, "report": lines}, as_json=own.json)
        if own.output is not None:
            write_json(home / "compare.json", segments)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="launch.py compare", description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("--batches", type=int, default=12, help=f"of a segment, the first {WARM_UP} not counted")
    parser.add_argument("--rounds", type=int, default=2, help="segments of each mode")
    parser.add_argument("--buffers", nargs="+", default=["1", "2", "4"], help="N of the async segments, also auto")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--output", type=Path, help="directory for the segments and compare.json (default: temporary)")
    return parser


def _warm_start(program: str, flags: list[str], place: Path) -> str:
    """The model that the warm start makes."""
    _run(program, ["--mode", "sync", *flags, "--num-rollout", "0"], place, "warm start")
    checkpoint = latest_checkpoint(place / "warm_start" / "checkpoints")
    if checkpoint is None:
        raise UsageError(f"{place} has no checkpoint of a warm start; leave --warm-start-steps out")
    return str(checkpoint / "hf")


def _run(program: str, flags: Sequence[str], place: Path, name: str) -> None:
    """One run to its end. Raises UsageError with its last lines."""
    sys.stderr.write(f"{name}\n")
    command = [sys.executable, program, *flags, "--run-dir", str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = "\n".join([*done.stdout.splitlines()[-5:], *done.stderr.splitlines()[-10:]])
        raise UsageError(f"a segment ended with exit code {done.returncode}:\n{last}")


def _measured(mode: str, place: Path, config: Config) -> Segment:
    rows = list(read_metrics(place / "metrics.jsonl"))
    steps = [row for row in rows if "perf/step_time" in row]
    counted, summary = steps[WARM_UP - 1 :], read_summary(place / "summary.json")
    seconds = counted[-1]["wall_s"] - counted[0]["wall_s"]
    found = [(row["wall_s"], points[0][2]) for row in rows if (points := evaluations([row]))]
    rollouts = config.rollout.rollout_batch_size * config.rollout.n_samples_per_prompt
    return Segment(
        mode=mode,
        rollouts_per_s=rollouts * (len(counted) - 1) / seconds,
        staleness=summary.staleness.mean or 0.0,
        wasted=summary.wasted_share,
        goodput=summary.goodput,
        scores=found,
    )


def report(segments: Sequence[Segment]) -> list[str]:
    """The table, where the time of the slots went, and the choice."""
    by_mode: dict[str, list[Segment]] = {}
    for segment in segments:
        by_mode.setdefault(segment.mode, []).append(segment)
    shortest = min(segment.scores[-1][0] for segment in segments) if all(one.scores for one in segments) else None
    scored = f"{'score/samples':>15}{'score/time':>12}" if shortest is not None else ""
    lines = ["", f"{'mode':<14}{'rollouts/s':>20}{'staleness':>11}{'wasted':>8}{scored}"]
    for mode, found in by_mode.items():
        rates = [one.rollouts_per_s for one in found]
        spread = f"{fmean(rates):.3g} ({min(rates):.3g} to {max(rates):.3g})"
        line = f"{mode:<14}{spread:>20}{fmean(one.staleness for one in found):>11.2f}"
        line += f"{fmean(one.wasted for one in found):>8.1%}"
        if shortest is not None:
            line += f"{fmean(one.scores[-1][1] for one in found):>15.3f}{number(_score(found, shortest)):>12}"
        lines.append(line)
    if shortest is not None:
        lines.append(f"score/samples: after all batches; score/time: {duration(shortest)} after the first weights")
    lines += ["", "where the time of the slots went (last round):"]
    lines += [f"  {mode:<14}{goodput_text(found[-1].goodput)}" for mode, found in by_mode.items()]
    return [*lines, "", *_choice(by_mode, shortest)]


def _score(found: Sequence[Segment], seconds: float | None) -> float | None:
    scores = [score for one in found if seconds is not None and (score := one.score_at(seconds)) is not None]
    return fmean(scores) if scores else None


def _choice(by_mode: dict[str, list[Segment]], shortest: float | None) -> list[str]:
    rates = {mode: fmean(one.rollouts_per_s for one in found) for mode, found in by_mode.items()}
    best = max(rates, key=rates.__getitem__)
    gain = rates[best] / rates["sync"]
    if gain < WORTH:
        best = "sync"
        lines = [
            f"take sync: the best async mode trains {gain:.2f} times as many rollouts per second, and older tokens"
        ]
    else:
        lines = [f"take {best}: it trains {gain:.2f} times as many rollouts per second as sync"]
    scores = {mode: _score(found, shortest) for mode, found in by_mode.items()}
    known = {mode: score for mode, score in scores.items() if score is not None}
    if shortest is not None and best in known:
        top = max(known, key=known.__getitem__)
        ends = [[score for one in found if (score := one.score_at(shortest)) is not None] for found in by_mode.values()]
        noise = max(max(values) - min(values) for values in ends if values)
        if known[top] - known[best] > noise:
            lines.append(
                f"but {top} scores higher after {duration(shortest)}: {known[top]:.3f} against {known[best]:.3f}"
            )
        else:
            lines.append(
                f"after {duration(shortest)} no mode scores higher by more than the rounds differ ({noise:.3f})"
            )
    return lines
