"""From configuration to training backend. The one place that knows which backends there are."""

from __future__ import annotations

from configs.schema import Config
from models.algorithms.modes import resolve_correction
from models.train.interface import TrainBackend
from models.train.simulated import SimulatedBackend
from models.train.torch_backend import TorchBackend


def build_backend(config: Config, total_batches: int) -> TrainBackend:
    """The configured backend, not yet set up. `total_batches`: rollout batches of the run."""
    steps = config.train.num_steps_per_rollout or 1
    if config.train.train_backend == "simulated":
        return SimulatedBackend(config.train, steps=steps)
    return TorchBackend(
        config.train,
        config.algorithm,
        temperature=config.rollout.rollout_temperature,
        max_response_len=config.rollout.rollout_max_response_len,
        seed=config.run.seed,
        total_steps=total_batches * steps,
        correction=resolve_correction(
            config.correction,
            max_staleness=config.asynchrony.max_staleness or 0,
            policy_loss=config.algorithm.policy_loss,
        ),
        correction_config=config.correction,
        critic=config.critic,
        distill=config.distill,
    )
