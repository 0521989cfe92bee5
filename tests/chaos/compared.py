"""Weights that are compared: those of a run that was killed with those of an undisturbed one, and those that a run went
back to with those of the checkpoint that was chosen. As oracle.py it knows only the formats of the files.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.kills import Kill, told
from tests.chaos.oracle import DISAGREE, Expected, Fault, Faults, journal, replay

# What a run trained, for comparing runs: a sync run trains the same whatever died in it, bit for bit. The hash of a
# batch is over its group ids, token ids and masks; rewards and all else are in the weights that come of them.

OTHERWISE = "trained otherwise"


@dataclass(frozen=True)
class Trained:
    """Of a complete run."""

    batches: tuple[str, ...]  # the hash of each, in the order of steps
    weights: tuple[tuple[str, str], ...]  # files of the last checkpoint's model and optimizer, and their checksums


def trained_by(run_dir: Path, expected: Expected) -> Trained:
    """By the history that survived."""
    faults = Faults()
    last = replay(list(journal(run_dir / "ledger.jsonl", faults)), expected, faults)[-1]
    if faults:
        raise ValueError(f"the journal of {run_dir} is not one to compare with: {faults[0].text}")
    batches = tuple(name for name, _ in sorted(last.hashes.items(), key=lambda one: one[1]))
    newest = sorted((run_dir / "checkpoints").glob("step-*"))[-1]
    files = json.loads((newest / "manifest.json").read_bytes())["manifest"]["files"]
    weights = tuple(sorted((name, files[name]["xxh3"]) for name in files if name.endswith(".safetensors")))
    if not batches or not weights:
        raise ValueError(f"{run_dir}: {len(batches)} steps and {len(weights)} files of weights are nothing to compare")
    return Trained(batches, weights)


def judge_same(found: Trained, undisturbed: Trained) -> list[Fault]:
    """Where a run differs from the undisturbed one: its first batch that does, and its weights."""
    faults = Faults()
    both = itertools.zip_longest(found.batches, undisturbed.batches)
    step = next((at for at, (one, other) in enumerate(both, 1) if one != other), 0)
    faults.expect(not step, OTHERWISE, f"step {step} trained other tokens than in the undisturbed run")
    same = found.weights == undisturbed.weights
    faults.expect(same, OTHERWISE, "the weights differ from those of the undisturbed run")
    return faults


class Rollbacks:
    """Has a running run go back to one of its checkpoints; the first checkpoint after that must hold the same weights.
    `compared`: of how many that was seen."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self._home, self.compared = run_dir, run_dir / "checkpoints", 0
        self.forget()

    def forget(self) -> None:
        """The run was killed: it resumes from its newest checkpoint."""
        self._chosen, self._weights, self._before = "", dict[str, str](), set[str]()

    def ask(self, kill: Kill) -> bool:
        """Whether the run goes back: it has no checkpoint at first, and no trainer while that is started again."""
        kept = sorted(path.name for path in self._home.glob("step-*"))
        with contextlib.suppress(OSError, ValueError, IndexError):  # none yet, or it was removed just now
            chosen = kept[int(kill.delay_s * 1000) % max(1, len(kept))]
            _, weights = _learnt(self._home / chosen)
            if told(self._run_dir, type="rollback", step=int(chosen.removeprefix("step-"))):
                self._chosen, self._weights, self._before = chosen, weights, set(kept)
                return True
        return False

    def look(self) -> list[Fault]:
        """What is wrong with the checkpoint of a rollback, once it is there."""
        for path in self._home.glob("step-*") if self._chosen else ():
            with contextlib.suppress(OSError, ValueError):  # it is removed just now
                backs, weights = _learnt(path)
                if path.name not in self._before and backs and path.name == f"step-{backs[-1]:08d}":
                    faults, words = Faults(), "to which the run went back, has not the weights of"
                    faults.expect(weights == self._weights, DISAGREE, f"{path.name}, {words} {self._chosen}")
                    self.compared += 1
                    self.forget()
                    return faults
        return []


def _learnt(directory: Path) -> tuple[list[int], dict[str, str]]:
    """Of a checkpoint: the steps that were rollbacks, and the checksums of what training changes."""
    manifest = json.loads((directory / "manifest.json").read_bytes())["manifest"]
    names = [name for name in manifest["files"] if name.endswith((".safetensors", "simulated.json"))]
    return json.loads(manifest["ledger"])["rollbacks"], {name: manifest["files"][name]["xxh3"] for name in names}
