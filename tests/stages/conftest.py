"""Set-up that many tests of the stages share: streams, an engines stage, a group stage."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from configs.schema.rollout import UpdateConfig
from models.tiny import TinyRecipe, make_tiny_checkpoint
from tests.stages.engine_rig import Log, record_exchanges
from tests.stages.fleet_rig import Fleet, open_fleet
from tests.stages.stage_rig import Desk, Rig, open_desk, open_rig, time_limit
from tests.stages.train_rig import Training, open_training


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose tokenizer knows digits and signs."""
    path = tmp_path_factory.mktemp("tiny") / "tiny"
    return make_tiny_checkpoint(path, TinyRecipe(tokenizer="arithmetic", hidden_size=32, num_layers=1))


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    """Streams on a network in memory, and a topic."""
    with time_limit():
        async with open_rig() as opened:
            yield opened


@pytest.fixture
async def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    """An engines stage that follows a topic, without engines yet. Tests with other settings use `open_fleet`."""
    with time_limit():
        async with open_fleet(tmp_path, monkeypatch) as opened:
            yield opened


@pytest.fixture
async def in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    """The same, whose engines update one after the other."""
    with time_limit():
        async with open_fleet(tmp_path, monkeypatch, update=UpdateConfig(update_weight_rolling=1)) as opened:
            yield opened


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    """A group stage with the default configuration. Tests with another use `open_desk`."""
    with time_limit():
        async with open_desk() as opened:
            yield opened


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    """All generate requests of the test."""
    return record_exchanges(monkeypatch)


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Training:
    """Opens a train stage: `async with training(batch=1) as one`."""
    return partial(open_training, tmp_path, monkeypatch)
