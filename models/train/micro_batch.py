"""One micro-batch through the model: anchors without gradient, or forward and backward of its numerator.

Invariants: nothing is divided by a count of the micro-batch; what is added to the gradients and to the totals is a
numerator, so that any split of a step into micro-batches gives the same sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from configs.schema.algorithm import AlgorithmConfig
from models.algorithms.losses import policy_loss_of
from models.algorithms.metrics import MetricTotals
from models.algorithms.modes import Correction
from models.algorithms.objective import Objective, policy_objective, sft_objective
from models.algorithms.tokens import PolicyTokens
from models.train.batch import Example, Float32Array
from models.train.errors import BackendMisuse
from models.train.packing import Layout
from models.train.rows import PackedRows, pack_rows
from models.train.scoring import Scorer


@dataclass
class StepTotals:
    """Sums over the micro-batches of one optimizer step."""

    metrics: MetricTotals = field(default_factory=MetricTotals)
    micro_batches: int = 0
    padded_tokens: int = 0
    used_tokens: int = 0  # of them, not padding
    sequence_tokens: int = 0  # what the sequences would need without sharing prompts

    def result(self, denominator: float, *, loss_denominator: float) -> dict[str, float]:
        """Metrics of the step, for its denominators."""
        out = self.metrics.result(denominator, loss_denominator=loss_denominator)
        out["train/micro_batches"] = float(self.micro_batches)
        out["train/padding_frac"] = 1.0 - self.used_tokens / self.padded_tokens if self.padded_tokens else 0.0
        out["train/shared_prompt_frac"] = 1.0 - self.used_tokens / self.sequence_tokens if self.sequence_tokens else 0.0
        return out


class MicroBatchPass:
    """Runs the policy (and the reference, if there is one) over packed rows."""

    def __init__(
        self,
        score: Scorer,
        score_reference: Scorer | None,
        algorithm: AlgorithmConfig,
        correction: Correction,
        *,
        device: torch.device,
        sft: bool,
    ) -> None:
        self._score = score
        self._score_reference = score_reference
        self._algorithm = algorithm
        self._correction = correction
        self._policy_loss = policy_loss_of("ppo" if algorithm.policy_loss == "auto" else algorithm.policy_loss)
        self._device = device
        self._sft = sft
        # A graph through the whole vocabulary is paid for only if the bonus is on.
        self._entropy = "graph" if algorithm.entropy_coef > 0 and not sft else "value"

    def log_probs(
        self, layout: Layout, tokens: Sequence[npt.NDArray[np.int32]], chosen: Sequence[npt.NDArray[np.int64]]
    ) -> Iterator[tuple[int, Float32Array]]:
        """(index, log-probs of its chosen tokens) of each sequence of the layout, under the current weights."""
        rows = pack_rows(layout, tokens, chosen)
        return zip(layout.items, self._split(self._score, rows, [len(chosen[i]) for i in layout.items]), strict=True)

    def anchor(self, layout: Layout, examples: Sequence[Example]) -> None:
        """Fill in log-probs under the current weights (the anchor) and under the reference."""
        members = [examples[item] for item in layout.items]
        counts = [len(example.chosen) for example in members]
        rows = _packed(layout, examples)
        if not self._sft and self._correction.mode != "bypass":
            for example, values in zip(members, self._split(self._score, rows, counts), strict=True):
                example.old_log_probs = values
        if self._score_reference is not None:
            for example, values in zip(members, self._split(self._score_reference, rows, counts), strict=True):
                example.ref_log_probs = values

    def backward(self, layout: Layout, examples: Sequence[Example], totals: StepTotals) -> None:
        """Add the gradient of the micro-batch's numerator to the parameters, and its sums to `totals`."""
        members = [examples[item] for item in layout.items]
        counts = np.array([len(example.chosen) for example in members])
        rows = _packed(layout, examples)
        log_probs, entropy = self._score(rows, entropy=self._entropy)
        objective = self._objective(rows, members, counts, log_probs, entropy)
        coefficient = np.array([example.coefficient for example in members], dtype=np.float32)
        weights = torch.from_numpy(np.repeat(coefficient, counts)).to(self._device)
        torch.dot(objective.loss, weights).backward()
        totals.metrics.add(objective.metrics, weights)
        totals.micro_batches += 1
        totals.padded_tokens += layout.padded_tokens
        totals.used_tokens += layout.used_tokens
        totals.sequence_tokens += sum(example.input_length for example in members)

    def _objective(
        self,
        rows: PackedRows,
        members: Sequence[Example],
        counts: npt.NDArray[np.int64],
        log_probs: torch.Tensor,
        entropy: torch.Tensor | None,
    ) -> Objective:
        rollout_log_probs = self._column([example.rollout_log_probs for example in members])
        if self._correction.mode == "bypass":
            anchor = rollout_log_probs
        elif members[0].old_log_probs is None:
            anchor = log_probs.detach()  # one step per batch: the weights of its start are the current ones
        else:
            anchor = self._column([example.old_log_probs for example in members])
        ref_log_probs = None
        if self._score_reference is not None and members[0].ref_log_probs is None:
            with torch.no_grad():
                ref_log_probs, _ = self._score_reference(rows)
        elif self._score_reference is not None:
            ref_log_probs = self._column([example.ref_log_probs for example in members])
        tokens = PolicyTokens(
            log_probs=log_probs,
            old_log_probs=anchor,
            rollout_log_probs=rollout_log_probs,
            advantages=self._column([example.advantages for example in members]),
            mask=torch.ones(len(log_probs), dtype=torch.bool, device=self._device),
            sequence=torch.from_numpy(np.repeat(np.arange(len(members)), counts)).to(self._device),
            n_sequences=len(members),
            ref_log_probs=ref_log_probs,
            entropy=entropy,
        )
        if self._sft:
            return sft_objective(tokens)
        return policy_objective(tokens, self._algorithm, self._correction, self._policy_loss)

    def _split(self, scorer: Scorer, rows: PackedRows, counts: Sequence[int]) -> list[Float32Array]:
        with torch.no_grad():
            values, _ = scorer(rows)
        return list(np.split(values.cpu().numpy(), np.cumsum(counts)[:-1]))

    def _column(self, parts: Sequence[Float32Array | None]) -> torch.Tensor:
        """One flat fp32 tensor [N] on the device from the values of each example."""
        present = [part for part in parts if part is not None]
        if len(present) != len(parts):
            raise BackendMisuse("some examples of a batch have anchors and others not; begin a new batch")
        return torch.from_numpy(np.concatenate(present).astype(np.float32, copy=False)).to(self._device)


def _packed(layout: Layout, examples: Sequence[Example]) -> PackedRows:
    return pack_rows(layout, [example.tokens for example in examples], [example.chosen for example in examples])
