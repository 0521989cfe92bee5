"""What a run trained, for comparing runs: a sync run trains the same whatever died in it, bit for bit.

Reads the journal and the last checkpoint, as the oracle does, which has verified both by then. The hash of a batch is
over its group ids, token ids and masks; rewards and everything else are in the weights that come of them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.oracle import Expected, Fault, Faults, journal, replay

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
    faults: list[Fault] = []
    if found.batches != undisturbed.batches:
        both = zip(found.batches, undisturbed.batches, strict=False)
        behind = min(len(found.batches), len(undisturbed.batches)) + 1
        step = next((at for at, (one, other) in enumerate(both, 1) if one != other), behind)
        faults.append(Fault(OTHERWISE, f"step {step} trained other tokens than in the undisturbed run"))
    if found.weights != undisturbed.weights:
        faults.append(Fault(OTHERWISE, "the weights differ from those of the undisturbed run"))
    return faults
