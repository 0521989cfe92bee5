"""A tiny checkpoint, sequences of uneven lengths with tool tokens, and a look at a backend's gradient."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from models.tiny import make_tiny_checkpoint
from models.train.interface import TrainSequence
from models.train.trainer import Trainer
from tests.models.train.rig import Trained, make_backend, make_sequences, sequence, train_step, weights_of


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(
        tmp_path_factory.mktemp("checkpoints") / "tiny",
        tokenizer="arithmetic",
        hidden_size=32,
        num_layers=2,
        intermediate_size=64,
        max_position_embeddings=128,
    )


@pytest.fixture
def sequences() -> Callable[..., list[TrainSequence]]:
    return make_sequences


@pytest.fixture
def one() -> Callable[..., TrainSequence]:
    return sequence


@pytest.fixture
def backend(tiny: Path) -> Callable[..., Trainer]:
    """Makes a backend that is set up; keyword arguments are fields of either configuration."""

    def make(**fields: Any) -> Trainer:
        return make_backend(tiny, **fields)

    return make


@pytest.fixture
def run_step() -> Callable[..., Trained]:
    """Trains one batch; returns metrics, gradient (divided by the denominator) and the weights afterwards."""
    return train_step


@pytest.fixture
def weights() -> Callable[[Trainer], dict[str, torch.Tensor]]:
    return weights_of
