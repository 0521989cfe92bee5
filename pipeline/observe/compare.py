"""`python launch.py compare FLAGS`: short segments of sync and of async with several N on one configuration.

Each segment is a run of its own from the same weights, with the same prompts and seeds. The modes take turns, round by
round, so that another load of the machine falls on all of them. A warm start is made once, before the first segment.
The command says which mode to take, and why; it changes nothing.

The choice: the mode with the most trained rollouts per second. If an evaluation is configured and another mode scores
higher at equal time by more than the rounds differ, the advice mentions it.

`compare RUN RUN ...`: runs side by side: the settings that differ, and the main figures. Figures of a run that has
ended are those of its `summary.json`. Of one that goes on, or was killed, they come from `metrics.jsonl`, and what that
does not tell is unknown. Nothing is started, and no run is asked.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from msgspec import Struct

from configs.command_line import parse
from configs.load import CONFIG_FILE, load_arguments, with_work
from configs.rules.validate import checked
from configs.schema import Config
from models.checkpoint import latest_checkpoint
from models.disk import read_file, write_json
from pipeline.errors import UsageError
from pipeline.facts.run_directory import RunDir, in_use
from pipeline.facts.run_log import PROJECT, show
from pipeline.facts.stats import GoodputFigures, visible
from pipeline.observe.summary import read_summary, summarise_evals, summarise_reward
from pipeline.observe.table import columns, duration, goodput_text, number, quantity
from pipeline.record.metrics import evaluations, read_metrics, totals

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
            scores = _scores(found, shortest)
            line += f"{fmean(one.scores[-1][1] for one in found):>15.3f}{number(fmean(scores) if scores else None):>12}"
        lines.append(line)
    if shortest is not None:
        lines.append(f"score/samples: after all batches; score/time: {duration(shortest)} after the first weights")
    lines += ["", "where the time of the slots went (last round):"]
    lines += [f"  {mode:<14}{goodput_text(found[-1].goodput)}" for mode, found in by_mode.items()]
    return [*lines, "", *_choice(by_mode, shortest)]


def _scores(found: Sequence[Segment], seconds: float) -> list[float]:
    return [score for one in found if (score := one.score_at(seconds)) is not None]


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
    scores = {mode: _scores(found, shortest) for mode, found in by_mode.items()} if shortest is not None else {}
    known = {mode: fmean(values) for mode, values in scores.items() if values}
    if shortest is not None and best in known:
        top = max(known, key=known.__getitem__)
        noise = max(max(values) - min(values) for values in scores.values() if values)
        if known[top] - known[best] > noise:
            lines.append(
                f"but {top} scores higher after {duration(shortest)}: {known[top]:.3f} against {known[best]:.3f}"
            )
        else:
            lines.append(
                f"after {duration(shortest)} no mode scores higher by more than the rounds differ ({noise:.3f})"
            )
    return lines


PLACES: Final = ("run.run_dir", "run.resume")  # settings that always differ
WIDEST: Final = 32  # characters of a value


Figures = dict[str, float | str | None]  # what a run came to, by the keys of SHOWN; None where it is unknown
SHOWN: Final[dict[str, tuple[str, str, Callable[[Any], str]]]] = {  # the key, where a summary has it, how it is shown
    "state": ("state", "exit_reason", str),
    "steps": ("steps", "steps", str),
    "reward, first": ("reward_first", "reward.first", number),
    "reward, last": ("reward_last", "reward.last", number),
    "eval, best": ("eval_best", "eval.best", number),
    "staleness, mean": ("staleness_mean", "staleness.mean", number),
    "trained tokens/s": ("tokens_per_s", "tokens_per_s", quantity),
    "goodput": ("goodput", "goodput.goodput", number),
    "wasted tokens": ("wasted_share", "wasted_share", "{:.1%}".format),
    "wall time": ("wall_s", "wall_s", duration),
}


def names_runs(argv: Sequence[str]) -> bool:
    """Whether a command line is one of runs, not of flags of an experiment."""
    words = [word for word in argv if word != "--json"]
    return bool(words) and all(Path(word).exists() or ("=" not in word and word[:1] != "-") for word in words)


def compare_runs(argv: Sequence[str]) -> int:
    """Show runs side by side; returns the exit code. Raises UsageError."""
    parser = argparse.ArgumentParser(prog="launch.py compare", description="Show runs side by side.")
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="run directories")
    parser.add_argument("--json", action="store_true", help="as JSON")
    arguments = parser.parse_args(argv)
    runs: list[Path] = arguments.runs
    if len(runs) < 2:
        raise UsageError(f"compare has one run, {runs[0]}, but needs two or more: compare RUN RUN ...")
    for run in runs:
        if not (run / CONFIG_FILE).is_file():
            raise UsageError(
                f"{run} holds no run (no {CONFIG_FILE}); give directories that runs printed at their start"
            )
    settings, found = differing(runs), [figures(RunDir(run)) for run in runs]
    value = {"runs": [str(run) for run in runs], "figures": found, "settings": settings}
    show("\n".join(side_by_side(runs, found, settings)), value, as_json=arguments.json)
    return 0


def differing(runs: Sequence[Path]) -> dict[str, list[Any]]:
    """Settings that are not equal in all runs: a value for each run, None where it has none."""
    found = [settings_of(run / CONFIG_FILE) for run in runs]
    keys = list(dict.fromkeys(key for values in found for key in values if key not in PLACES))
    rows = {key: [values.get(key) for values in found] for key in keys}
    return {key: row for key, row in rows.items() if any(value != row[0] for value in row)}


def settings_of(path: Path) -> dict[str, Any]:
    """By their dotted keys, also of a run of another version. Raises UsageError."""
    try:
        tables = tomllib.loads(read_file(path).decode())
    except ValueError as error:
        raise UsageError(f"{path} cannot be read ({error}); it was edited: mend it, or leave its run out") from error
    sections = [(name, table) for name, table in tables.items() if isinstance(table, dict)]
    values = {f"{name}.{key}": value for name, table in sections for key, value in table.items()}
    return values | {name: table for name, table in tables.items() if isinstance(table, list)}


def figures(rundir: RunDir) -> Figures:
    """Of a run in whatever state it is. Raises UsageError for a file that cannot be read."""
    live = in_use(rundir.path)
    if not live and rundir.summary.is_file():
        summary = read_summary(rundir.summary)
        return {key: attrgetter(place)(summary) for key, place, _ in SHOWN.values()}
    rows = list(read_metrics(rundir.metrics)) if rundir.metrics.is_file() else []
    reward = summarise_reward([row["reward/mean"] for row in rows if "reward/mean" in row])
    last = {name: value for row in rows for name, value in row.items()}
    trained = [row for row in rows if row.get("trained_tokens")]
    whole = totals(rows)
    seconds, tokens = (whole[name] - trained[0][name] if trained else 0.0 for name in ("wall_s", "trained_tokens"))
    known: Figures = {
        "state": "running" if live else "killed",
        "steps": int(last.get("step", 0)),
        "reward_first": reward.first,
        "reward_last": reward.last,
        "eval_best": summarise_evals(evaluations(rows)).best,
        "tokens_per_s": tokens / seconds if seconds else None,
        "goodput": last.get("goodput/share"),
        "wall_s": whole.get("wall_s"),
    }
    return {key: known.get(key) for key, _, _ in SHOWN.values()}


def side_by_side(runs: Sequence[Path], found: Sequence[Figures], settings: dict[str, list[Any]]) -> list[str]:
    """A column for each run: its figures, then the settings that differ."""
    short = [run.name for run in runs]
    names = short if len(set(short)) == len(short) else [str(run) for run in runs]
    rows = [
        [title, *("-" if (value := one[key]) is None else form(value) for one in found)]
        for title, (key, _, form) in SHOWN.items()
    ]
    rows += [[""], ["settings that differ" if settings else "no setting differs"]]
    rows += [
        [key, *("-" if value is None else json.dumps(value, ensure_ascii=False) for value in row)]
        for key, row in settings.items()
    ]
    cells = [["", *names], *([row[0], *(_cut(visible(cell)) for cell in row[1:])] for row in rows)]
    return [line.rstrip() for line in columns(cells)]


def _cut(text: str) -> str:
    """One line, no wider than a column may be."""
    line = text.replace("\n", " ").replace("\t", " ")
    return line if len(line) <= WIDEST else f"{line[: WIDEST - 3]}..."
