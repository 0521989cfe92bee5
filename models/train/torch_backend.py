"""Training one Hugging Face causal language model in this process, on a CPU or one GPU.

Invariants:
- the loss, the gradient and the new weights do not depend on how sequences were split into micro-batches, packed,
  padded, or in which order they arrived (beyond rounding): gradients of numerators are summed, and divided by the
  denominator of the whole step in `step`;
- where something of the whole batch must be known before its first backward pass (`needs`), no step is made before the
  batch is complete, and anchors are those of the weights at its start;
- several processes may train one policy together (`reduce`): every sum over a step is over all of them;
- a step without a trainable token, or with a gradient that is not finite, changes nothing and is counted.

Not thread-safe: one thread at a time may call it. Constructing is cheap; `setup` loads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from configs.schema.algorithm import AlgorithmConfig
from configs.schema.correction import CorrectionConfig
from configs.schema.critic import CriticConfig
from configs.schema.distill import DistillConfig
from configs.schema.train import TrainConfig
from models.algorithms.aggregation import StepSize, denominator, metric_mode
from models.algorithms.group_loss import GroupLossFunction, group_loss_of
from models.algorithms.modes import Correction, resolve_correction
from models.train.batch import Intake, check_sequence, rollouts_of
from models.train.errors import BackendMisuse, TrainConfigInvalid
from models.train.interface import TrainSequence
from models.train.model_set import Counters, ModelSet
from models.train.needs import batch_needs, critic_only, opd_coefficient
from models.train.packing import plan
from models.train.reduce import LocalReducer, Reducer, add_gradients
from models.train.running_batch import Rules, RunningBatch, StepWork
from models.train.schedule import check_schedule
from models.train.updates import UpdateResult
from models.train.weights_io import hf_tensors


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
        correction_config: CorrectionConfig | None = None,
        critic: CriticConfig | None = None,
        distill: DistillConfig | None = None,
        reducer: Reducer | None = None,
    ) -> None:
        """`temperature`: of the rollouts; `max_response_len`: tokens, the constant of `constant` aggregation;
        `total_steps`: optimizer steps of the run, needed by a decaying learning rate; `correction`: the resolved policy
        mode (default: resolved from `correction_config` as if samples may be stale); `reducer`: the processes that
        train together (default: this one alone). Raises `TrainConfigInvalid`, `UnknownAlgorithm`.
        """
        check_schedule(train, total_steps)
        self._train = train
        self._algorithm = algorithm
        self._temperature = 1.0 if train.loss_type == "sft_loss" else temperature
        self._max_response_len = max_response_len
        self._seed = seed
        self._total_steps = total_steps
        self._off_policy = correction_config or CorrectionConfig()
        self._critic_config = critic or CriticConfig()
        self._distill = distill or DistillConfig()
        supervised = train.loss_type == "sft_loss"
        self._rules = Rules(
            algorithm=algorithm,
            correction=resolve_correction(self._off_policy, max_staleness=1) if correction is None else correction,
            aggregation="token_mean" if supervised else algorithm.loss_aggregation,
            opd_kl_coef=None if train.loss_type != "policy_loss" else opd_coefficient(algorithm, self._distill),
            whole_groups=train.loss_type == "custom_loss",
            reducer=reducer or LocalReducer(),
        )
        self._group_loss = _group_loss(train, algorithm)
        self._counters = Counters()
        self._steps_per_batch = 1
        self._version = 0

    # ------------------------------------------------------------------ life cycle

    def setup(self) -> None:
        """Load the policy and what stands beside it (reference, critic), and build the optimizers.

        Raises `CheckpointUnavailable`, `UnsupportedModel` or `TrainConfigInvalid`.
        """
        self._models = ModelSet(
            self._train,
            self._algorithm,
            self._rules.correction,
            self._critic_config,
            group_loss=self._group_loss,
            temperature=self._temperature,
            seed=self._seed,
            total_steps=self._total_steps,
        )
        self._model: Any = self._models.model
        self._updater = self._models.updater
        self._begin()

    # ------------------------------------------------------------------ scoring

    def logprobs(self, sequences: Sequence[TrainSequence]) -> list[npt.NDArray[np.float32]]:
        """Log-probs [R] of each sequence's response tokens under the current weights, temperature applied."""
        out = [np.zeros(sequence.response_length, dtype=np.float32) for sequence in sequences]
        for sequence in sequences:
            check_sequence(sequence, self._models.vocab_size)
        filled = [index for index, sequence in enumerate(sequences) if sequence.response_length > 0]
        tokens = [sequences[index].tokens for index in filled]
        chosen = [
            np.arange(len(sequences[index].tokens) - sequences[index].response_length, len(sequences[index].tokens))
            for index in filled
        ]
        prompts = [int(picks[0]) for picks in chosen]
        for layout in plan(tokens, prompts, self._models.passes.packing):
            for item, values in self._models.passes.policy.log_probs(layout, tokens, chosen):
                out[filled[item]] = values
        return out

    # ------------------------------------------------------------------ the batch

    def begin_batch(self, *, rollouts: int, steps: int, version: int = 0) -> None:
        """Announce a rollout batch. `rollouts` is a hint; what arrives counts. `steps`: calls of `step` it gets;
        `version`: of the weights, from which the staleness of each token is counted.

        Raises `BackendMisuse` if the batch before is not finished.
        """
        if rollouts < 0 or steps < 1:
            raise BackendMisuse(
                f"begin_batch(rollouts={rollouts}, steps={steps}): a batch has no negative rollouts and at least 1 step"
            )
        if self._batch.seen or self._batch.steps_due:
            raise BackendMisuse(
                f"begin_batch while {len(self._batch.seen)} rollouts wait for step() and {self._batch.steps_due} steps "
                "are due; finish the batch before with step()"
            )
        self._steps_per_batch = steps
        self._version = version
        self._begin()

    def _begin(self) -> None:
        needed = batch_needs(
            self._algorithm,
            self._rules.correction,
            self._distill,
            loss_type=self._train.loss_type,
            steps=self._steps_per_batch,
            world=self._rules.reducer.world,
        )
        critic_alone = (
            self._models.critic is not None and self._counters.batches < self._critic_config.num_critic_only_steps
        )
        if critic_alone:
            needed = critic_only(needed, self._algorithm, self._distill)
        self._trains_policy = not critic_alone
        self._batch = RunningBatch(
            self._models.passes, self._rules, needed, steps=self._steps_per_batch, train_policy=self._trains_policy
        )

    def accumulate(self, sequences: Sequence[TrainSequence]) -> None:
        """Take sequences into the running batch; work is done at once whenever the token budget is full.

        All sequences of a rollout come in the same call. Raises `InvalidSequence`, `BackendMisuse`.
        """
        if self._batch.steps_due:
            raise BackendMisuse(
                f"accumulate between the steps of a batch: its anchor belongs to the weights before its first step; "
                f"call step() {self._batch.steps_due} more times first"
            )
        intake = Intake(
            mode=self._rules.aggregation,
            vocab_size=self._models.vocab_size,
            version=self._version,
            newest_only=self._off_policy.mask_offpolicy_in_partial_rollout,
            needs_teacher=self._rules.opd_kl_coef is not None,
        )
        self._batch.add(rollouts_of(sequences, intake))
        self._batch.work(everything=False)

    def flush(self) -> None:
        """Do all work that is possible now, even in small micro-batches: for a caller who would be idle."""
        self._batch.work(everything=True)

    # ------------------------------------------------------------------ the step

    def step(self) -> dict[str, float]:
        """Finish the running optimizer step; return its metrics."""
        work = self._batch.run_step()
        mode, longest = self._rules.aggregation, self._max_response_len
        divisor = denominator(mode, work.size, max_response_len=longest)
        mean_divisor = denominator(metric_mode(mode), work.size, max_response_len=longest)
        metrics = work.totals.result(mean_divisor, loss_denominator=divisor)
        metrics.update(self._batch.decided_metrics(mean_divisor))
        if self._models.critic is not None and work.size.tokens:
            of_critic, found = self._models.critic.update(divisor, mean_divisor, self._rules.reducer)
            metrics.update(found)
            self._counters.skipped_steps += not of_critic.applied
        result = self._update(work, divisor, metrics)
        self._counters.steps += 1
        metrics.update(self._step_metrics(work.size, result))
        if self._batch.finish_step():
            self._finish_batch()
        return metrics

    def _update(self, work: StepWork, divisor: float, metrics: dict[str, float]) -> UpdateResult:
        """Change the policy's weights, unless there is nothing to learn from or it is not its turn."""
        if not self._trains_policy:
            metrics["train/critic_only"] = 1.0
            return self._updater.refuse()
        rejected = self._rules.correction.rejects and work.size.tokens > 0 and work.kept == 0
        if rejected or work.size.tokens == 0:
            self._counters.empty_steps += 1
            return self._updater.refuse()
        add_gradients(self._rules.reducer, [parameter for _, parameter in self._updater.named_parameters])
        staleness = work.staleness_sum / work.size.tokens
        scale = 1.0 / (1.0 + self._off_policy.staleness_lr_decay * staleness)
        result = self._updater.apply(divisor, lr_scale=scale)
        self._counters.skipped_steps += not result.applied
        return result

    def _finish_batch(self) -> None:
        self._counters.batches += 1
        interval = self._algorithm.ref_update_interval
        if self._models.reference is not None and interval and self._counters.batches % interval == 0:
            self._models.reference.renew()
        self._begin()

    def _step_metrics(self, size: StepSize, result: UpdateResult) -> dict[str, float]:
        return {
            "train/grad_norm": result.grad_norm,
            "train/lr": result.lr,
            "train/skipped_steps": float(self._counters.skipped_steps),
            "train/empty_steps": float(self._counters.empty_steps),
            "train/optimizer_steps": float(self._counters.steps),
            "train/rollouts": float(size.rollouts),
            "train/sequences": float(size.sequences),
            "train/trained_tokens": float(size.tokens),
        }

    def discard(self) -> None:
        """Forget the rollouts and gradients of the running batch; weights and optimizer stay as they are."""
        self._updater.clear()
        if self._models.critic is not None:
            self._models.critic.discard()
        self._begin()

    # ------------------------------------------------------------------ weights and files

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Current weights under Hugging Face names, in a fixed order, in the precision of the forward pass.

        The tensors are views of the live weights where no cast is needed: use them before the next `step`.
        """
        return hf_tensors(self._model, self._models.precision)

    def save(self, directory: Path) -> None:
        """Write the model to `directory/hf` and the trainer's state beside it, synchronised to disk.

        Raises `BackendMisuse` between the steps of a batch: gradients and anchors are not part of a checkpoint.
        """
        self._require_rest("save")
        self._models.save(directory, self._counters)

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote; the next steps are those of the run that was not interrupted.

        Raises `TrainStateUnreadable`.
        """
        self._require_rest("load")
        self._counters = self._models.load(directory)
        self._begin()

    def _require_rest(self, action: str) -> None:
        if self._batch.seen or self._batch.steps_due:
            raise BackendMisuse(
                f"{action} while {len(self._batch.seen)} rollouts are being trained: accumulated gradients and anchors "
                "are not part of a checkpoint; finish the batch with step() first"
            )


def _group_loss(train: TrainConfig, algorithm: AlgorithmConfig) -> GroupLossFunction | None:
    if train.loss_type != "custom_loss":
        return None
    if algorithm.custom_loss_function_path is None:
        raise TrainConfigInvalid(
            "loss_type=custom_loss needs a function; set --custom-loss-function-path package.module:function"
        )
    return group_loss_of(algorithm.custom_loss_function_path)
