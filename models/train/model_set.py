"""The framework seam: what a trainer asks of the models it trains, whatever holds their tensors.

Implementations: `huggingface` (every process holds all, or, with `fsdp`, its shards) and `megatron` (tensor, pipeline,
expert parallel). The trainer above decides what a step is; these compute it.

Invariants:
- every method is collective over the dp_group, called with the same arguments but for the micro-batches, which are this
  process's share; all processes get equally many of them;
- what `backward` adds to gradients and totals is a numerator; `update` divides by the denominator, once;
- an update whose gradient is not finite changes nothing; the trainer refuses one whose loss is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch

from models.algorithms.tokens import StepStatistics
from models.train.dp_group import DpGroup, Float32Array
from models.train.spec import UpdateResult, Updates
from models.train.step.critic import CriticModel
from models.train.step.micro_batch_loss import StepTotals
from models.train.step.micro_batches import MicroBatch
from models.train.step.packing import Packing

Scored = Literal["policy", "reference"]


@dataclass
class Counters:
    """What a run has done so far; part of its checkpoints."""

    batches: int = 0
    steps: int = 0
    skipped_steps: int = 0  # loss or gradient was not finite, of the policy or of the critic
    empty_steps: int = 0  # nothing to learn from: no trainable token, or all rejected


class Reference(Protocol):
    """What the policy is compared with."""

    def renew(self) -> None:
        """Become the policy as it is now, unless it never does."""


class ModelSet(Protocol):
    """The policy, and the reference and the critic if there are any."""

    dp_group: DpGroup
    device: torch.device
    updater: Updates  # of the policy
    critic: CriticModel | None
    reference: Reference | None
    vocab_size: int  # ids that all models know
    packing: Packing  # how rows are made for all models, budget included
    reference_apart: bool
    """Whether scoring under the reference means changing over to it, which is done once per batch, not per row."""
    pass_micro_batches: int
    """Micro-batches that a pass takes at least, unless no more come: stages of a pipeline idle through its ends."""

    @property
    def has_reference(self) -> bool:
        return self.reference is not None

    def log_probs(self, batches: Sequence[MicroBatch], model: Scored = "policy") -> list[Float32Array]:
        """Of the chosen tokens, one array [N] per micro-batch, no gradient; empty without `is_mp_src_rank`."""

    def backward(self, batches: Sequence[MicroBatch], statistics: StepStatistics, totals: StepTotals) -> None:
        """Add the gradient of the micro-batches' numerators to the parameters, and their sums to `totals`.

        Blank micro-batches run and add nothing. Only an `is_mp_src_rank` process adds to `totals`.
        """

    def update(self, denominator: float, *, lr_scale: float = 1.0) -> UpdateResult:
        """Divide the gradients, summed over data-parallel ranks, by `denominator`, clip, update; or refuse.

        Clears the gradients.
        """
        return self.updater.update(denominator, lr_scale=lr_scale)

    def refuse(self) -> UpdateResult:
        """Make no update: there is nothing to learn from. Clears the gradients."""
        return self.updater.refuse()

    def clear(self) -> None:
        """Drop all gradients of the policy."""
        self.updater.clear()

    def renew_reference(self) -> None:
        """Let the reference become the policy as it is now."""
        if self.reference is not None:
            self.reference.renew()

    def device_tensors(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What takes memory of the device between batches: whose contents count, and what is cleared then."""

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Current weights under Hugging Face names, whole, in a fixed order, in the precision of the forward pass.

        Collective: every process runs it to its end. Only the first of all processes is given tensors with contents.
        """

    def save(self, directory: Path, counters: Counters) -> None:
        """Write models and optimizer state, synchronised to disk: `directory/hf` holds the policy.

        Models that save in the background return as soon as the state is copied.
        """

    def finish_save(self) -> None:
        """Wait until the last save is whole and on disk. Raises what it met."""

    def load(self, directory: Path) -> Counters:
        """Restore what `save` wrote. Raises `TrainStateUnreadable`, then nothing is changed."""
