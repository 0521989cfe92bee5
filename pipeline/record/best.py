"""The best version of a run by its evaluations, and `python launch.py export RUN`, which copies a checkpoint's model.

Scores are those of the first data set of evaluation; a higher score is better. Invariants: an incomplete evaluation
does not count; a version counts as saved only while its checkpoint is complete on the disk; the copy appears whole or
not at all.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Final

import msgspec

from models.checkpoint import CheckpointError, final_path, latest_checkpoint, read_manifest, verify_files
from pipeline.errors import UsageError
from pipeline.facts.run_directory import RunDir
from pipeline.record.kept_files import MODEL_DIR, save_hf
from pipeline.record.metrics import read_metrics

VERSION: Final = "eval/version"  # marks the row of an evaluation
ABOUT: Final = frozenset((VERSION, "eval/complete", "eval/lag_steps", "eval/time_s"))
Point = tuple[str, int, float]  # data set, version, score


def scores(metrics: Mapping[str, float], version: int) -> list[Point]:
    """The score of each data set; companions such as `eval/x-truncated_ratio` are left out."""
    names = [n for n in metrics if n.startswith("eval/") and n not in ABOUT and n.rpartition("-")[0] not in metrics]
    return [(name.removeprefix("eval/"), version, metrics[name]) for name in names]


def evaluations(rows: Iterable[Mapping[str, float]]) -> list[Point]:
    """Of the complete evaluations among rows of `metrics.jsonl`, in their order."""
    complete = (row for row in rows if row.get("eval/complete"))
    return [point for row in complete for point in scores(row, int(row[VERSION]))]


def best_saved(points: Sequence[Point], root: Path) -> tuple[Point, Point | None] | None:
    """The best point, and the best of those whose checkpoint is there. None without an evaluation."""
    main = [point for point in points if point[0] == points[0][0]]
    if not main:
        return None
    saved = [point for point in main if _checkpoint(root, point[1]) is not None]
    return max(main, key=itemgetter(2)), max(saved, key=itemgetter(2), default=None)


def best_text(points: Sequence[Point], root: Path) -> str:
    """Which version was best and where its checkpoint is, in words; empty without an evaluation."""
    if (found := best_saved(points, root)) is None:
        return ""
    best, saved = found
    text = f"version {best[1]}, eval {best[0]} {best[2]:.3f}"
    if saved is None:
        return f"{text}, no evaluated version is saved"
    place = final_path(root, saved[1])
    return f"{text}, {place}" if saved == best else f"{text}, not saved; saved: {saved[1]}, {saved[2]:.3f}, {place}"


def _checkpoint(root: Path, version: int) -> Path | None:
    path = final_path(root, version)  # a version has the number of its step
    try:
        read_manifest(path)
    except CheckpointError:
        return None
    return path


def main(argv: Sequence[str]) -> int:
    """Copy a model; returns the exit code. Raises UsageError."""
    parser = argparse.ArgumentParser(prog="launch.py export", description="Copy the model of a checkpoint.")
    parser.add_argument("run", metavar="RUN", type=Path, help="run directory")
    parser.add_argument("--best", action="store_true", help="of the best evaluated version that is saved, not the last")
    parser.add_argument("--to", metavar="DIRECTORY", type=Path, help="the copy; default RUN/exported/step-N")
    given = parser.parse_args(argv)
    rundir = RunDir(given.run)
    root, what = rundir.checkpoints, "version"
    checkpoint = latest_checkpoint(root)
    if given.best:
        points = evaluations(read_metrics(rundir.metrics)) if rundir.metrics.exists() else []
        _, saved = best_saved(points, root) or (None, None)
        checkpoint, what = None if saved is None else final_path(root, saved[1]), "evaluated version"
        sys.stdout.write(f"best: {best_text(points, root) or 'no version, nothing was evaluated'}\n")
    if checkpoint is None:
        raise UsageError(f"{given.run}: no {what} is saved; set --save-interval, and --keep-last-n to keep more")
    target = given.to or rundir.path / "exported" / checkpoint.name
    try:
        manifest = read_manifest(checkpoint)
        model = {name: entry for name, entry in manifest.files.items() if name.startswith(f"{MODEL_DIR}/")}
        verify_files(checkpoint, msgspec.structs.replace(manifest, files=model))
        place = save_hf(checkpoint, str(target), manifest.step, "--to")
    except CheckpointError as error:
        raise UsageError(str(error)) from error
    sys.stdout.write(f"exported step {manifest.step} to {place}\n")
    return 0
