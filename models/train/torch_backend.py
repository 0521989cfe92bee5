"""Training one Hugging Face causal language model in this process, on a CPU or one GPU.

Invariants:
- the loss, the gradient and the new weights do not depend on how sequences were split into micro-batches, packed,
  padded, or in which order they arrived (beyond rounding): gradients of numerators are summed, and divided by the
  denominator of the whole step in `step`;
- with several optimizer steps per batch, the anchor of the ratio is that of the weights at the batch's start, so no
  step is made before the batch is complete;
- a step without a trainable token, or with a gradient that is not finite, changes nothing and is counted.

Not thread-safe: one thread at a time may call it. Constructing is cheap; `setup` loads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from configs.schema.algorithm import AlgorithmConfig
from configs.schema.correction import CorrectionConfig
from configs.schema.train import TrainConfig
from models.algorithms.aggregation import Aggregation, StepSize, denominator, metric_mode
from models.algorithms.modes import Correction, resolve_correction
from models.train.batch import Rollout, RolloutKey, check_sequence, partition, rollouts_of, total_size
from models.train.errors import BackendMisuse
from models.train.interface import TrainSequence
from models.train.loading import (
    LoadedModel,
    autocast_dtype,
    enable_checkpointing,
    load_model,
    load_weights,
    pick_device,
)
from models.train.micro_batch import MicroBatchPass, StepTotals
from models.train.packing import plan
from models.train.pending import Pending
from models.train.schedule import check_schedule
from models.train.scoring import Scorer
from models.train.state_files import MODEL_DIR, TrainerState, load_state, save_state
from models.train.updates import Updater, UpdateResult
from models.train.weights_io import hf_tensors

RNG_CPU: Final = "rng/cpu"
RNG_CUDA: Final = "rng/cuda"


class TorchBackend:
    """`TrainBackend` on PyTorch and transformers."""

    def __init__(
        self,
        train: TrainConfig,
        algorithm: AlgorithmConfig,
        *,
        temperature: float = 1.0,
        max_response_len: int = 512,
        seed: int = 42,
        total_steps: int | None = None,
        correction: Correction | None = None,
    ) -> None:
        """`temperature`: of the rollouts; `max_response_len`: tokens, the constant of `constant` aggregation;
        `total_steps`: optimizer steps of the run, needed by a decaying learning rate; `correction`: the resolved policy
        mode (default: resolved as if samples may be stale). Raises `TrainConfigInvalid`.
        """
        check_schedule(train, total_steps)
        self._train = train
        self._algorithm = algorithm
        self._sft = train.loss_type == "sft_loss"
        self._temperature = 1.0 if self._sft else temperature
        self._max_response_len = max_response_len
        self._seed = seed
        self._total_steps = total_steps
        self._correction = resolve_correction(CorrectionConfig(), max_staleness=1) if correction is None else correction
        self._aggregation: Aggregation = "token_mean" if self._sft else algorithm.loss_aggregation
        self._use_reference = not self._sft and algorithm.use_kl_loss and algorithm.kl_loss_coef > 0

        self._steps_per_batch = 1
        self._steps = 0
        self._skipped = 0
        self._empty = 0
        self._begin()

    # ------------------------------------------------------------------ life cycle

    def setup(self) -> None:
        """Load the policy, the reference if the KL term needs one, and build the optimizer.

        Raises `CheckpointUnavailable`, `UnsupportedModel` or `TrainConfigInvalid`.
        """
        self._device = pick_device(self._train.train_device)
        self._precision = autocast_dtype(self._train.train_dtype, self._device)
        self._loaded = load_model(
            self._train.hf_checkpoint, "hf_checkpoint", self._train, self._device, seed=self._seed
        )
        self._model: Any = self._loaded.model
        self._model.train()
        if self._train.gradient_checkpointing:
            enable_checkpointing(self._model)
        packing = self._loaded.packing
        score = self._scorer(self._loaded)
        score_reference: Scorer | None = None
        if self._use_reference:
            source = self._train.ref_load or self._train.hf_checkpoint
            key = "ref_load" if self._train.ref_load else "hf_checkpoint"
            reference = load_model(source, key, self._train, self._device, seed=self._seed)
            reference.model.eval().requires_grad_(False)
            score_reference = self._scorer(reference)
            packing = packing.both(reference.packing)
        self._packing = dataclasses.replace(packing, max_tokens=self._train.max_tokens_per_gpu)
        self._pass = MicroBatchPass(
            score,
            score_reference,
            self._algorithm,
            self._correction,
            device=self._device,
            sft=self._sft,
        )
        self._updater = Updater(self._model, self._train, self._total_steps)

    def _scorer(self, loaded: LoadedModel) -> Scorer:
        return Scorer(
            loaded.model,
            device=self._device,
            autocast_dtype=self._precision,
            temperature=self._temperature,
            chunk_tokens=self._train.logprob_chunk_tokens,
        )

    # ------------------------------------------------------------------ scoring

    def logprobs(self, sequences: Sequence[TrainSequence]) -> list[npt.NDArray[np.float32]]:
        """Log-probs [R] of each sequence's response tokens under the current weights, temperature applied."""
        out = [np.zeros(sequence.response_length, dtype=np.float32) for sequence in sequences]
        for sequence in sequences:
            check_sequence(sequence, self._loaded.vocab_size)
        filled = [index for index, sequence in enumerate(sequences) if sequence.response_length > 0]
        tokens = [sequences[index].tokens for index in filled]
        chosen = [
            np.arange(len(sequences[index].tokens) - sequences[index].response_length, len(sequences[index].tokens))
            for index in filled
        ]
        prompts = [int(picks[0]) for picks in chosen]
        for layout in plan(tokens, prompts, self._packing):
            for item, values in self._pass.log_probs(layout, tokens, chosen):
                out[filled[item]] = values
        return out

    # ------------------------------------------------------------------ the batch

    def begin_batch(self, *, rollouts: int, steps: int, version: int = 0) -> None:
        """Announce a rollout batch. `rollouts` is a hint; what arrives counts. `steps`: calls of `step` it gets.

        Raises `BackendMisuse` if the batch before is not finished.
        """
        if rollouts < 0 or steps < 1:
            raise BackendMisuse(
                f"begin_batch(rollouts={rollouts}, steps={steps}): a batch has no negative rollouts and at least 1 step"
            )
        if self._seen or self._parts:
            raise BackendMisuse(
                f"begin_batch while {len(self._seen)} rollouts wait for step() and {len(self._parts)} steps are due; "
                "finish the batch before with step()"
            )
        self._begin()
        self._steps_per_batch = steps

    def _begin(self) -> None:
        self._seen: set[RolloutKey] = set()
        self._rollouts: list[Rollout] = []  # of a batch with several steps
        self._unanchored = Pending()  # of them, those that still lack an anchor
        self._parts: list[list[Rollout]] = []  # steps still due, once the batch is cut
        self._begin_step()

    def _begin_step(self) -> None:
        self._pending = Pending()
        self._size = StepSize()
        self._totals = StepTotals()

    def accumulate(self, sequences: Sequence[TrainSequence]) -> None:
        """Take sequences into the running batch; work is done at once whenever the token budget is full.

        All sequences of a rollout come in the same call. Raises `InvalidSequence`, `BackendMisuse`.
        """
        if self._parts:
            raise BackendMisuse(
                f"accumulate between the steps of a batch: its anchor belongs to the weights before its first step; "
                f"call step() {len(self._parts)} more times first"
            )
        rollouts = rollouts_of(sequences, self._aggregation, self._loaded.vocab_size)
        for rollout in rollouts:
            if rollout.key in self._seen:
                raise BackendMisuse(
                    f"rollout {rollout.key[1]} of group {rollout.key[0]} was handed over twice in one batch; "
                    "all sequences of a rollout belong in one call of accumulate"
                )
        self._seen.update(rollout.key for rollout in rollouts)
        examples = [example for rollout in rollouts for example in rollout.examples]
        if self._steps_per_batch == 1:
            self._size += total_size(rollouts)
            self._pending.extend(examples)
        else:
            self._rollouts.extend(rollouts)
            self._unanchored.extend(examples)
        self._work(everything=False)

    def flush(self) -> None:
        """Do all work that is possible now, even in small micro-batches: for a caller who would be idle."""
        self._work(everything=True)

    def _work(self, *, everything: bool) -> None:
        if self._steps_per_batch == 1 or self._parts:
            for layout, examples in self._pending.take(self._packing, everything=everything):
                self._pass.backward(layout, examples, self._totals)
        else:
            for layout, examples in self._unanchored.take(self._packing, everything=everything):
                self._pass.anchor(layout, examples)

    # ------------------------------------------------------------------ the step

    def step(self) -> dict[str, float]:
        """Finish the running optimizer step; return its metrics."""
        if self._steps_per_batch > 1:
            self._next_part()
        self._work(everything=True)
        size = self._size
        divisor = denominator(self._aggregation, size, max_response_len=self._max_response_len)
        if size.tokens == 0:
            result = self._updater.refuse()
            self._empty += 1
        else:
            result = self._updater.apply(divisor)
            self._skipped += not result.applied
        self._steps += 1
        mean_divisor = denominator(metric_mode(self._aggregation), size, max_response_len=self._max_response_len)
        metrics = self._totals.result(mean_divisor, loss_denominator=divisor)
        metrics.update(self._step_metrics(size, result))
        self._parts = self._parts[1:]
        if self._parts:
            self._begin_step()
        else:
            self._begin()
        return metrics

    def _next_part(self) -> None:
        """Make the next part of the batch the running step; the first time, cut the batch."""
        if not self._parts:
            self._work(everything=True)  # the rest of the anchors, before the first step changes the weights
            self._parts = partition(self._rollouts, self._steps_per_batch)
        self._pending.extend(example for rollout in self._parts[0] for example in rollout.examples)
        self._size = total_size(self._parts[0])

    def _step_metrics(self, size: StepSize, result: UpdateResult) -> dict[str, float]:
        return {
            "train/grad_norm": result.grad_norm,
            "train/lr": result.lr,
            "train/skipped_steps": float(self._skipped),
            "train/empty_steps": float(self._empty),
            "train/optimizer_steps": float(self._steps),
            "train/rollouts": float(size.rollouts),
            "train/sequences": float(size.sequences),
            "train/trained_tokens": float(size.tokens),
        }

    def discard(self) -> None:
        """Forget the rollouts and gradients of the running batch; weights and optimizer stay as they are."""
        self._updater.clear()
        self._begin()

    # ------------------------------------------------------------------ weights and files

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Current weights under Hugging Face names, in a fixed order, in the precision of the forward pass.

        The tensors are views of the live weights where no cast is needed: use them before the next `step`.
        """
        return hf_tensors(self._model, self._precision)

    def save(self, directory: Path) -> None:
        """Write the model to `directory/hf` and the trainer's state beside it, synchronised to disk.

        Raises `BackendMisuse` between the steps of a batch: gradients and anchors are not part of a checkpoint.
        """
        self._require_rest("save")
        tensors = self._updater.state_tensors()
        tensors[RNG_CPU] = torch.get_rng_state()
        if self._device.type == "cuda":
            tensors[RNG_CUDA] = torch.cuda.get_rng_state(self._device)
        state = TrainerState(
            updates=self._updater.updates, steps=self._steps, skipped_steps=self._skipped, empty_steps=self._empty
        )
        save_state(directory, self._model, tensors, state, self._train.hf_checkpoint)

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote; the next steps are those of the run that was not interrupted.

        Raises `TrainStateUnreadable`.
        """
        self._require_rest("load")
        tensors, state = load_state(directory)
        rng = tensors.pop(RNG_CPU)
        rng_cuda = tensors.pop(RNG_CUDA, None)
        self._updater.check_state_tensors(tensors)
        load_weights(self._model, directory / MODEL_DIR)
        self._updater.load_state_tensors(tensors)
        torch.set_rng_state(rng)
        if rng_cuda is not None and self._device.type == "cuda":
            torch.cuda.set_rng_state(rng_cuda, self._device)
        self._updater.updates = state.updates
        self._steps, self._skipped, self._empty = state.steps, state.skipped_steps, state.empty_steps

    def _require_rest(self, action: str) -> None:
        if self._seen or self._parts:
            raise BackendMisuse(
                f"{action} while {len(self._seen)} rollouts are being trained: accumulated gradients and anchors are "
                "not part of a checkpoint; finish the batch with step() first"
            )
