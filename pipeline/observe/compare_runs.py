"""`python launch.py compare RUN RUN ...`: runs side by side: the settings that differ, and the main figures.

Figures of a run that has ended are those of its `summary.json`. Of one that goes on, or was killed, they come from
`metrics.jsonl`, and what that does not tell is unknown. Nothing is started, and no run is asked.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from configs.load import CONFIG_FILE
from models.disk import read_file
from pipeline.errors import UsageError
from pipeline.facts.run_directory import RunDir, in_use
from pipeline.facts.run_log import show
from pipeline.facts.stats import visible
from pipeline.observe.summary import read_summary, summarise_evals, summarise_reward
from pipeline.observe.table import columns, duration, number, quantity
from pipeline.record.metrics import evaluations, read_metrics

PLACES: Final = ("run.run_dir", "run.resume")  # settings that always differ
WIDEST: Final = 32  # characters of a value


class Figures(Struct, frozen=True, kw_only=True):
    """What a run came to; None where it is unknown."""

    state: str  # running, killed, or how it ended
    steps: int
    reward_first: float | None = None  # mean of its first steps
    reward_last: float | None = None
    eval_best: float | None = None  # of the first data set
    staleness_mean: float | None = None  # of trained tokens, in versions
    tokens_per_s: float | None = None  # trained
    goodput: float | None = None  # share of the slot time
    wasted_share: float | None = None  # of the generated tokens
    wall_s: float | None = None


SHOWN: Final[dict[str, tuple[str, Callable[[Any], str]]]] = {  # of the figures, and how
    "state": ("state", str), "steps": ("steps", str), "reward, first": ("reward_first", number),
    "reward, last": ("reward_last", number), "eval, best": ("eval_best", number),
    "staleness, mean": ("staleness_mean", number), "trained tokens/s": ("tokens_per_s", quantity),
    "goodput": ("goodput", number), "wasted tokens": ("wasted_share", "{:.1%}".format),
    "wall time": ("wall_s", duration),
}  # fmt: skip


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
    show("\n".join(report(runs, found, settings)), value, as_json=arguments.json)
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
        return Figures(
            state=summary.exit_reason,
            steps=summary.steps,
            reward_first=summary.reward.first,
            reward_last=summary.reward.last,
            eval_best=summary.eval.best,
            staleness_mean=summary.staleness.mean,
            tokens_per_s=summary.tokens_per_s,
            goodput=summary.goodput.goodput,
            wasted_share=summary.wasted_share,
            wall_s=summary.wall_s,
        )
    rows = list(read_metrics(rundir.metrics)) if rundir.metrics.is_file() else []
    reward = summarise_reward([row["reward/mean"] for row in rows if "reward/mean" in row])
    last = {name: value for row in rows for name, value in row.items()}
    trained = [row for row in rows if row.get("trained_tokens")]
    seconds = trained[-1]["wall_s"] - trained[0]["wall_s"] if trained else 0.0
    return Figures(
        state="running" if live else "killed",
        steps=int(last.get("step", 0)),
        reward_first=reward.first,
        reward_last=reward.last,
        eval_best=summarise_evals(evaluations(rows)).best,
        tokens_per_s=(trained[-1]["trained_tokens"] - trained[0]["trained_tokens"]) / seconds if seconds else None,
        goodput=last.get("goodput/share"),
        wall_s=last.get("wall_s"),
    )


def report(runs: Sequence[Path], found: Sequence[Figures], settings: dict[str, list[Any]]) -> list[str]:
    """A column for each run: its figures, then the settings that differ."""
    short = [run.name for run in runs]
    names = short if len(set(short)) == len(short) else [str(run) for run in runs]
    rows = [
        [title, *("-" if (value := getattr(one, name)) is None else form(value) for one in found)]
        for title, (name, form) in SHOWN.items()
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
