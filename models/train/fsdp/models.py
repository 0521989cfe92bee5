"""Models in shards over the processes of torch.distributed's default group: FSDP2, HSDP, DDP; on GPUs and CPUs.

Invariants:
- a forward or backward pass gathers parameters and adds gradients over all processes, so that all run every
  micro-batch;
- loading checks everything that it can before it changes anything.
"""

from __future__ import annotations

from pathlib import Path

from models.train.fsdp.checkpoint import Checkpoints
from models.train.fsdp.loading import Shards
from models.train.fsdp.mesh import Mesh, ensure_group, own_device
from models.train.huggingface.loading import pick_device
from models.train.huggingface.lora import Adapters
from models.train.huggingface.models import HfModels
from models.train.model_set import Counters
from models.train.spec import TrainSpec


class FsdpModels(HfModels):
    """`ModelSet` in shards, with LoRA."""

    def __init__(self, spec: TrainSpec, *, async_save: bool = False) -> None:
        """Without a default group, this process trains alone.

        `async_save`: `save` returns as soon as the state is copied; `finish_save` waits for the disk.

        Raises `CheckpointUnavailable`, `UnsupportedModel` or `TrainConfigInvalid`.
        """
        ensure_group()
        mesh = Mesh(spec.fsdp, spec.parallel, own_device(pick_device(spec.train.train_device)))
        adapters = Adapters(spec.lora, spec.train.hf_checkpoint) if spec.lora.lora_rank > 0 else None
        super().__init__(spec, Shards(spec, mesh), adapters)
        self._checkpoints = Checkpoints(mesh, asynchronous=async_save)

    def save(self, directory: Path, counters: Counters) -> None:
        """Write the policy to `directory/hf`, adapters to `directory/adapter`, and all shards beside them.

        Synchronised to disk, unless the models were made with `async_save`: then `finish_save` waits for that.
        """
        adapters, first = self.adapters, self._placement.first
        gathered = () if adapters is None else adapters.tensors(self.model, self.device)
        adapter = {name: tensor for name, tensor in gathered if first}  # the first process writes it

        def write_adapter() -> None:
            if adapters is not None:
                adapters.write(directory / "adapter", adapter)

        self._checkpoints.save(
            directory,
            self.parts(),
            counters,
            weights=self.export(),
            source=self._spec.train.hf_checkpoint,
            finish=write_adapter,
        )

    def finish_save(self) -> None:
        """Wait until what `save` wrote is on disk in all processes. Raises what went wrong."""
        self._checkpoints.finish()

    def load(self, directory: Path) -> Counters:
        """Restore what `save` wrote, by however many processes.

        Raises `TrainStateUnreadable`, then nothing is changed.
        """
        return self._checkpoints.load(directory, self.parts())
