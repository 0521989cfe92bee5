"""Models in shards over the processes of torch.distributed's default group: FSDP2, HSDP, DDP; on GPUs and CPUs.

Invariants:
- every process runs every micro-batch that it is given, blank ones too: a forward or backward pass gathers parameters
  and adds gradients over all processes;
- gradients are sums over all data-parallel ranks when `update` is called; it divides once;
- loading checks everything that it can before it changes anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.algorithms.tokens import StepStatistics
from models.train.dp_group import DpGroup, Float32Array
from models.train.errors import BackendMisuse
from models.train.fsdp.checkpoint import Checkpoints
from models.train.fsdp.context import ContextParallel
from models.train.fsdp.critic import ShardedCritic
from models.train.fsdp.gathering import gathered
from models.train.fsdp.loading import load_sharded
from models.train.fsdp.lora import adapters_of
from models.train.fsdp.mesh import Mesh, ensure_group, own_device
from models.train.fsdp.reference import AdapterReference, ShardedReference, model_tensors, reference_of
from models.train.fsdp.scoring import ShardedScorer
from models.train.fsdp.updates import ShardedUpdater
from models.train.fsdp.wrap import Sharding, reshard
from models.train.huggingface.loading import autocast_dtype, pick_device
from models.train.huggingface.optimizer import UpdateResult
from models.train.model_set import Counters, Scored
from models.train.packing.balance import MicroBatch
from models.train.packing.packing import with_budget
from models.train.spec import TrainSpec
from models.train.step.batch_needs import uses_critic, uses_reference
from models.train.step.micro_batch_loss import PolicyNumerator
from models.train.step.totals import StepTotals


class FsdpModels:
    """`ModelSet` in shards. Constructing loads all models and builds their optimizers; it is collective."""

    reference_apart = False

    def __init__(self, spec: TrainSpec, *, async_save: bool = False) -> None:
        """Without a default group, this process trains alone.

        `async_save`: `save` returns as soon as the state is copied; `finish_save` waits for the disk.

        Raises `CheckpointUnavailable`, `UnsupportedModel` or `TrainConfigInvalid`.
        """
        ensure_group()
        train, algorithm = spec.train, spec.algorithm
        self._spec = spec
        self.device = own_device(pick_device(train.train_device))
        self.precision = autocast_dtype(train.train_dtype, self.device)
        self._mesh = Mesh(spec.fsdp, spec.parallel, self.device)
        sharding = Sharding(spec.fsdp, self._mesh, self.precision)
        context = ContextParallel(self._mesh.context)
        self.adapters = adapters_of(spec.lora, train.hf_checkpoint)
        self._policy = load_sharded(
            train.hf_checkpoint,
            "hf_checkpoint",
            train,
            sharding,
            lambda model: ShardedScorer(model, spec, sharding, context),
            seed=spec.seed,
            prepare=self.adapters.inject if self.adapters else None,
        )
        self.model: Any = self._policy.model
        self._score: Any = self._policy.root
        packing, vocab_size = self._policy.packing, self._policy.vocab_size
        self.reference: ShardedReference | AdapterReference | None = None
        if uses_reference(algorithm, train.loss_type):
            self.reference = reference_of(spec, sharding, context, self._policy, self.adapters)
            packing = packing.both(self.reference.packing)
            vocab_size = min(vocab_size, self.reference.vocab_size)
        self.critic: ShardedCritic | None = None
        if uses_critic(algorithm, train.loss_type):
            self.critic = ShardedCritic(spec, sharding, context)
            packing, vocab_size = packing.both(self.critic.packing), min(vocab_size, self.critic.vocab_size)
        context.check(packing)
        self.vocab_size = vocab_size  # that all models know
        self.packing = with_budget(packing, train, spec.parallel)
        self._numerator = PolicyNumerator(algorithm, spec.correction, sft=spec.supervised, group_loss=spec.group_loss)
        self.updater = ShardedUpdater(self.model, train, spec.total_steps, self._mesh)
        self._checkpoints = Checkpoints(self._mesh, asynchronous=async_save)

    @property
    def dp_group(self) -> DpGroup:
        """The processes, as the trainer sees them."""
        return self._mesh.dp_group

    @property
    def has_reference(self) -> bool:
        return self.reference is not None

    # ------------------------------------------------------------------ passes

    def log_probs(self, batches: Sequence[MicroBatch], model: Scored = "policy") -> list[Float32Array]:
        """Of the chosen tokens, one array [N] per micro-batch that is not blank, no gradient.

        Raises `BackendMisuse` without the model asked for.
        """
        if model == "reference" and self.reference is None:
            raise BackendMisuse("there is no reference; set --use-kl-loss or --kl-coef")
        score = self._of_policy if model == "policy" else self._of_reference
        found = [(batch, score(batch)) for batch in batches]
        self._give_back()
        return [one.cpu().numpy() for batch, one in found if not batch.blank and self.dp_group.is_mp_src_rank]

    def backward(self, batches: Sequence[MicroBatch], statistics: StepStatistics, totals: StepTotals) -> None:
        """Add the gradient of the micro-batches' numerators to the parameters, and their sums to `totals`."""
        scored = self._reference_is_due(batches)
        if not self.dp_group.is_mp_src_rank:
            totals = StepTotals()
        for batch in batches:
            ref_log_probs = self._of_reference(batch) if scored else None
            log_probs, entropy = self._score(batch.rows, entropy=self._numerator.entropy)
            if batch.blank:
                log_probs.backward(torch.zeros_like(log_probs))  # the others wait for this process's part of the sums
                continue
            self._numerator(batch.members, log_probs, entropy, statistics, totals, ref_log_probs).backward()
        self._give_back()

    def _reference_is_due(self, batches: Sequence[MicroBatch]) -> bool:
        """Whether any process has members that the reference has not scored: then all run it."""
        if self.reference is None:
            return False
        due = any(member.ref_log_probs is None for batch in batches for member in batch.members)
        return self.dp_group.merge({"due": float(due)}, largest=True)["due"] > 0

    def _of_policy(self, batch: MicroBatch) -> Tensor:
        with torch.no_grad():
            found: Tensor = self._score(batch.rows)[0]
        return found

    def _of_reference(self, batch: MicroBatch) -> Tensor:
        assert self.reference is not None
        with torch.no_grad(), self.reference.active():
            found: Tensor = self.reference.score(batch.rows)[0]
        return found

    def _give_back(self) -> None:
        """What passes without a gradient have gathered: no copy may be older than the shards."""
        reshard(self._score)
        if self.reference is not None:
            reshard(self.reference.score)

    # ------------------------------------------------------------------ the update

    def update(self, denominator: float, *, lr_scale: float = 1.0) -> UpdateResult:
        """Divide the sums, clip, update; or refuse. Clears the gradients."""
        return self.updater.apply(denominator, lr_scale=lr_scale)

    def refuse(self) -> UpdateResult:
        """Make no update. Clears the gradients."""
        return self.updater.refuse()

    def clear(self) -> None:
        """Drop all gradients of the policy."""
        self.updater.clear()

    def renew_reference(self) -> None:
        """Let the reference become the policy as it is now."""
        if self.reference is not None and self.reference.renewed:
            self.reference.renew()

    # ------------------------------------------------------------------ weights

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Current weights, whole and merged with adapters, one decoder layer at a time; in the first process only."""
        model, device, adapters = self.model, self.device, self.adapters
        common = {"first": self._mesh.first, "device": device, "dtype": self.precision, "sort": self._policy.converts}
        if adapters is None:
            return gathered(model, **common)
        held = adapters.merged_names(model)
        return gathered(
            model, **common, names=list(held), tensor_of=lambda name: adapters.merged(model, held[name], device)
        )

    # ------------------------------------------------------------------ files

    def save(self, directory: Path, counters: Counters) -> None:
        """Write the policy to `directory/hf`, adapters to `directory/adapter`, and all shards beside them.

        Synchronised to disk, unless the models were made with `async_save`: then `finish_save` waits for that.
        """
        gathered_adapter = self.adapters.tensors(self.model, self.device) if self.adapters is not None else ()
        adapter = {name: tensor for name, tensor in gathered_adapter if self._mesh.first}  # the first process writes it
        self._checkpoints.save(
            directory,
            self._parts(),
            counters,
            weights=self.export(),
            source=self._spec.train.hf_checkpoint,
            finish=lambda: self._write_adapter(directory, adapter),
        )

    def _write_adapter(self, directory: Path, tensors: dict[str, Tensor]) -> None:
        if self.adapters is not None:
            self.adapters.write(directory / "adapter", tensors)

    def finish_save(self) -> None:
        """Wait until what `save` wrote is on disk in all processes. Raises what went wrong."""
        self._checkpoints.finish()

    def load(self, directory: Path) -> Counters:
        """Restore what `save` wrote, by however many processes.

        Raises `TrainStateUnreadable`, then nothing is changed.
        """
        self._checkpoints.finish()
        return self._checkpoints.load(directory, self._parts())

    def _parts(self) -> dict[str, tuple[dict[str, Tensor], ShardedUpdater | None]]:
        """What is saved: tensors by name, and the optimizer that belongs to them."""
        trained = {name for name, _ in self.updater.named_parameters}
        tensors = model_tensors(self.model)
        if self.adapters is not None:  # the rest is in the checkpoint that training started from
            tensors = {name: tensor for name, tensor in tensors.items() if name in trained}
        parts: dict[str, tuple[dict[str, Tensor], ShardedUpdater | None]] = {"policy": (tensors, self.updater)}
        if self.critic is not None:
            parts["critic"] = (model_tensors(self.critic.model), self.critic.updater)
        if self.reference is not None and self.reference.renewed:
            parts["reference"] = (self.reference.tensors(), None)
        return parts
