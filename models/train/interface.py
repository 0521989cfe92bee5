"""The trainer seam: what the train stage asks of a backend.

Invariants:
- `accumulate` may run forward and backward at once or later; only `step` promises that every sequence handed over has
  entered the gradient, with the denominators of the whole step (never of a micro-batch).
- Sequences handed over after `step` belong to the next step.
- A step whose gradient is not finite changes nothing and says so in `skipped_steps`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

    from models.weights.layout import StoredTensor
    from models.weights.shared_memory_reader import SlotManifest
    from models.weights.shared_memory_writer import SlotWriter


@dataclass(frozen=True)
class TrainSequence:
    """One sequence of a rollout as the trainer sees it: T tokens, the prompt included, and as much in each array."""

    group_id: int
    rollout_id: int  # the sequences of one rollout share it
    tokens: npt.NDArray[np.int32]  # [T]
    prompt_length: int  # of the tokens that several rollouts begin with; none of them is trained
    loss_mask: npt.NDArray[np.uint8]  # [T]
    rollout_log_probs: npt.NDArray[np.float32]  # [T], log mu
    advantages: npt.NDArray[np.float32]  # [T]
    versions: npt.NDArray[np.int32]  # [T], weights version that made each token; -1: none
    reward: float = 0.0  # of its rollout: for estimators that spread it over tokens (ppo, reinforce_plus_plus)
    truncated: bool = False  # the length limit ended it
    teacher_log_probs: npt.NDArray[np.float32] | None = None  # [T], on-policy distillation
    prefix: tuple[int, int] | None = None  # (place, n): its first n tokens are those of that sequence of its rollout
    token_rewards: npt.NDArray[np.float32] | None = None  # [T], rewards of turns, those in its prefix included
    turn_total: float = 0.0  # sum of the rewards of turns of its rollout, each once
    temperature: float | None = None  # at which its tokens were drawn; None: as configured

    @property
    def response_length(self) -> int:
        """Tokens after the prompt."""
        return len(self.tokens) - self.prompt_length


class WeightExporter(ABC):
    """A backend whose weights are in this process: `write_slot` for what it exports."""

    _slots: SlotWriter | None = None

    @abstractmethod
    def export_weights(self) -> Iterator[tuple[str, torch.Tensor | StoredTensor]]:
        """Current weights under Hugging Face names, in a fixed order. Collective where they are sharded."""

    def write_slot(self, directory: Path, source: Path, version: int, run_generation: int) -> SlotManifest:
        """See `TrainBackend`. The export runs to its end in any case: other ranks wait inside its collectives."""
        tensors = self.export_weights()
        try:
            if self._slots is None:
                from models.weights.shared_memory_writer import SlotWriter

                self._slots = SlotWriter(directory, source, leased=True)
            return self._slots.write(version, run_generation, tensors)
        finally:
            for _ in tensors:
                pass


class TrainBackend(Protocol):
    """One policy in training."""

    def setup(self) -> None:
        """Load the model and build the optimizer."""

    def logprobs(self, sequences: Sequence[TrainSequence]) -> list[npt.NDArray[np.float32]]:
        """Log-probs [T - prompt_length] of the tokens after each prompt, current weights, temperature applied."""

    def begin_batch(self, *, rollouts: int, steps: int, version: int = 0, lr_scale: float = 1.0) -> None:
        """Announce a rollout batch: its number of rollouts and of optimizer steps, and the version of the weights.

        The staleness of a token is `version` minus the token's own. `lr_scale`: factor of the batch's learning rate.
        """

    def accumulate(self, sequences: Sequence[TrainSequence]) -> None:
        """Take sequences into the running optimizer step."""

    def flush(self) -> None:
        """Do what work is possible now, even in small micro-batches: for a caller that would be idle."""

    def step(self) -> dict[str, float]:
        """Finish the running optimizer step; return metrics under the names of docs/metrics.md."""

    def discard(self) -> None:
        """Forget what was accumulated for the running batch; the weights stay as they are."""

    def write_slot(self, directory: Path, source: Path, version: int, run_generation: int) -> SlotManifest:
        """Write the current weights, as this version, into the older of two slots in `directory`.

        `directory`: leased by the caller, the same at each call. `source`: the Hugging Face checkpoint whose layout and
        types the slots have. Raises WeightsError.
        """

    def save(self, directory: Path) -> None:
        """Write model (Hugging Face format, in `directory/hf`), optimizer, scheduler and RNG state.

        With `--async-save` some backends return as soon as the state is copied; `finish_save` then waits for the disk.
        """

    def finish_save(self) -> None:
        """Wait until the last save is whole and on disk."""

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote, exactly."""

    def close(self) -> None:
        """End what the backend started. Any thread may call it at any time, also while another waits in a call."""
