"""A tiny checkpoint, sequences of uneven lengths with tool tokens, and a look at a backend's gradient."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from models.tiny import TinyRecipe, make_tiny_checkpoint
from models.train.trainer import Trainer
from tests.models.train.rig import TINY, make_backend


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(
        tmp_path_factory.mktemp("checkpoints") / "tiny", TinyRecipe(tokenizer="arithmetic", **TINY)
    )


@pytest.fixture
def backend(tiny: Path) -> Callable[..., Trainer]:
    """Makes a backend that is set up; keyword arguments are fields of either configuration."""

    def make(**fields: Any) -> Trainer:
        return make_backend(tiny, **fields)

    return make
