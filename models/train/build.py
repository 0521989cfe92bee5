"""From configuration to training backend. The one place that knows which backends there are.

Each branch imports what its backend needs: the simulated one does without torch, whose import costs seconds.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from configs.schema import Config
from models.train.interface import TrainBackend

if TYPE_CHECKING:
    from models.train.dp_group import DpGroup
    from models.train.trainer import Trainer


def build_backend(config: Config, total_batches: int) -> TrainBackend:
    """The configured backend for one process alone, not yet set up. `total_batches`: rollout batches of the run."""
    if config.train.train_backend == "simulated":
        from models.train.simulated import SimulatedBackend

        return SimulatedBackend(config.train, steps=config.train.num_steps_per_rollout or 1)
    import torch

    from models.train.spec import train_spec
    from models.train.trainer import Trainer

    torch.manual_seed(config.run.seed)  # for what a loss of the user's draws; also in the state that is saved
    return Trainer(train_spec(config, total_batches))


def build_member(config: Config, total_batches: int, dp_group: DpGroup) -> Trainer:
    """What one process of a trainer group runs. `dp_group`: of plain copies (torch); sharded frameworks make their
    own."""
    import torch

    from models.train.spec import train_spec
    from models.train.trainer import Trainer

    torch.manual_seed(config.run.seed)
    spec, async_save = train_spec(config, total_batches), config.checkpoint.async_save
    match config.train.train_backend:
        case "fsdp":
            from models.train.fsdp.models import FsdpModels

            return Trainer(spec, partial(FsdpModels, async_save=async_save))
        case "megatron":
            from models.train.megatron.models import MegatronModels

            return Trainer(spec, partial(MegatronModels, async_save=async_save))
        case _:
            from models.train.huggingface.models import TorchModels

            return Trainer(spec, partial(TorchModels, dp_group=dp_group))
