"""Models of transformers, wherever their tensors lie; and those of which every process holds all, on a CPU or a GPU.

Invariants:
- where passes are collective, every process runs every micro-batch that it is given, blank ones too;
- gradients are sums over all data-parallel ranks when the updater divides them, once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.algorithms.tokens import StepStatistics
from models.errors import BackendMisuse
from models.train.dp_group import DpGroup, Float32Array
from models.train.huggingface.critic import Critic
from models.train.huggingface.hf_weights import hf_tensors, model_tensors
from models.train.huggingface.lora import Adapters
from models.train.huggingface.offload import HOST, move
from models.train.huggingface.optimizer import Updater, UpdateResult
from models.train.huggingface.parts import StatePart, StateParts
from models.train.huggingface.placement import Placement
from models.train.huggingface.reference import Reference
from models.train.huggingface.state_files import load_state, save_state
from models.train.model_set import Counters, Scored
from models.train.packing.micro_batches import MicroBatch
from models.train.packing.packing import Packing, with_budget
from models.train.spec import TrainSpec
from models.train.step.micro_batch_loss import PolicyNumerator
from models.train.step.totals import StepTotals


class HfModels:
    """`ModelSet` on PyTorch and transformers, but for its files."""

    reference_apart, pass_micro_batches = False, 1

    def __init__(self, spec: TrainSpec, placement: Placement, adapters: Adapters | None = None) -> None:
        """Loads all models and builds their optimizers. Collective.

        Raises `CheckpointUnavailable`, `UnsupportedModel` or `TrainConfigInvalid`.
        """
        train, algorithm = spec.train, spec.algorithm
        self._spec, self._placement, self.adapters = spec, placement, adapters
        self.dp_group, self.device, self.precision = placement.dp_group, placement.device, placement.precision
        prepare = adapters.inject if adapters is not None else None
        self._policy = placement.load(train.hf_checkpoint, "hf_checkpoint", placement.scorer, prepare=prepare)
        self.model: Any = self._policy.model
        self._score = self._policy.root
        placed = [self._policy]
        self.reference: Reference | None = None
        self.has_reference = spec.uses_reference
        if self.has_reference:
            self.reference = Reference(placement, self._policy, adapters)
            placed.append(self.reference.placed)
        self.critic: Critic | None = None
        if spec.uses_critic:
            self.critic = Critic(placement)
            placed.append(self.critic.placed)
        self.vocab_size = min(one.vocab_size for one in placed)  # that all models know
        packing = reduce(Packing.both, [one.packing for one in placed])
        placement.passes.context.check(packing)
        self.packing = with_budget(packing, train, spec.parallel)
        self._numerator = PolicyNumerator(algorithm, spec.correction, sft=spec.supervised, group_loss=spec.group_loss)
        self.updater = Updater(self.model, train, spec.total_steps, placement.sum_over_shards)

    # ------------------------------------------------------------------ passes

    def log_probs(self, batches: Sequence[MicroBatch], model: Scored = "policy") -> list[Float32Array]:
        """Of the chosen tokens, one array [N] per micro-batch that is not blank, no gradient.

        Raises `BackendMisuse` without the model asked for.
        """
        if model == "policy":
            return self._placement.scores(self._policy, lambda rows: self._score(rows)[0], batches)
        if self.reference is None:
            raise BackendMisuse("there is no reference; set --use-kl-loss or --kl-coef")
        return self._placement.scores(self.reference.placed, self.reference.score, batches)

    def backward(self, batches: Sequence[MicroBatch], statistics: StepStatistics, totals: StepTotals) -> None:
        """Add the gradient of the micro-batches' numerators to the parameters, and their sums to `totals`."""
        reference = self.reference if self._reference_is_due(batches) else None
        if not self.dp_group.is_mp_src_rank:
            totals = StepTotals()
        for batch in self._placement.runs(batches):
            ref_log_probs = None if reference is None else reference.score(batch.rows)
            log_probs, entropy = self._score(batch.rows, entropy=self._numerator.entropy)
            if batch.blank:
                log_probs.backward(torch.zeros_like(log_probs))  # the others wait for this process's part of the sums
                continue
            self._numerator(batch.members, log_probs, entropy, statistics, totals, ref_log_probs).backward()
        self._placement.give_back(self._policy)
        if reference is not None:
            self._placement.give_back(reference.placed)

    def _reference_is_due(self, batches: Sequence[MicroBatch]) -> bool:
        """Whether any process has members that the reference has not scored: then all run it."""
        if self.reference is None:
            return False
        due = any(member.ref_log_probs is None for batch in batches for member in batch.members)
        return self.dp_group.merge({"due": float(due)}, largest=True)["due"] > 0

    # ------------------------------------------------------------------ the update

    def update(self, denominator: float, *, lr_scale: float = 1.0) -> UpdateResult:
        """Sum the gradients over data-parallel ranks, divide, clip, update; or refuse. Clears the gradients."""
        self._placement.sum_gradients(parameter for _, parameter in self.updater.named_parameters)
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

    # ------------------------------------------------------------------ weights and files

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Current weights, merged with adapters, one decoder layer at a time; in the first process only.

        Views of the live ones where they are whole and no cast is needed: use them before the next update.
        """
        return self._weights(self.precision)

    def _weights(self, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        merged = None if self.adapters is None else self.adapters.merged(self.model, self.device)
        first, sort = self._placement.first, self._policy.converts
        return hf_tensors(self.model, device=self.device, dtype=dtype, sort=sort, first=first, merged=merged)

    def parts(self) -> StateParts:
        """What is saved."""
        tensors = model_tensors(self.model)
        if self.adapters is not None:  # the rest is in the checkpoint that training started from
            trained = {name for name, _ in self.updater.named_parameters}
            tensors = {name: tensor for name, tensor in tensors.items() if name in trained}
        parts = StateParts(policy=StatePart(tensors, self.updater))
        if self.critic is not None:
            parts["critic"] = StatePart(model_tensors(self.critic.model), self.critic.updater)
        if self.reference is not None and self.reference.renewed:
            parts["reference"] = StatePart(self.reference.tensors())
        return parts


class TorchModels(HfModels):
    """`ModelSet` of which every process holds all: alone, or as plain copies."""

    def __init__(self, spec: TrainSpec, dp_group: DpGroup | None = None) -> None:
        """`dp_group`: the processes that hold copies (default: this one alone).

        Raises `CheckpointUnavailable`, `UnsupportedModel` or `TrainConfigInvalid`.
        """
        super().__init__(spec, Placement(spec, dp_group))

    def save(self, directory: Path, counters: Counters) -> None:
        """Write the policy to `directory/hf` and all else beside it, synchronised to disk."""
        source = self._spec.train.hf_checkpoint
        save_state(directory, self.parts(), counters, weights=self._weights(None), source=source, device=self.device)

    def finish_save(self) -> None:
        """Nothing: `save` returns when all is on disk."""

    def load(self, directory: Path) -> Counters:
        """Restore what `save` wrote, and return its counters. Raises `TrainStateUnreadable`."""
        return load_state(directory, self.parts(), self.device)

    def offload(self) -> None:
        """Give the device's memory back: everything moves to the host."""
        self._move(HOST)

    def onload(self) -> None:
        """Take everything back to the device."""
        self._move(self.device)

    def _move(self, target: torch.device) -> None:
        modules, optimizers = [self.model], [self.updater.optimizer]
        if self.reference is not None:
            modules.append(self.reference.placed.model)
        if self.critic is not None:
            modules.append(self.critic.model)
            optimizers.append(self.critic.updater.optimizer)
        move(modules, optimizers, target)
