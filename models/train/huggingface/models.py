"""Models of which every process holds all: Hugging Face modules on a CPU or one GPU, alone or as plain copies.

Invariant: loading checks everything that it can before it changes anything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from models.algorithms.tokens import StepStatistics
from models.train.dp_group import Alone, DpGroup, Float32Array
from models.train.errors import BackendMisuse
from models.train.huggingface.hf_weights import hf_tensors
from models.train.huggingface.loading import (
    LoadedModel,
    autocast_dtype,
    enable_checkpointing,
    load_model,
    load_weights,
    pick_device,
)
from models.train.huggingface.offload import HOST, move
from models.train.huggingface.optimizer import Updater, UpdateResult
from models.train.huggingface.reference import Reference
from models.train.huggingface.scoring import Scorer
from models.train.huggingface.state_files import MODEL_DIR, TrainerState, load_part, load_state, save_state
from models.train.model_set import Counters, Scored
from models.train.packing.balance import MicroBatch
from models.train.packing.packing import with_budget
from models.train.spec import TrainSpec
from models.train.step.batch_needs import uses_critic, uses_reference
from models.train.step.critic import Critic
from models.train.step.micro_batch_loss import PolicyNumerator
from models.train.step.totals import StepTotals

RNG_CPU: Final = "rng/cpu"
RNG_CUDA: Final = "rng/cuda"


class TorchModels:
    """`ModelSet` on PyTorch and transformers. Constructing loads all models and builds their optimizers."""

    reference_apart = False

    def __init__(self, spec: TrainSpec, dp_group: DpGroup | None = None) -> None:
        """`dp_group`: the processes that hold copies (default: this one alone).

        Raises `CheckpointUnavailable`, `UnsupportedModel` or `TrainConfigInvalid`.
        """
        train, algorithm, seed = spec.train, spec.algorithm, spec.seed
        self._train = train
        self._temperature = spec.scoring_temperature
        self.device = pick_device(train.train_device)
        self.precision = autocast_dtype(train.train_dtype, self.device)
        loaded = load_model(train.hf_checkpoint, "hf_checkpoint", train, self.device, seed=seed)
        self.model: Any = loaded.model
        self.vocab_size = loaded.vocab_size  # that all models know
        self.model.train()
        if train.gradient_checkpointing:
            enable_checkpointing(self.model)
        self.dp_group: DpGroup = dp_group or Alone()
        packing = loaded.packing
        self._score, self._score_reference = self._scorer(loaded), None
        self.reference: Reference | None = None
        if uses_reference(algorithm, train.loss_type):
            renewed_from = self.model if algorithm.ref_update_interval else None
            self.reference = Reference(train, device=self.device, seed=seed, renewed_from=renewed_from)
            self._score_reference = self._scorer(self.reference.loaded)
            packing = packing.both(self.reference.loaded.packing)
            self.vocab_size = min(self.vocab_size, self.reference.loaded.vocab_size)
        self.critic: Critic | None = None
        if uses_critic(algorithm, train.loss_type):
            self.critic = Critic(spec.critic, train, device=self.device, autocast_dtype=self.precision, seed=seed)
            packing = packing.both(self.critic.packing)
            self.vocab_size = min(self.vocab_size, self.critic.vocab_size)
        self._numerator = PolicyNumerator(algorithm, spec.correction, sft=spec.supervised, group_loss=spec.group_loss)
        self.packing = with_budget(packing, train, spec.parallel)
        self.updater = Updater(self.model, train, spec.total_steps)

    @property
    def has_reference(self) -> bool:
        return self.reference is not None

    def _scorer(self, loaded: LoadedModel) -> Scorer:
        return Scorer(
            loaded.model,
            device=self.device,
            autocast_dtype=self.precision,
            temperature=self._temperature,
            chunk_tokens=self._train.logprob_chunk_tokens,
        )

    # ------------------------------------------------------------------ passes

    def log_probs(self, batches: Sequence[MicroBatch], model: Scored = "policy") -> list[Float32Array]:
        """Of the chosen tokens, one array [N] per micro-batch, no gradient. Raises `BackendMisuse`."""
        score = self._score if model == "policy" else self._score_reference
        if score is None:
            raise BackendMisuse("there is no reference; set --use-kl-loss or --kl-coef")
        with torch.no_grad():
            return [score(batch.rows)[0].cpu().numpy() for batch in batches if not batch.blank]

    def backward(self, batches: Sequence[MicroBatch], statistics: StepStatistics, totals: StepTotals) -> None:
        """Add the gradient of the micro-batches' numerators to the parameters, and their sums to `totals`."""
        for batch in batches:
            if batch.blank:
                continue
            log_probs, entropy = self._score(batch.rows, entropy=self._numerator.entropy)
            ref_log_probs = None
            if self._score_reference is not None and batch.members[0].ref_log_probs is None:
                with torch.no_grad():
                    ref_log_probs, _ = self._score_reference(batch.rows)
            self._numerator(batch.members, log_probs, entropy, statistics, totals, ref_log_probs).backward()

    # ------------------------------------------------------------------ the update

    def update(self, denominator: float, *, lr_scale: float = 1.0) -> UpdateResult:
        """Sum the gradients over data-parallel ranks, divide, clip, update; or refuse. Clears the gradients."""
        self.dp_group.all_reduce_gradients([parameter for _, parameter in self.updater.named_parameters])
        return self.updater.apply(denominator, lr_scale=lr_scale)

    def refuse(self) -> UpdateResult:
        """Make no update. Clears the gradients."""
        return self.updater.refuse()

    def clear(self) -> None:
        """Drop all gradients of the policy."""
        self.updater.clear()

    def renew_reference(self) -> None:
        """Let the reference become the policy as it is now."""
        if self.reference is not None:
            self.reference.renew()

    # ------------------------------------------------------------------ the device

    def offload(self) -> None:
        """Give the device's memory back: everything moves to the host."""
        self._move(HOST)

    def onload(self) -> None:
        """Take everything back to the device."""
        self._move(self.device)

    def _move(self, target: torch.device) -> None:
        beside = [self.reference.loaded.model] if self.reference is not None else []
        optimizers = [self.updater.optimizer]
        if self.critic is not None:
            beside.append(self.critic.model)
            optimizers.append(self.critic.updater.optimizer)
        move([self.model, *beside], optimizers, target)

    # ------------------------------------------------------------------ weights and files

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Current weights; views of the live ones where no cast is needed: use them before the next update."""
        return hf_tensors(self.model, self.precision)

    def save(self, directory: Path, counters: Counters) -> None:
        """Write the policy to `directory/hf` and all else beside it, synchronised to disk."""
        tensors = self.updater.state_tensors()
        tensors[RNG_CPU] = torch.get_rng_state()
        if self.device.type == "cuda":
            tensors[RNG_CUDA] = torch.cuda.get_rng_state(self.device)
        state = TrainerState(updates=self.updater.updates, **dataclasses.asdict(counters))
        parts = {name: holder.state_tensors() for name, holder in self._holders().items()}
        save_state(directory, self.model, tensors, state, self._train.hf_checkpoint, parts)

    def finish_save(self) -> None:
        """Nothing: `save` returns when all is on disk."""

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
