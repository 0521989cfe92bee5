"""Files that a run keeps beside its checkpoints: what rollouts left, and copies of the weights (`--save-hf`).

    RUN/episodes/lives.json       the step from which each life of the run went on
                 ended.json       groups that no resume can open again
                 <group>/         responses, answers, turns and calls of its rollouts:
                                  stages/records/growing_records.py, stages/records/once.py

Invariants: the files of a group are removed once it has ended in every checkpoint that is there; before that,
`ended.json` names it, so that none of its calls is made again; a call with an unknown result is never removed.
Responses and answers are removed as soon as their group has ended, except those that a resume from the newest
checkpoint could use.

A copy of the weights is made from a committed checkpoint, so it never holds weights from which no resume continues. It
appears whole or not at all, and replaces the copy of an earlier checkpoint. `python launch.py export RUN` makes one,
with `--best` of the best version by the first data set of evaluation, where a higher score is better. An incomplete
evaluation does not count, and a version counts as saved only while its checkpoint is complete on the disk.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
from collections.abc import Iterable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Final

import msgspec

from configs.schema import Config, generates
from models.checkpoint import (
    CheckpointError,
    Manifest,
    explain_disk_errors,
    final_path,
    latest_checkpoint,
    manifests,
    read_manifest,
    verify_files,
)
from models.disk import read_file, write_whole
from pipeline.errors import UsageError
from pipeline.facts.run_directory import RunDir
from pipeline.facts.run_log import show
from pipeline.record.metrics import Point, evaluations, read_metrics
from stages.prompts.ledger import LedgerSnapshot
from stages.records.growing_records import ANSWERS, RESPONSES
from stages.records.once import ENDED_FILE, Ended, forget, groups_in, home_of, uncertain_calls

LIVES_FILE: Final = "lives.json"


def keeps_rollouts(config: Config) -> bool:
    """Whether the run may write files of its rollouts."""
    checkpoint = config.checkpoint
    responses = checkpoint.save_interval is not None and checkpoint.response_journal_tokens > 0 and generates(config)
    return bool(config.environment) or responses


def read_lives(directory: Path) -> tuple[int, ...]:
    """Steps from which the run was started until now; none for a new one."""
    path = directory / LIVES_FILE
    return msgspec.json.decode(read_file(path), type=tuple[int, ...]) if path.exists() else ()


def write_lives(directory: Path, lives: tuple[int, ...]) -> None:
    """Called once this life has certainly begun, before its first rollout."""
    directory.mkdir(exist_ok=True)
    write_whole(directory / LIVES_FILE, msgspec.json.encode(lives), durable=True)


def forget_ended(directory: Path, checkpoints: Sequence[Manifest]) -> None:
    """Remove the files of groups that have ended in all of these checkpoints."""
    if not directory.is_dir() or not checkpoints:
        return
    ledgers = [msgspec.json.decode(manifest.ledger, type=LedgerSnapshot) for manifest in checkpoints]
    ended = Ended(
        min(ledger.next_group for ledger in ledgers),
        tuple(sorted({group.group_id for ledger in ledgers for group in ledger.open})),
        min(manifest.step for manifest in checkpoints),
    )
    write_whole(directory / ENDED_FILE, msgspec.json.encode(ended), durable=True)
    for group, home in groups_in(directory).items():
        if ended.has(group):
            forget(home)


def forget_responses(directory: Path, groups: Iterable[int]) -> None:
    """Remove the responses and answers of groups that have ended."""
    for group in groups:
        home = home_of(directory, str(group))
        for path in (*home.glob(f"{RESPONSES}-*.log"), *home.glob(f"{ANSWERS}-*.log")):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # missing, or with turns or calls inside
            home.rmdir()


def uncertain_in(directory: Path) -> int:
    """Calls with an unknown result: they may or may not have taken effect."""
    return sum(len(uncertain_calls(home)) for home in groups_in(directory).values())


MODEL_DIR: Final = "hf"


def save_hf(checkpoint: Path, pattern: str, step: int, flag: str = "--save-hf") -> Path:
    """Copy the policy of a committed checkpoint to `pattern`, with `{step}` and `{rollout_id}` replaced; where it is.

    Raises CheckpointError if the disk fails, or if something that is no such copy is in the way.
    """
    target = Path(pattern.replace("{step}", str(step)).replace("{rollout_id}", str(step - 1))).expanduser()
    if target.exists() and not (target / "config.json").is_file():
        raise CheckpointError(
            f"{flag} {target} exists and is no model in Hugging Face format; move it away, or choose another place"
        )
    draft, old = target.with_name(f".{target.name}.draft"), target.with_name(f".{target.name}.replaced")
    with explain_disk_errors(target, remove=draft):
        shutil.rmtree(draft, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(checkpoint / MODEL_DIR, draft)
        if target.exists():
            target.rename(old)
        draft.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    return target


def best_saved(points: Sequence[Point], root: Path) -> tuple[Point, Point | None] | None:
    """The best point, and the best of those whose checkpoint is there. None without an evaluation."""
    main = [point for point in points if point[0] == points[0][0]]
    if not main:
        return None
    steps = {manifest.step for manifest in manifests(root)}  # a version has the number of its step
    saved = [point for point in main if point[1] in steps]
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


def main(argv: Sequence[str]) -> int:
    """Copy a model; returns the exit code. Raises UsageError and CheckpointError."""
    parser = argparse.ArgumentParser(prog="launch.py export", description="Copy the model of a checkpoint.")
    parser.add_argument("run", metavar="RUN", type=Path, help="run directory")
    parser.add_argument("--best", action="store_true", help="of the best evaluated version that is saved, not the last")
    parser.add_argument("--to", metavar="DIRECTORY", type=Path, help="the copy; default RUN/exported/step-N")
    parser.add_argument("--json", action="store_true", help="as JSON")
    given = parser.parse_args(argv)
    rundir = RunDir(given.run)
    root, what, best = rundir.checkpoints, "version", ""
    checkpoint = latest_checkpoint(root)
    if given.best:
        points = evaluations(read_metrics(rundir.metrics)) if rundir.metrics.exists() else []
        _, saved = best_saved(points, root) or (None, None)
        checkpoint, what = None if saved is None else final_path(root, saved[1]), "evaluated version"
        best = best_text(points, root) or "no version, nothing was evaluated"
    if checkpoint is None:
        raise UsageError(f"{given.run}: no {what} is saved; set --save-interval, and --keep-last-n to keep more")
    target = given.to or rundir.path / "exported" / checkpoint.name
    manifest = read_manifest(checkpoint)
    model = {name: entry for name, entry in manifest.files.items() if name.startswith(f"{MODEL_DIR}/")}
    verify_files(checkpoint, msgspec.structs.replace(manifest, files=model))
    place = save_hf(checkpoint, str(target), manifest.step, "--to")
    text = f"best: {best}\n" * given.best + f"exported step {manifest.step} to {place}"
    show(text, {"step": manifest.step, "path": str(place), "best": best}, as_json=given.json)
    return 0
