"""From configuration to training backend. The one place that knows which backends there are."""

from __future__ import annotations

from configs.schema import Config
from models.train.crew import Crew
from models.train.interface import TrainBackend
from models.train.simulated import SimulatedBackend
from models.train.spec import train_spec
from models.train.torch_models import TorchModels
from models.train.trainer import Trainer


def build_backend(config: Config, total_batches: int) -> TrainBackend:
    """The configured backend for one process alone, not yet set up. `total_batches`: rollout batches of the run."""
    if config.train.train_backend == "simulated":
        return SimulatedBackend(config.train, steps=config.train.num_steps_per_rollout or 1)
    return Trainer(train_spec(config, total_batches))


def build_member(config: Config, total_batches: int, crew: Crew) -> Trainer:
    """What one process of a gang runs. `crew`: of plain copies (torch); sharded frameworks make their own."""

    return Trainer(train_spec(config, total_batches), lambda spec: TorchModels(spec, crew))
