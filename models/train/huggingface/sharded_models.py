"""Models in shards over the processes of torch.distributed's default group: FSDP2, HSDP, DDP; on GPUs and CPUs.

Invariants:
- a forward or backward pass gathers parameters and adds gradients over all processes, so that all run every
  micro-batch;
- loading checks everything that it can before it changes anything.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from msgspec import Struct
from torch import Tensor

from models.disk import read_file, sync_tree, write_whole
from models.errors import TrainStateUnreadable
from models.train.dp_group import NOT_WRITTEN, BackgroundSave, together
from models.train.huggingface import checkpoint
from models.train.huggingface.hf_files import write_hf
from models.train.huggingface.loading import pick_device
from models.train.huggingface.lora import Adapters
from models.train.huggingface.models import HfModels
from models.train.huggingface.sharded_loading import Mesh, Shards, own_device
from models.train.model_set import Counters
from models.train.spec import TrainSpec

# --------------------------------------------------------------------------------------------------
# Checkpoints of sharded models: torch's distributed checkpoint (DCP) in safetensors files, without pickle.
#
#     directory/hf/                    the policy in Hugging Face format, merged with adapters, in the forward precision
#     directory/adapter/               LoRA: adapters in peft's format
#     directory/fsdp/shards/*.safetensors  masters, moments and random states, each process's own
#     directory/fsdp/state.json        counters, and the size of every file of shards
#
# Invariants:
# - `state.json` is written last, after all else is on disk: a directory without it is incomplete;
# - a state may be loaded by another number of processes, in other shards; optimizer steps and moments are exact;
# - loading reads names, shapes and sizes, and then all contents, before it changes anything.


FORMAT_VERSION: Final = 1
STATE: Final = Path("fsdp/state.json")
SHARDS: Final = Path("fsdp/shards")


class FsdpState(Struct, frozen=True, kw_only=True):
    """What is no tensor."""

    counters: dict[str, int]
    updates: dict[str, int]  # by part that is trained
    parts: tuple[str, ...]
    world: int  # processes that wrote it
    files: dict[str, int]  # bytes
    format_version: int = FORMAT_VERSION


def _unreadable(directory: Path, cause: str) -> TrainStateUnreadable:
    return TrainStateUnreadable(
        f"{directory} holds no complete state of sharded training ({cause}); resume from another checkpoint"
    )


def _read_state(directory: Path) -> FsdpState:
    state = msgspec.json.decode(read_file(directory / STATE), type=FsdpState)
    checkpoint.check_format(directory, state.format_version, FORMAT_VERSION)
    found = {file.name: file.stat().st_size for file in (directory / SHARDS).iterdir()}
    wrong = [name for name, size in state.files.items() if found.get(name) != size]
    if wrong:
        raise TrainStateUnreadable(
            f"{directory / SHARDS} lacks {wrong[0]} as it was written ({len(wrong)} of {len(state.files)} files); "
            "resume from another checkpoint"
        )
    return state


def _destinations(saved: Iterable[str], parts: checkpoint.StateParts) -> dict[str, Tensor]:
    """Empty tensors for what is to be read, in the shards of this run."""
    out: dict[str, Tensor] = {}
    for name, part in parts.items():
        out |= {f"{name}/weights/{key}": torch.empty_like(tensor) for key, tensor in part.weights.items()}
        for parameter, tensor in part.updater.named_parameters if part.updater is not None else ():
            start = f"{name}/optimizer/{parameter}/"
            for key in [key for key in saved if key.startswith(start)]:
                out[key] = torch.empty(1) if key == start + checkpoint.STEP else torch.empty_like(tensor.detach())
    return out


class FsdpModels(HfModels):
    """`ModelSet` in shards, with LoRA."""

    def __init__(self, spec: TrainSpec, *, async_save: bool = False) -> None:
        """Without a default group, this process trains alone.

        `async_save`: `save` returns as soon as the state is copied, and files are written by a thread, over process
        groups of its own; `finish_save` waits for the disk.

        Raises `CheckpointUnavailable`, `UnsupportedModel` or `TrainConfigInvalid`.
        """
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self._mesh = mesh = Mesh(spec.fsdp, spec.parallel, own_device(pick_device(spec.train.train_device)))
        adapters = Adapters(spec.lora, spec.train.hf_checkpoint) if spec.lora.lora_rank > 0 else None
        super().__init__(spec, Shards(spec, mesh), adapters)
        self._asynchronous, self._saving = async_save, BackgroundSave(mesh.gloo)
        self._group = dist.new_group(backend="gloo") if async_save else mesh.gloo

    def save(self, directory: Path, counters: Counters) -> None:
        """Write the policy to `directory/hf`, adapters to `directory/adapter`, and all shards beside them.

        Synchronised to disk, unless the models were made with `async_save`: then `finish_save` waits for that.
        """
        self.finish_save()
        parts, mesh, adapters = self.parts(), self._mesh, self.adapters
        gathered = () if adapters is None else adapters.tensors(self.model, self.device)
        adapter = {name: tensor for name, tensor in gathered if mesh.first}  # the first process writes it
        if mesh.first:
            (directory / STATE).unlink(missing_ok=True)
            shutil.rmtree(directory / SHARDS, ignore_errors=True)
            (directory / SHARDS).mkdir(parents=True)
        dist.barrier(group=mesh.gloo)
        # A scalar as one element: a file of shards has no scalars.
        tensors = {
            name: one.cpu().reshape(1) if one.ndim == 0 and name.endswith(f"/{checkpoint.STEP}") else one
            for name, one in parts.tensors().items()
        }
        tensors |= {f"rng/{mesh.rank}/{kind}": one for kind, one in checkpoint.random_state(self.device).items()}
        writer = dcp.HuggingFaceStorageWriter(str(directory / SHARDS), save_distributed=True)
        weights: Iterable[tuple[str, Tensor]] = self.export()
        if self._asynchronous:
            # What the thread writes later is copied now: the next step changes the shards.
            weights = [(name, tensor.to("cpu", copy=True)) for name, tensor in weights]
            write_shards = dcp.async_save(tensors, storage_writer=writer, process_group=self._group).result
        else:
            write_shards = partial(dcp.save, tensors, storage_writer=writer, process_group=self._group)
        noted, updates = asdict(counters), parts.updates

        def complete() -> None:
            try:
                write_hf(directory / checkpoint.MODEL_DIR, weights, self._spec.train.hf_checkpoint, writes=mesh.first)
            finally:
                write_shards()  # returns when all processes have written
            if not mesh.first:
                return
            if adapters is not None:
                adapters.write(directory / "adapter", adapter)
            files = {file.name: file.stat().st_size for file in sorted((directory / SHARDS).iterdir())}
            sync_tree(directory)
            state = FsdpState(counters=noted, updates=updates, parts=tuple(parts), world=mesh.world, files=files)
            write_whole(directory / STATE, msgspec.json.encode(state), durable=True)

        if self._asynchronous:
            self._saving.begin(complete)
        else:
            with together(OSError(NOT_WRITTEN), mesh.gloo):
                complete()

    def finish_save(self) -> None:
        """Wait until what `save` wrote is on disk in all processes. Raises what went wrong in any of them."""
        self._saving.finish()

    def load(self, directory: Path) -> Counters:
        """Restore what `save` wrote, by however many processes.

        Raises `TrainStateUnreadable` in all processes, then nothing is changed.
        """
        self.finish_save()
        parts = self.parts()
        with self._readable(directory):
            state = _read_state(directory)
            reader = dcp.HuggingFaceStorageReader(str(directory / SHARDS))
            saved = reader.read_metadata().state_dict_metadata
            parts.check(directory, state.parts, {name: entry.size for name, entry in saved.items()})
        # The random state of this process, or, where there are more processes than before, of one of those.
        rng = f"rng/{self._mesh.rank % state.world}/"
        random = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in saved.items()
            if name.startswith(rng)
        }
        tensors = _destinations(saved, parts) | random
        with self._readable(directory):
            dcp.load(tensors, storage_reader=reader, process_group=self._group)
        parts.restore(tensors, state.updates)
        checkpoint.restore_random_state({name.removeprefix(rng): tensors[name] for name in random}, self.device)
        return Counters(**state.counters)

    @contextmanager
    def _readable(self, directory: Path) -> Iterator[None]:
        """A block that ends in all processes as `TrainStateUnreadable` if it fails in one of them."""
        with together(_unreadable(directory, "another process could not read it"), self._mesh.gloo):
            try:
                yield
            except TrainStateUnreadable:
                raise
            except BaseException as error:  # torch's CheckpointException is no Exception
                raise _unreadable(directory, f"{type(error).__name__}: {error}".splitlines()[0]) from error
