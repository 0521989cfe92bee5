"""From configuration to training backend. The one place that knows which backends there are.

Each branch imports what its backend needs: the simulated one does without torch, whose import costs seconds.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from configs.schema import Config, TrainConfig
from models.families.source import files_by_name
from models.train.interface import TrainBackend, TrainSequence, WeightExporter
from models.weights.layout import StoredTensor, stored_tensors

if TYPE_CHECKING:
    from models.train.dp_group import DpGroup
    from models.train.trainer import Trainer


# --------------------------------------------------------------------------------------------------
# A training backend that takes time instead of computing: for benchmarks of the schedule and tests of the life cycle.
#
# It sleeps `simulated_step_s` per optimizer step, spread over the sequences as they arrive, so that overlap with
# generation shows as it does with a real trainer. Weights are those of the checkpoint, unchanged: their bytes are
# passed on as they are, without torch.


ARRIVAL_SHARE = 0.9  # of a step's time is spent as its sequences arrive, the rest in `step`


class SimulatedBackend(WeightExporter):
    """`TrainBackend` whose steps take a set time."""

    def __init__(self, train: TrainConfig, *, steps: int = 1) -> None:
        self._train = train
        self._steps_per_batch = steps
        self._steps = 0
        self._rollouts = 1
        self._owed_s = 0.0

    def setup(self) -> None:
        self._source = Path(self._train.hf_checkpoint)
        self._weights = [
            stored for file in sorted(set(files_by_name(self._source).values())) for stored in stored_tensors(file)
        ]

    def logprobs(self, sequences: Sequence[TrainSequence]) -> list[npt.NDArray[np.float32]]:
        return [s.rollout_log_probs[s.prompt_length :] for s in sequences]

    def begin_batch(self, *, rollouts: int, steps: int, version: int = 0, lr_scale: float = 1.0) -> None:
        self._rollouts, self._steps_per_batch = rollouts, steps

    def accumulate(self, sequences: Sequence[TrainSequence]) -> None:
        share = ARRIVAL_SHARE * self._steps_per_batch * len(sequences) / self._rollouts
        self._owed_s += self._train.simulated_step_s * share
        self.flush()

    def flush(self) -> None:
        """Sleep off what is owed."""
        time.sleep(self._owed_s)
        self._owed_s = 0.0

    def step(self) -> dict[str, float]:
        self.flush()
        time.sleep(self._train.simulated_step_s * (1 - ARRIVAL_SHARE))
        self._steps += 1
        return {"train/optimizer_steps": float(self._steps)}

    def discard(self) -> None:
        self._owed_s = 0.0

    def export_weights(self) -> Iterator[tuple[str, StoredTensor]]:
        yield from self._weights

    def save(self, directory: Path) -> None:
        shutil.copytree(self._source, directory / "hf", dirs_exist_ok=True)
        (directory / "simulated.json").write_text(json.dumps({"steps": self._steps}))

    def finish_save(self) -> None:
        """Nothing: `save` writes all."""

    def close(self) -> None:
        """Nothing is held."""

    def load(self, directory: Path) -> None:
        self._steps = int(json.loads((directory / "simulated.json").read_text())["steps"])


def set_cuda_defaults(config: Config) -> None:
    """Environment that torch and CUDA read when this process first uses a GPU; what the user has set stays.

    Micro-batches differ in size, so that memory which cannot grow falls to pieces. Megatron-core overlaps communication
    only if kernels run in the order in which they were started: one queue.
    """
    if config.train.train_device == "cpu":
        return
    if not os.environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    if config.train.train_backend == "megatron":
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def build_backend(config: Config, total_batches: int, run_dir: Path | None = None) -> TrainBackend:
    """The configured backend for one process alone, not yet set up. `total_batches`: rollout batches of the run;
    `run_dir`: where profiles of it go."""
    if config.train.train_backend == "simulated":
        return SimulatedBackend(config.train, steps=config.train.num_steps_per_rollout or 1)
    set_cuda_defaults(config)
    return build_member(config, total_batches, None, run_dir)


def build_member(
    config: Config, total_batches: int, dp_group: DpGroup | None = None, run_dir: Path | None = None
) -> Trainer:
    """The trainer of one process, alone or of a trainer group. `dp_group`: of plain copies (torch); sharded frameworks
    make their own."""
    import torch

    # cuDNN's attention plans for a second whenever a length is new, and lengths are seldom the same.
    torch.backends.cuda.enable_cudnn_sdp(False)

    from models.train.profiling import FOLDER, Profiler
    from models.train.spec import train_spec
    from models.train.trainer import Trainer

    torch.manual_seed(config.run.seed)  # for what a loss of the user's draws; also in the state that is saved
    spec, async_save = train_spec(config, total_batches), config.checkpoint.async_save
    profiler = None if run_dir is None else Profiler(config.debug, run_dir / FOLDER)
    match config.train.train_backend:
        case "fsdp":
            from models.train.huggingface.sharded_models import FsdpModels

            return Trainer(spec, partial(FsdpModels, async_save=async_save), profiler)
        case "megatron":
            from models.train.megatron.models import MegatronModels

            return Trainer(spec, partial(MegatronModels, async_save=async_save), profiler)
        case _:
            from models.train.huggingface.whole_models import TorchModels

            return Trainer(spec, partial(TorchModels, dp_group=dp_group), profiler)
