"""From configuration to training backend. The one place that knows which backends there are."""

from __future__ import annotations

from functools import partial

import torch

from configs.schema import Config
from models.families.source import local_directory
from models.train.dp_group import DpGroup
from models.train.huggingface.models import TorchModels
from models.train.interface import TrainBackend
from models.train.simulated import SimulatedBackend
from models.train.spec import train_spec
from models.train.trainer import Trainer


def build_backend(config: Config, total_batches: int) -> TrainBackend:
    """The configured backend for one process alone, not yet set up. `total_batches`: rollout batches of the run."""
    if config.train.train_backend == "simulated":
        return SimulatedBackend(config.train, steps=config.train.num_steps_per_rollout or 1)
    torch.manual_seed(config.run.seed)  # for what a loss of the user's draws; also in the state that is saved
    return Trainer(train_spec(config, total_batches))


def load_libraries(config: Config) -> None:
    """Import what `build_backend` and its first step will need of torch and transformers, for the model of the run."""
    if config.train.train_backend == "simulated":
        return
    from transformers import AutoConfig, AutoModelForCausalLM

    checkpoint = config.train.hf_checkpoint
    found = AutoConfig.from_pretrained(str(local_directory(checkpoint, "hf_checkpoint") or checkpoint))
    with torch.device("meta"):  # no memory
        model = AutoModelForCausalLM.from_config(found)
    torch.optim.AdamW(model.parameters())


def build_member(config: Config, total_batches: int, dp_group: DpGroup) -> Trainer:
    """What one process of a trainer group runs. `dp_group`: of plain copies (torch); sharded frameworks make their
    own."""
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
            return Trainer(spec, partial(TorchModels, dp_group=dp_group))
