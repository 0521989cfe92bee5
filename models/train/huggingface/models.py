"""Models of transformers, wherever their tensors lie.

Invariants:
- where passes are collective, every process runs every micro-batch that it is given, blank ones too;
- gradients are sums over all data-parallel ranks when the updater divides them, once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from models.algorithms.tokens import StepStatistics
from models.errors import TrainConfigInvalid
from models.train.dp_group import Float32Array
from models.train.huggingface.checkpoint import StatePart, StateParts, Updater
from models.train.huggingface.hf_files import hf_tensors, local, model_tensors
from models.train.huggingface.loading import LoadedModel, Placement, row_multiple
from models.train.huggingface.lora import Adapters
from models.train.huggingface.scoring import Backbone, Passes
from models.train.model_set import ModelSet, Scored
from models.train.spec import TrainSpec
from models.train.step.critic import CriticModel, ValueHead, critic_train_config
from models.train.step.micro_batch_loss import PolicyNumerator, StepTotals
from models.train.step.micro_batches import MicroBatch, PackedRows
from models.train.step.packing import Packing, with_budget

# --------------------------------------------------------------------------------------------------
# The value model of PPO on a Hugging Face backbone, with its optimizer.
#
# Invariants: those of `models.train.step.critic`; the backbone's output embedding is left out.


class ValueScorer(Backbone):
    """Values of chosen tokens: decoder and head in one forward pass."""

    def __init__(self, model: Any, passes: Passes, *, seed: int) -> None:
        super().__init__(model, passes)
        self.decoder = model.base_model
        self.value_head = ValueHead(int(model.config.get_text_config().hidden_size), seed=seed)

    def forward(self, rows: PackedRows) -> Tensor:
        """V [N] before each chosen token."""
        part = self._context.part(rows)
        with self.autocast():
            hidden = self.own_hidden(part)
        values: Tensor = self.value_head(hidden).squeeze(-1)
        # Not the view that the head returns: what is done in place to the output of a root would miss its hooks.
        return self._context.joined(values.clone(), part)


class Critic(CriticModel):
    """`CriticModel` wherever its tensors lie."""

    def __init__(self, placement: Placement) -> None:
        """Collective. Raises `CheckpointUnavailable`, `UnsupportedModel`."""
        config, train, seed = placement.spec.critic, placement.spec.train, placement.spec.seed
        self._placement = placement
        self.placed = placement.load(
            config.critic_load or train.hf_checkpoint,
            "critic_load" if config.critic_load else "hf_checkpoint",
            lambda model: ValueScorer(model, placement.passes, seed=seed),
        )
        self.model: ValueScorer = self.placed.root
        updater = Updater(self.model, critic_train_config(config, train), None, placement)
        super().__init__(config.value_clip, updater)
        self.updater: Updater = updater

    def values(self, batches: Sequence[MicroBatch]) -> list[Float32Array]:
        """V before each chosen token, one array [N] per micro-batch that is not blank."""
        return self._placement.scores(self.placed, self.placed.root, batches)

    def backward(self, batches: Sequence[MicroBatch]) -> None:
        """Add the gradient of the micro-batches' numerators, and their sums."""
        for batch in self._placement.runs(batches):
            values = self.placed.root(batch.rows)
            if batch.blank:
                values.backward(torch.zeros_like(values))  # the others wait for this process's part of the sums
            else:
                self._numerator(batch.members, values).backward()


# --------------------------------------------------------------------------------------------------
# The reference policy: a frozen second model, or the policy with its adapters off.
#
# Invariants: it is never trained; with `ref_update_interval` it is part of the checkpoint, since no other file holds
# it.


class Reference:
    """What the policy is compared with."""

    def __init__(self, placement: Placement, policy: LoadedModel, adapters: Adapters | None) -> None:
        """Collective. Raises `CheckpointUnavailable`, `UnsupportedModel`, `TrainConfigInvalid`."""
        train, interval = placement.spec.train, placement.spec.algorithm.ref_update_interval
        self._policy = policy
        self.renewed = bool(interval)  # becomes the policy from time to time
        own = adapters is None or train.ref_load not in (None, train.hf_checkpoint)
        self._adapters = None if own else adapters
        self.placed = policy
        if own:
            source, key = train.ref_load or train.hf_checkpoint, "ref_load" if train.ref_load else "hf_checkpoint"
            self.placed = placement.load(source, key, placement.scorer, frozen=True)
            if self.renewed and _shapes(policy) != _shapes(self.placed):
                raise TrainConfigInvalid(
                    f"ref_update_interval is set, but the reference {source!r} has other weights than the policy, "
                    "which it cannot become; leave --ref-update-interval or --ref-load out"
                )

    def score(self, rows: PackedRows) -> Tensor:
        """Log-probs [N] of the chosen tokens, without gradient."""
        with torch.no_grad(), nullcontext() if self._adapters is None else self._adapters.disabled(self.placed.model):
            found: Tensor = self.placed.root(rows)[0]
        return found

    def renew(self) -> None:
        """Become the policy as it is now, unless it never does."""
        if not self.renewed:
            return
        own = self.tensors()
        with torch.no_grad():
            for name, tensor in model_tensors(self._policy.model).items():
                local(own[name]).copy_(local(tensor))

    def tensors(self) -> dict[str, Tensor]:
        """Its weights."""
        return model_tensors(self.placed.model)


def _shapes(placed: LoadedModel) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model_tensors(placed.model).items()}


class HfModels(ModelSet):
    """`ModelSet` on PyTorch and transformers, but for its files."""

    reference_apart, pass_micro_batches = False, 1

    def __init__(self, spec: TrainSpec, placement: Placement, adapters: Adapters | None = None) -> None:
        """Loads all models and builds their optimizers. Collective.

        Raises `CheckpointUnavailable`, `UnsupportedModel` or `TrainConfigInvalid`.
        """
        train = spec.train
        self._spec, self._placement, self.adapters = spec, placement, adapters
        self.dp_group, self.device, self.precision = placement.dp_group, placement.device, placement.precision
        prepare = adapters.inject if adapters is not None else None
        self._policy = placement.load(train.hf_checkpoint, "hf_checkpoint", placement.scorer, prepare=prepare)
        self.model: Any = self._policy.model
        self._score = self._policy.root
        placed = [self._policy]
        self.reference: Reference | None = None
        if spec.uses_reference:
            self.reference = Reference(placement, self._policy, adapters)
            placed.append(self.reference.placed)
        self.critic: Critic | None = None
        if spec.uses_critic:
            self.critic = Critic(placement)
            placed.append(self.critic.placed)
        self.vocab_size = min(one.vocab_size for one in placed)  # that all models know
        packing = reduce(Packing.both, [one.packing for one in placed])
        placement.passes.context.check(packing)
        packing = with_budget(packing, train, spec.parallel)
        self.packing = replace(packing, row_multiple=row_multiple(self.device))
        self._numerator = PolicyNumerator(spec)
        self.updater = Updater(self.model, train, spec.total_steps, placement)

    # ------------------------------------------------------------------ passes

    def log_probs(self, batches: Sequence[MicroBatch], model: Scored = "policy") -> list[Float32Array]:
        """Of the chosen tokens, one array [N] per micro-batch that is not blank, no gradient."""
        if model == "policy":
            return self._placement.scores(self._policy, lambda rows: self._score(rows)[0], batches)
        assert self.reference is not None
        return self._placement.scores(self.reference.placed, self.reference.score, batches)

    def backward(self, batches: Sequence[MicroBatch], statistics: StepStatistics, totals: StepTotals) -> None:
        """Add the gradient of the micro-batches' numerators to the parameters, and their sums to `totals`."""
        reference = self.reference if self._reference_is_due(batches) else None
        if not self.dp_group.is_mp_src_rank:
            totals = StepTotals()
        for batch in self._placement.runs(batches):
            ref_log_probs = None if reference is None else reference.score(batch.rows)
            log_probs, entropy = self._score(batch.rows, entropy=self._numerator.entropy(statistics))
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

    def device_tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """Weights and optimizer states of all models; gradients are dropped with `clear`."""
        modules, optimizers = [self.model], [self.updater.optimizer]
        if self.reference is not None:
            modules.append(self.reference.placed.model)
        if self.critic is not None:
            modules.append(self.critic.model)
            optimizers.append(self.critic.updater.optimizer)
        kept = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
        states = [state for optimizer in optimizers for state in optimizer.state.values()]
        return kept + [value for state in states for value in state.values() if torch.is_tensor(value)], []

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
