"""A small checkpoint, and trainers of it in this process alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from fsdp_rig import make_trainer

from models.tiny import make_tiny_checkpoint
from models.train.trainer import Trainer

Make = Callable[..., Trainer]


@pytest.fixture(scope="module", autouse=True)
def _group_of_one() -> Iterator[None]:
    torch.set_num_threads(1)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(
        tmp_path_factory.mktemp("alone") / "tied",
        tokenizer="arithmetic",
        hidden_size=32,
        num_layers=2,
        intermediate_size=64,
        max_position_embeddings=128,
    )


@pytest.fixture(scope="module")
def make(small: Path) -> Make:
    return lambda *models, **fields: make_trainer(small, *models, **fields)
