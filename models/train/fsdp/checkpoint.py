"""Checkpoints of sharded models: torch's distributed checkpoint (DCP) in safetensors files, without pickle.

    directory/hf/                    the policy in Hugging Face format, merged with adapters, in the forward precision
    directory/adapter/               LoRA: adapters in peft's format
    directory/fsdp/shards/*.safetensors  masters, moments and random states, each process's own
    directory/fsdp/state.json        counters, and the size of every file of shards

Invariants:
- `state.json` is written last, after all else is on disk: a directory without it is incomplete;
- a state may be loaded by another number of processes, in other shards; optimizer steps and moments are exact;
- loading reads names, shapes and sizes, and then all contents, before it changes anything.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from msgspec import Struct
from torch import Tensor

from models.disk import sync, sync_tree
from models.train.errors import TrainStateUnreadable
from models.train.fsdp.mesh import Mesh
from models.train.fsdp.updates import ShardedUpdater, local
from models.train.huggingface.hf_files import write_hf
from models.train.huggingface.state_files import MODEL_DIR
from models.train.model_set import Counters

FORMAT_VERSION: Final = 1
STATE: Final = Path("fsdp/state.json")
SHARDS: Final = Path("fsdp/shards")
_WEIGHTS: Final = "weights/"
_MOMENTS: Final = "optimizer/"
_STEP: Final = "step"  # of each parameter; kept as one element, since a file of shards has no scalars

Parts = Mapping[str, tuple[dict[str, Tensor], ShardedUpdater | None]]


class FsdpState(Struct, frozen=True, kw_only=True):
    """What is no tensor."""

    counters: dict[str, int]
    updates: dict[str, int]  # by part that is trained
    parts: tuple[str, ...]
    world: int  # processes that wrote it
    files: dict[str, int]  # bytes
    format_version: int = FORMAT_VERSION


class Checkpoints:
    """Writes and reads the state of one set of models."""

    def __init__(self, mesh: Mesh, *, asynchronous: bool) -> None:
        """Collective. `asynchronous`: files are written by a thread, over process groups of its own."""
        self._mesh = mesh
        self._thread = ThreadPoolExecutor(1, "save") if asynchronous else None
        self._group = dist.new_group(backend="gloo") if asynchronous else mesh.gloo
        self._pending: Future[None] | None = None

    # ------------------------------------------------------------------ saving

    def save(
        self,
        directory: Path,
        parts: Parts,
        counters: Counters,
        *,
        weights: Iterator[tuple[str, Tensor]],
        source: str,
        finish: Callable[[], None],
    ) -> None:
        """Collective. `weights`: of the policy, for `hf`; `source`: whose configuration and tokenizer go beside them;
        `finish`: writes what else belongs to the directory, in the first process.
        """
        self.finish()
        if self._mesh.first:
            (directory / STATE).unlink(missing_ok=True)
            shutil.rmtree(directory / SHARDS, ignore_errors=True)
            (directory / SHARDS).mkdir(parents=True)
        self._mesh.barrier()
        tensors = _tensors(parts) | _random_state(self._mesh)
        state = FsdpState(
            counters=asdict(counters),
            updates={name: updater.updates for name, (_, updater) in parts.items() if updater is not None},
            parts=tuple(parts),
            world=self._mesh.sizes.world,
            files={},
        )
        writer = dcp.HuggingFaceStorageWriter(str(directory / SHARDS), save_distributed=True)
        if self._thread is None:
            first = self._mesh.first
            failure = _failure_of(lambda: write_hf(directory / MODEL_DIR, weights, source, writes=first))
            for _ in weights:  # the others gather to the end, whatever became of the first
                pass
            self._raise_together(failure)
            dcp.save(tensors, storage_writer=writer, process_group=self._group)
            self._raise_together(_failure_of(lambda: self._complete(directory, state, finish)))
            return
        # What the thread writes later is copied now: the next step changes the shards.
        copies = [(name, tensor.to("cpu", copy=True)) for name, tensor in weights]
        written = dcp.async_save(tensors, storage_writer=writer, process_group=self._group)

        def complete() -> None:
            failure = _failure_of(lambda: write_hf(directory / MODEL_DIR, copies, source, writes=self._mesh.first))
            written.result()  # returns when all processes have written
            if failure is not None:
                raise failure
            self._complete(directory, state, finish)

        self._pending = self._thread.submit(complete)

    def _raise_together(self, failure: Exception | None) -> None:
        """Collective: raise what went wrong here, or that something did elsewhere."""
        failed = self._mesh.anywhere(failure is not None)
        if failure is not None:
            raise failure
        if failed:
            raise OSError("another process could not write its part of the checkpoint; its message says why")

    def _complete(self, directory: Path, state: FsdpState, finish: Callable[[], None]) -> None:
        """In the first process, once all have written: everything else, and the state file behind it."""
        if not self._mesh.first:
            return
        finish()
        files = {file.name: file.stat().st_size for file in sorted((directory / SHARDS).iterdir())}
        sync_tree(directory)
        (directory / STATE).write_bytes(msgspec.json.encode(msgspec.structs.replace(state, files=files)))
        sync(directory / STATE)
        sync((directory / STATE).parent)

    def finish(self) -> None:
        """Wait until the last save is on disk, in all processes. Raises what went wrong in any of them."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        self._raise_together(_failure_of(pending.result))

    # ------------------------------------------------------------------ loading

    def load(self, directory: Path, parts: Parts) -> Counters:
        """Collective. Raises `TrainStateUnreadable` in all processes, then nothing is changed."""
        with self._together(directory):
            state = _read_state(directory)
            reader = dcp.HuggingFaceStorageReader(str(directory / SHARDS))
            saved = _shapes_of(reader)
            _check(directory, state, saved, parts)
        tensors = _destinations(saved, parts, self._rng_name(state))
        with self._together(directory):
            dcp.load(tensors, storage_reader=reader, process_group=self._group)
        for name, (weights, updater) in parts.items():
            _restore_weights(f"{name}/{_WEIGHTS}", weights, tensors)
            if updater is not None:
                _restore_optimizer(f"{name}/{_MOMENTS}", updater, tensors)
                updater.updates = state.updates[name]
        rng = self._rng_name(state)
        torch.set_rng_state(tensors[f"{rng}/cpu"])
        if f"{rng}/cuda" in tensors and self._mesh.device.type == "cuda":
            torch.cuda.set_rng_state(tensors[f"{rng}/cuda"], self._mesh.device)
        return Counters(**state.counters)

    def _rng_name(self, state: FsdpState) -> str:
        """The random state of this process, or, where there are more processes than before, of one of those."""
        return f"rng/{self._mesh.rank % state.world}"

    def _together(self, directory: Path) -> _Together:
        return _Together(directory, self._mesh)


class _Together:
    """A block that ends in all processes as `TrainStateUnreadable` if it fails in one of them."""

    def __init__(self, directory: Path, mesh: Mesh) -> None:
        self._directory, self._mesh = directory, mesh

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        failed = self._mesh.anywhere(error is not None)
        if isinstance(error, TrainStateUnreadable) or not failed:
            return
        cause = "another process could not read it" if error is None else f"{type(error).__name__}: {error}"
        raise TrainStateUnreadable(
            f"{self._directory} holds no complete state of sharded training ({cause.splitlines()[0]}); resume from "
            "another checkpoint"
        ) from error


def _failure_of(attempt: Callable[[], object]) -> Exception | None:
    """What an attempt raised: to be raised after the others were told."""
    try:
        attempt()
    except Exception as error:
        return error
    return None


def _tensors(parts: Parts) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for part, (weights, updater) in parts.items():
        out |= {f"{part}/{_WEIGHTS}{name}": tensor for name, tensor in weights.items()}
        if updater is None:
            continue
        for name, tensor in updater.state_tensors().items():
            out[f"{part}/{_MOMENTS}{name}"] = tensor.cpu().reshape(1) if tensor.ndim == 0 else tensor
    return out


def _random_state(mesh: Mesh) -> dict[str, Tensor]:
    out = {f"rng/{mesh.rank}/cpu": torch.get_rng_state()}
    if mesh.device.type == "cuda":
        out[f"rng/{mesh.rank}/cuda"] = torch.cuda.get_rng_state(mesh.device)
    return out


def _read_state(directory: Path) -> FsdpState:
    state = msgspec.json.decode((directory / STATE).read_bytes(), type=FsdpState)
    if state.format_version != FORMAT_VERSION:
        raise TrainStateUnreadable(
            f"{directory} has format version {state.format_version}, this program reads {FORMAT_VERSION}; "
            "resume with the program version that wrote it"
        )
    found = {file.name: file.stat().st_size for file in (directory / SHARDS).iterdir()}
    wrong = [name for name, size in state.files.items() if found.get(name) != size]
    if wrong:
        raise TrainStateUnreadable(
            f"{directory / SHARDS} lacks {wrong[0]} as it was written ({len(wrong)} of {len(state.files)} files); "
            "resume from another checkpoint"
        )
    return state


def _shapes_of(reader: dcp.HuggingFaceStorageReader) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {
        name: (entry.size, entry.properties.dtype) for name, entry in reader.read_metadata().state_dict_metadata.items()
    }


def _check(directory: Path, state: FsdpState, saved: Mapping[str, tuple[torch.Size, Any]], parts: Parts) -> None:
    for part, (weights, updater) in parts.items():
        if part not in state.parts:
            raise TrainStateUnreadable(
                f"{directory} holds no {part}, which this run needs: it was saved by a run with other options; resume "
                "with those, or start a new run from its weights"
            )
        start = f"{part}/{_WEIGHTS}"
        found = {name.removeprefix(start): tuple(entry[0]) for name, entry in saved.items() if name.startswith(start)}
        if found != {name: tuple(tensor.shape) for name, tensor in weights.items()}:
            raise TrainStateUnreadable(
                f"the {part} in {directory} has other names or shapes than this one; resume with the --hf-checkpoint, "
                "the --lora-* and the other options that the run was started with"
            )
        if updater is None:
            continue
        start = f"{part}/{_MOMENTS}"
        shapes = {name: tuple(parameter.shape) for name, parameter in updater.named_parameters}
        for key, (shape, _) in saved.items():
            name, _, entry = key.removeprefix(start).rpartition("/")
            wanted = (1,) if entry == _STEP else shapes.get(name)
            if key.startswith(start) and (name not in shapes or tuple(shape) != wanted):
                raise TrainStateUnreadable(
                    f"optimizer state {entry!r} of {name!r} in {directory} is of another model; resume with the "
                    "options that the run was started with"
                )


def _destinations(saved: Mapping[str, tuple[torch.Size, torch.dtype]], parts: Parts, rng: str) -> dict[str, Tensor]:
    """Empty tensors for what is to be read, in the shards of this run."""
    out: dict[str, Tensor] = {}
    for part, (weights, updater) in parts.items():
        out |= {f"{part}/{_WEIGHTS}{name}": torch.empty_like(tensor) for name, tensor in weights.items()}
        if updater is None:
            continue
        for name, parameter in updater.named_parameters:
            start = f"{part}/{_MOMENTS}{name}/"
            for key in [key for key in saved if key.startswith(start)]:
                step = key == start + _STEP
                out[key] = torch.empty(1) if step else torch.empty_like(parameter.detach())
    for key, (shape, dtype) in saved.items():
        if key.startswith(rng + "/"):
            out[key] = torch.empty(shape, dtype=dtype)
    return out


def _restore_weights(start: str, weights: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in weights.items():
            local(tensor).copy_(local(tensors[start + name]))


def _restore_optimizer(start: str, updater: ShardedUpdater, tensors: Mapping[str, Tensor]) -> None:
    parameters = dict(updater.named_parameters)
    updater.optimizer.state.clear()
    for key, tensor in tensors.items():
        if not key.startswith(start):
            continue
        name, _, entry = key.removeprefix(start).rpartition("/")
        parameter = parameters[name]
        # Each parameter has a step of its own: the optimizer counts it up once per parameter.
        value = tensor.reshape(()).to(local(parameter).device, copy=True) if entry == _STEP else tensor
        updater.optimizer.state[parameter][entry] = value
