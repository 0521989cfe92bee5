"""What a training step is, whatever framework computes it: `TrainBackend` over a `ModelSet`.

Invariants:
- the loss, the gradient and the new weights do not depend on how sequences were split into micro-batches, packed,
  padded, or in which order they arrived (beyond rounding): gradients of numerators are summed, and divided by the
  denominator of the whole step in `step`;
- where something of the whole batch must be known before its first backward pass (`needs`), no step is made before the
  batch is complete, and old log-probs are those of the weights at its start;
- several processes may train one policy together (`dp_group`): each is called with the same sequences in the same
  order, takes the same decisions, and computes its share;
- a step without a trainable token, or whose loss or gradient is not finite, changes nothing and is counted.

Not thread-safe: one thread at a time may call it. Constructing is cheap; `setup` loads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from models.algorithms.aggregation import denominator, metric_mode
from models.errors import BackendMisuse
from models.train.device_memory import DeviceMemory
from models.train.huggingface.whole_models import TorchModels
from models.train.interface import TrainSequence, WeightExporter
from models.train.model_set import Counters, ModelSet
from models.train.profiling import Profiler
from models.train.spec import TrainSpec, UpdateResult, batch_needs, critic_only
from models.train.step.examples import check_sequence, example_of, rollouts_of
from models.train.step.running_batch import OldLogProbPass, RunningBatch
from models.train.work import PEAK, published_tflops


class Trainer(WeightExporter):
    """`TrainBackend` on any framework."""

    def __init__(
        self, spec: TrainSpec, models: Callable[[TrainSpec], ModelSet] = TorchModels, profiler: Profiler | None = None
    ) -> None:
        """`models`: loads all models of the configuration. Raises `UnknownAlgorithm`."""
        self._spec, self._profiler = spec, profiler
        self._make_models = models
        self._counters = Counters()
        self._steps_per_batch = 1
        self._expected = 0  # rollouts of the batch
        self._version = 0
        self._lr_scale = 1.0

    # ------------------------------------------------------------------ life cycle

    def setup(self) -> None:
        """Load the policy and what stands beside it (reference, critic), and build the optimizers.

        Raises `CheckpointUnavailable`, `UnsupportedModel` or `TrainConfigInvalid`.
        """
        if self._profiler is not None:
            self._profiler.setup()
        self._models = self._make_models(self._spec)
        self._memory = DeviceMemory()
        self._begin()

    # ------------------------------------------------------------------ scoring

    def logprobs(self, sequences: Sequence[TrainSequence]) -> list[npt.NDArray[np.float32]]:
        """Log-probs [T - prompt_length] of the tokens after each prompt, current weights, temperature applied."""
        for sequence in sequences:
            check_sequence(sequence, self._models.vocab_size)
        # All of the response is to be scored.
        behind = [np.arange(one.prompt_length, len(one.tokens), dtype=np.int64) for one in sequences]
        examples = [example_of(one, places) for one, places in zip(sequences, behind, strict=True)]
        OldLogProbPass(self._models, bootstrap=False).refresh([one for one in examples if len(one.chosen)])
        nothing = np.zeros(0, dtype=np.float32)
        return [nothing if one.current_log_probs is None else one.current_log_probs for one in examples]

    # ------------------------------------------------------------------ the batch

    def begin_batch(self, *, rollouts: int, steps: int, version: int = 0, lr_scale: float = 1.0) -> None:
        """Announce a rollout batch. `rollouts` is a hint for when to begin; what arrives counts. `steps`: calls of
        `step` it gets; `version`: of the weights, from which the staleness of each token is counted; `lr_scale`: factor
        of the learning rate.

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
        self._steps_per_batch, self._expected = steps, rollouts
        self._version, self._lr_scale = version, lr_scale
        if self._profiler is not None:
            self._profiler.begin(self._counters.batches)
        self._begin()

    def _begin(self) -> None:
        spec, models = self._spec, self._models
        apart = models.has_reference and models.reference_apart
        needed = batch_needs(spec, steps=self._steps_per_batch, reference_apart=apart)
        self._trains_policy = models.critic is None or self._counters.batches >= spec.critic.num_critic_only_steps
        if not self._trains_policy:
            needed = critic_only(needed, spec)
        steps, index = self._steps_per_batch, self._counters.batches
        self._batch = RunningBatch(models, spec, needed, steps=steps, index=index, train_policy=self._trains_policy)

    def accumulate(self, sequences: Sequence[TrainSequence]) -> None:
        """Take sequences into the running batch. Work is done at once whenever the token budget is full, but not with
        the last rollouts: then `step` deals all that is left to the ranks at once, which balances it best.

        All sequences of a rollout come in the same call. Raises `InvalidSequence`, `BackendMisuse`.
        """
        if self._batch.steps_due:
            raise BackendMisuse(
                f"accumulate between the steps of a batch: its old log-probs are those before its first step; "
                f"call step() {self._batch.steps_due} more times first"
            )
        self._batch.add(rollouts_of(sequences, self._spec, self._models.vocab_size, self._version))
        if len(self._batch.seen) < self._expected:
            self._batch.work(everything=False)

    def flush(self) -> None:
        """Do all work that is possible now, even in small micro-batches: for a caller that would be idle."""
        self._batch.flush()

    # ------------------------------------------------------------------ the step

    def step(self) -> dict[str, float]:
        """Finish the running optimizer step; return its metrics."""
        self._batch.run_step()
        size, totals = self._batch.size, self._batch.totals
        mode, longest = self._spec.aggregation, self._spec.max_response_len
        divisor = denominator(mode, size, max_response_len=longest)
        mean_divisor = denominator(metric_mode(mode), size, max_response_len=longest)
        metrics = totals.result(mean_divisor, loss_denominator=divisor)
        metrics.update(self._batch.decided_metrics(mean_divisor))
        if self._models.critic is not None and size.tokens:
            of_critic, found = self._models.critic.update(divisor, mean_divisor, self._models.dp_group)
            metrics.update(found)
            self._counters.skipped_steps += not of_critic.applied
        result = self._update(divisor, metrics)
        self._counters.steps += 1
        metrics |= {
            "train/grad_norm": result.grad_norm,
            "train/lr": result.lr,
            "train/skipped_steps": float(self._counters.skipped_steps),
            "train/empty_steps": float(self._counters.empty_steps),
            "train/optimizer_steps": float(self._counters.steps),
            "train/rollouts": float(size.rollouts),
            "train/sequences": float(size.sequences),
            "train/trained_tokens": float(size.tokens),
        }
        device = self._models.device
        if device.type == "cuda" and (peak := published_tflops(torch.cuda.get_device_name(device))) is not None:
            metrics[PEAK] = peak
        if self._batch.finish_step():
            self._counters.batches += 1
            interval = self._spec.algorithm.ref_update_interval
            if interval and self._counters.batches % interval == 0:
                self._models.renew_reference()
            if self._profiler is not None:
                self._profiler.end(self._counters.batches)
            self._begin()
        return metrics

    def _update(self, divisor: float, metrics: dict[str, float]) -> UpdateResult:
        """Change the policy's weights, unless there is nothing to learn from or it is not its turn."""
        if not self._trains_policy:
            metrics["train/critic_only"] = 1.0
            return self._models.refuse()
        tokens, totals = self._batch.size.tokens, self._batch.totals
        masks = self._spec.correction.rejects or self._spec.correction.custom_tis_function_path is not None
        if tokens == 0 or (masks and not totals.kept):
            self._counters.empty_steps += 1
            return self._models.refuse()
        # Tested apart from the gradient: behind a clamp or a maximum that is finite where the loss is not.
        if not math.isfinite(metrics["train/loss"]):
            self._counters.skipped_steps += 1
            return self._models.refuse().for_its_loss()
        staleness = self._batch.staleness_sum / tokens
        scale = self._lr_scale / (1.0 + self._spec.correction.staleness_lr_decay * staleness)
        if self._spec.correction.ess_lr_scale:
            scale *= math.sqrt(metrics["train/ess_sequence"])
        result = self._models.update(divisor, lr_scale=scale)
        self._counters.skipped_steps += not result.applied
        return result

    def discard(self) -> None:
        """Forget the rollouts and gradients of the running batch; weights and optimizer stay as they are."""
        if not self._memory.away:  # else nothing was computed
            self._models.clear()
            if self._models.critic is not None:
                self._models.critic.discard()
        self._begin()

    # ------------------------------------------------------------------ weights and files

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Current weights under Hugging Face names, in a fixed order, in the precision of the forward pass.

        The tensors are views of the live weights where no cast is needed: use them before the next `step`.
        """
        return self._models.export()

    def save(self, directory: Path) -> None:
        """Write the model to `directory/hf` and the trainer's state beside it, synchronised to disk.

        Raises `BackendMisuse` between the steps of a batch: gradients and old log-probs are not part of a checkpoint.
        """
        self._require_rest("save")
        self._models.save(directory, self._counters)

    def finish_save(self) -> None:
        """Wait until the last save is on disk; `save` itself waits unless the models save in the background."""
        self._models.finish_save()

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote; the next steps are those of the run that was not interrupted.

        Raises `TrainStateUnreadable`.
        """
        self._require_rest("load")
        self._counters = self._models.load(directory)
        self._begin()

    def offload(self) -> None:
        """Give the device's memory to the engines, between batches. Until `onload` only `discard` may be called."""
        self._memory.offload(self._models.device, *self._models.device_tensors())

    def onload(self) -> None:
        """Take it back, before anything else is computed or saved."""
        self._memory.onload()

    def close(self) -> None:
        """Nothing: everything is in this process, and ends with it."""

    def _require_rest(self, action: str) -> None:
        if self._batch.seen or self._batch.steps_due:
            raise BackendMisuse(
                f"{action} while {len(self._batch.seen)} rollouts are being trained: accumulated gradients and old "
                "log-probs are not part of a checkpoint; finish the batch with step() first"
            )
