"""The models of one training process (policy, reference, critic), with what runs and updates them, and their files.

Invariant: loading checks everything that it can before it changes anything.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Final

import torch

from configs.schema.algorithm import AlgorithmConfig
from configs.schema.critic import CriticConfig
from configs.schema.train import TrainConfig
from models.algorithms.group_loss import GroupLossFunction
from models.algorithms.modes import Correction
from models.train.anchors import AnchorPass
from models.train.critic import Critic
from models.train.loading import (
    LoadedModel,
    autocast_dtype,
    enable_checkpointing,
    load_model,
    load_weights,
    pick_device,
)
from models.train.micro_batch import MicroBatchPass
from models.train.needs import uses_critic, uses_reference
from models.train.reference import Reference
from models.train.running_batch import Passes
from models.train.scoring import Scorer
from models.train.state_files import MODEL_DIR, TrainerState, load_part, load_state, save_state
from models.train.updates import Updater

RNG_CPU: Final = "rng/cpu"
RNG_CUDA: Final = "rng/cuda"


@dataclasses.dataclass
class Counters:
    """What a run has done so far; part of its checkpoints."""

    batches: int = 0
    steps: int = 0
    skipped_steps: int = 0  # the gradient was not finite, of the policy or of the critic
    empty_steps: int = 0  # nothing to learn from: no trainable token, or all rejected


class ModelSet:
    """Loads all models of the configuration and builds their optimizers."""

    def __init__(
        self,
        train: TrainConfig,
        algorithm: AlgorithmConfig,
        correction: Correction,
        critic: CriticConfig,
        *,
        group_loss: GroupLossFunction | None,
        temperature: float,
        seed: int,
        total_steps: int | None,
    ) -> None:
        """Raises `CheckpointUnavailable`, `UnsupportedModel` or `TrainConfigInvalid`."""
        self._train = train
        self._temperature = temperature
        self.device = pick_device(train.train_device)
        self.precision = autocast_dtype(train.train_dtype, self.device)
        loaded = load_model(train.hf_checkpoint, "hf_checkpoint", train, self.device, seed=seed)
        self.model: Any = loaded.model
        self.vocab_size = loaded.vocab_size  # that all models know
        self.model.train()
        if train.gradient_checkpointing:
            enable_checkpointing(self.model)
        packing = loaded.packing
        score, score_reference = self._scorer(loaded), None
        self.reference: Reference | None = None
        if uses_reference(algorithm, train.loss_type):
            renewed_from = self.model if algorithm.ref_update_interval else None
            self.reference = Reference(train, device=self.device, seed=seed, renewed_from=renewed_from)
            score_reference = self._scorer(self.reference.loaded)
            packing = packing.both(self.reference.loaded.packing)
            self.vocab_size = min(self.vocab_size, self.reference.loaded.vocab_size)
        self.critic: Critic | None = None
        if uses_critic(algorithm, train.loss_type):
            self.critic = Critic(
                critic,
                train,
                device=self.device,
                autocast_dtype=self.precision,
                seed=seed,
                bootstrap_truncated=algorithm.bootstrap_truncated,
            )
            packing = packing.both(self.critic.packing)
            self.vocab_size = min(self.vocab_size, self.critic.vocab_size)
        policy = MicroBatchPass(
            score,
            score_reference,
            algorithm,
            correction,
            device=self.device,
            sft=train.loss_type == "sft_loss",
            group_loss=group_loss,
        )
        self.passes = Passes(
            policy=policy,
            anchors=AnchorPass(score, score_reference, self.critic),
            critic=self.critic,
            packing=dataclasses.replace(packing, max_tokens=train.max_tokens_per_gpu),
        )
        self.updater = Updater(self.model, train, total_steps)

    def _scorer(self, loaded: LoadedModel) -> Scorer:
        return Scorer(
            loaded.model,
            device=self.device,
            autocast_dtype=self.precision,
            temperature=self._temperature,
            chunk_tokens=self._train.logprob_chunk_tokens,
        )

    def save(self, directory: Path, counters: Counters) -> None:
        """Write the policy to `directory/hf` and all else beside it, synchronised to disk."""
        tensors = self.updater.state_tensors()
        tensors[RNG_CPU] = torch.get_rng_state()
        if self.device.type == "cuda":
            tensors[RNG_CUDA] = torch.cuda.get_rng_state(self.device)
        state = TrainerState(updates=self.updater.updates, **dataclasses.asdict(counters))
        parts = {name: holder.state_tensors() for name, holder in self._holders().items()}
        save_state(directory, self.model, tensors, state, self._train.hf_checkpoint, parts)

    def load(self, directory: Path) -> Counters:
        """Restore what `save` wrote, and return its counters. Raises `TrainStateUnreadable`."""
        tensors, state = load_state(directory)
        rng = tensors.pop(RNG_CPU)
        rng_cuda = tensors.pop(RNG_CUDA, None)
        self.updater.check_state_tensors(tensors)
        holders = self._holders()
        parts = {name: load_part(directory, state, name) for name in holders}
        for name, holder in holders.items():
            holder.check_state_tensors(parts[name])
        load_weights(self.model, directory / MODEL_DIR)
        self.updater.load_state_tensors(tensors)
        for name, holder in holders.items():
            holder.load_state_tensors(parts[name])
        torch.set_rng_state(rng)
        if rng_cuda is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(rng_cuda, self.device)
        self.updater.updates = state.updates
        return Counters(state.batches, state.steps, state.skipped_steps, state.empty_steps)

    def _holders(self) -> dict[str, Critic | Reference]:
        """What has tensors of its own in a checkpoint, by the name of their file."""
        holders: dict[str, Critic | Reference] = {}
        if self.critic is not None:
            holders["critic"] = self.critic
        if self.reference is not None and self.reference.renewed:
            holders["reference"] = self.reference
        return holders
