"""`python launch.py eval CHECKPOINT FLAGS`: the held-out sets of a run, answered by one checkpoint. Nothing is trained.

It is a run of no batches in a directory of its own: engines, tools, environments and graders are those of a training
run. A trainer that sleeps stands in for the real one, so neither its memory nor its GPUs are needed.

CHECKPOINT is a Hugging Face model, a run directory (its newest undamaged checkpoint), or one of its checkpoints
(RUN/checkpoints/step-N). With the latter two the run's own settings hold, and FLAGS outrank them.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from configs.command_line import parse
from configs.load import CONFIG_FILE
from models.checkpoint import MANIFEST_FILE, read_manifest, resumable_checkpoint, verify_files
from pipeline.errors import UsageError
from pipeline.facts.run_directory import RunDir
from pipeline.facts.run_log import show_line
from pipeline.observe.table import number
from pipeline.record.kept_files import MODEL_DIR
from pipeline.record.metrics import read_metrics, scores

ALONE: Final = (
    "--num-rollout 0 --mode sync --train-backend simulated --loss-type policy_loss --no-colocate --warm-start-steps 0 "
    "--no-skip-eval-before-train --auto-resume 0 --save-interval none --save-hf none --no-debug-train-only "
    "--no-debug-rollout-only --save-debug-rollout-data none --load-debug-rollout-data none data.prompt_data=[] "
    "data.prompt_data_weights=[] --save-debug-train-data none --eval-engines 0 eval.eval_external_engine_addrs=[]"
)
QUIET: Final = ("--no-use-tensorboard", "--no-use-plot", "--no-trace")
OWN: Final = ("run.resume", "train.hf_checkpoint", "rollout.num_rollout", "rollout.num_epoch", "eval.eval_interval")
DEADLINE_S: Final = 7 * 86400  # effectively none: no training waits for the engines


def main(argv: Sequence[str], run: Callable[[Sequence[str]], int]) -> int:
    """Evaluate; returns the exit code, 1 if answers are missing. `run`: a command line. Raises UsageError and
    CheckpointError."""
    parser = argparse.ArgumentParser(prog="launch.py eval", description=__doc__, allow_abbrev=False)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="model, run directory, or RUN/checkpoints/step-N")
    parser.add_argument("--json", action="store_true", help="the results as one line of JSON instead of a table")
    own, flags = parser.parse_known_args(argv)
    arguments = parse(flags)
    given = arguments.layer
    if taken := [label for key, label in given.labels.items() if key in OWN]:
        raise UsageError(
            f"{', '.join(taken)}: eval trains nothing and takes its checkpoint as an argument; leave it out"
        )
    place = Path(given.values.get("run.run_dir", time.strftime("runs/eval-%Y%m%d-%H%M%S")))
    deadline = [] if "eval.eval_deadline_s" in given.values else ["--eval-deadline-s", str(DEADLINE_S)]
    command = [*_source(own.checkpoint), *QUIET, *flags, *deadline, *ALONE.split(), "--run-dir", str(place)]
    if arguments.dry_run:
        return run(command)
    with contextlib.redirect_stdout(sys.stderr):
        code = run(command)
    metrics = RunDir(place).metrics
    if code or not metrics.exists() or not (rows := list(read_metrics(metrics))):
        return code or 1  # stopped
    row = rows[-1]
    found = {"checkpoint": own.checkpoint, "run": str(place), "complete": row["eval/complete"] == 1, "sets": _sets(row)}
    sys.stdout.write(f"{msgspec.json.encode(found).decode()}\n" if own.json else table(found))
    return 0 if found["complete"] else 1


def _source(name: str) -> list[str]:
    """Flags for the checkpoint and the settings of its run."""
    place = Path(name)
    if (place / CONFIG_FILE).is_file():
        run, found = place, resumable_checkpoint(place / "checkpoints", show_line)
        if found is None:
            raise UsageError(f"{name}: the run has no checkpoint; set --save-interval, or give a model")
        place = found[0]
    elif (place / MANIFEST_FILE).is_file():
        run = place.resolve().parents[1]
        verify_files(place, read_manifest(place))
    else:
        return ["--hf-checkpoint", name]
    return ["--config", str(run / CONFIG_FILE), "--hf-checkpoint", str(place / MODEL_DIR)]


def _sets(row: dict[str, float]) -> dict[str, Any]:
    """By set: its metrics under their own names, `mean` for the score."""
    found = {}
    for name, _, score in scores(row, 0):
        named = row | {f"eval/{name}-mean": score, f"eval/{name}-prompts": int(row[f"eval/{name}-prompts"])}
        found[name] = {
            f"mean-{key}" if key.startswith("ci_") else key: value
            for long, value in named.items()
            if (key := long.removeprefix(f"eval/{name}-")) != long
        }
    return found


def table(found: Mapping[str, Any]) -> str:
    """One line for each set and estimate, with its 95 % interval."""
    lines = ["", f"{'set':<24}{'prompts':>8}  {'':<10}{'value':>8}  95 % interval"]
    for name, values in found["sets"].items():
        head = f"{name:<24}{values['prompts']:>8}"
        for label in ("mean", *(key for key in values if key != "mean" and f"{key}-ci_low" in values)):
            value, low, high = (number(values[key]) for key in (label, f"{label}-ci_low", f"{label}-ci_high"))
            lines.append(f"{head:<32}  {label:<10}{value:>8}  {low} .. {high}")
            head = ""
    missing = [] if found["complete"] else ["incomplete: answers are missing, see above; the values are of the others"]
    return "\n".join([*lines, *missing, ""])
