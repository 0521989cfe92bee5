"""Tiny checkpoints of all families, and processes that load them into Megatron-core."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from family_models import FAMILIES, gradients, log_probs, save_model, token_ids
from safetensors.torch import load_file


class Reference(NamedTuple):
    """What transformers finds."""

    log_probs: torch.Tensor  # [2, 13]
    gradients: dict[str, torch.Tensor]


Checkpoints = tuple[Path, dict[str, Reference]]
Results = dict[str, dict[str, torch.Tensor]]
Case = tuple[str, str, dict[str, Any]]  # its name, the model's, options of Megatron


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """A directory with one checkpoint per family, and the log-probs and gradients that transformers finds."""
    root = tmp_path_factory.mktemp("families")
    found = {}
    for name in FAMILIES:
        model = save_model(name, root / name)
        with torch.no_grad():
            scores = log_probs(model(token_ids()).logits, token_ids())
        found[name] = Reference(scores, gradients(model))
    return root, found


@pytest.fixture(scope="session")
def run_worlds(
    checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[dict[int, list[Case]]], Results]:
    """Run the cases of each number of processes, and return what the first of them wrote, by case."""

    def run(worlds: dict[int, list[Case]]) -> Results:
        import family_worker

        out = tmp_path_factory.mktemp("worlds")
        leader = multiprocessing.get_context("spawn").Process(
            target=family_worker.run_worlds, args=(worlds, str(checkpoints[0]), str(out))
        )
        leader.start()
        leader.join(timeout=900)
        if leader.is_alive():
            leader.kill()
        errors = "\n".join(path.read_text() for path in sorted(out.glob("error-*.txt")))
        assert leader.exitcode == 0, errors
        return {case: load_file(out / f"{case}.safetensors") for cases in worlds.values() for case, *_ in cases}

    return run
