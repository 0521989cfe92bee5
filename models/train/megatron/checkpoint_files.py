"""The files of a Megatron training state.

    directory/megatron/__<process>_0.distcp   tensors, as Megatron's dist_checkpointing writes them
    directory/megatron/.metadata, common.pt, metadata.json   for other programs; never read here, since two are pickles
    directory/megatron/index.json             where each tensor lies
    directory/megatron/random-<process>.safetensors          random states
    directory/megatron/state.json             counters, layout, sizes of all files

Invariants:
- `state.json` is written last, when the files of all processes are on disk: a directory without it is incomplete;
- nothing that could run code is read: the index is JSON, tensors are read with `weights_only`;
- processes agree over a group of their own, so that a state can be completed while the next batch trains.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from models.disk import read_file, sync, sync_tree, write_whole
from models.errors import TrainStateUnreadable
from models.train.dp_group import gather_bytes
from models.train.huggingface.checkpoint import MODEL_DIR, TRAINER_DIR, check_format
from models.train.huggingface.hf_files import write_tensors

STATE_DIR: Final = "megatron"
STATE: Final = "state.json"
INDEX: Final = "index.json"
FORMAT_VERSION: Final = 1


class ModelCounters(Struct, frozen=True):
    """Of one model with an optimizer."""

    updates: int
    adam_steps: int


class MegatronState(Struct, frozen=True, kw_only=True):
    """What `state.json` holds."""

    models: dict[str, ModelCounters]  # policy, critic
    parts: tuple[str, ...] = ()  # further tensors: reference
    batches: int = 0
    steps: int = 0
    skipped_steps: int = 0
    empty_steps: int = 0
    layout: dict[str, int]
    megatron_core: str
    sizes: dict[str, int] = {}  # bytes of each file
    format_version: int = FORMAT_VERSION


class Chunk(Struct, frozen=True, array_like=True):
    """A part of a tensor, in one file."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    start: int  # byte of the file
    length: int  # bytes


class Entry(Struct, frozen=True):
    """A whole tensor."""

    dtype: str
    shape: tuple[int, ...]
    chunks: list[Chunk]


Index = dict[str, Entry]


class Written(Struct, frozen=True):
    """Reports that one process's files are on disk, or why they are not."""

    places: list[tuple[str, tuple[int, ...], str, int, int]] = []  # tensor, offsets, file, start, length
    error: str | None = None


# ---------------------------------------------------------------------- writing


def index_of(metadata: Mapping[str, Any], written: list[Written]) -> Index:
    """`metadata`: torch's TensorStorageMetadata by tensor."""
    places = {
        (name, offsets): (file, start, length) for one in written for name, offsets, file, start, length in one.places
    }
    return {
        name: Entry(
            dtype=str(entry.properties.dtype).removeprefix("torch."),
            shape=tuple(entry.size),
            chunks=[
                Chunk(tuple(chunk.offsets), tuple(chunk.sizes), *places[name, tuple(chunk.offsets)])
                for chunk in entry.chunks
            ],
        )
        for name, entry in metadata.items()
    }


# ---------------------------------------------------------------------- reading


def read_state(directory: Path) -> tuple[MegatronState, Index]:
    """Of a complete training state. Raises `TrainStateUnreadable`."""
    files = directory / STATE_DIR
    if not (files / STATE).exists() and (directory / TRAINER_DIR).is_dir():
        raise TrainStateUnreadable(
            f"{directory} holds the state of another backend, which Megatron cannot resume from; resume with the "
            f"--train-backend that the run was started with, or start a new run with --hf-checkpoint "
            f"{directory / MODEL_DIR}"
        )
    try:
        data = read_file(files / STATE)
        check_format(directory, msgspec.json.decode(data, type=_Version).format_version, FORMAT_VERSION)
        state = msgspec.json.decode(data, type=MegatronState)
        for name, size in state.sizes.items():
            found = (files / name).stat().st_size
            if found != size:
                raise OSError(f"{name} has {found} bytes instead of {size}")
        index = msgspec.json.decode(read_file(files / INDEX), type=Index)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TrainStateUnreadable(
            f"{directory} holds no complete training state ({error}); resume from another checkpoint"
        ) from error
    return state, index


class _Version(Struct):
    format_version: int


def torch_metadata(index: Index) -> Any:
    """The index as torch's distributed checkpoints have it."""
    from torch.distributed.checkpoint import metadata
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    tensors, places = {}, {}
    for name, entry in index.items():
        chunks = [metadata.ChunkStorageMetadata(torch.Size(one.offsets), torch.Size(one.shape)) for one in entry.chunks]
        properties = metadata.TensorProperties(dtype=getattr(torch, entry.dtype))
        tensors[name] = metadata.TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
        for one in entry.chunks:
            place = metadata.MetadataIndex(name, torch.Size(one.offsets))
            places[place] = _StorageInfo(one.file, one.start, one.length)
    return metadata.Metadata(state_dict_metadata=tensors, storage_data=places, storage_meta=metadata.StorageMeta())


# --------------------------------------------------------------------------------------------------
# Writing the tensors of a training state: planned together, written by a thread of each process.
#
# Megatron's own asynchronous writer is not used: it forks a process from one that has threads, starts a manager by
# spawn (which hangs without an `if __name__ == "__main__"` guard in the script, and fails in a daemonic process) and
# needs a collective to complete, which waits for training. Here a thread writes, and agrees with those of the others.


class Plan:
    """What this process writes, and in the first one, what all do."""

    def __init__(self, directory: Path, group: Any | None = None) -> None:
        """`group`: over which `write` agrees, on the CPU; None = the default one."""
        self._directory, self._group = directory, group
        self._first = torch.distributed.get_rank() == 0
        self._writer: Any = None
        self._metadata: Any = None
        self.own: dict[str, dict[str, Tensor]] = {}  # further files of this process, in safetensors format

    def prepare(self, tensors: dict[str, Any]) -> None:
        """Agree on who writes what; collective."""
        from megatron.core import parallel_state as ps
        from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
        from megatron.core.dist_checkpointing.strategies import filesystem_async
        from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
        from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

        class Strategy(TorchDistSaveShardedStrategy):  # type: ignore[misc]
            made: tuple[Any, Any]

            def _get_save_and_finalize_callbacks(self, writer: Any, planned: Any) -> None:
                self.made = writer, planned[1]

        strategy = Strategy("torch_dist", 1, thread_count=1)
        sharded, _ = save_preprocess(tensors)
        group = ps.get_data_parallel_group(with_context_parallel=True)
        if group.size() > 1:  # every replica writes a part of the weights; optimizer states are assigned already
            FullyParallelSaveStrategyWrapper(strategy, group).apply_saving_parallelization(sharded["weights"])
        if filesystem_async._results_queue is None:
            filesystem_async._results_queue = queue.SimpleQueue()  # else a process is spawned for a queue that is idle
        strategy.async_save(sharded, self._directory)
        self._writer, self._metadata = strategy.made

    def copy(self, live: set[int]) -> None:
        """Make a copy on the host of all that training goes on to change."""

        def own(tensor: Tensor) -> Tensor:
            if tensor.device.type != "cpu":
                return tensor.detach().cpu()
            return tensor.detach().clone() if tensor.untyped_storage().data_ptr() in live else tensor

        self._writer.write_buckets = [
            (path, name, (data, [(item, own(tensor)) for item, tensor in tensors]))
            for path, name, (data, tensors) in self._writer.write_buckets
        ]

    def write(self, state: MegatronState) -> None:
        """Write this process's part, and in the first one, what makes the files of all a state; collective.

        Raises `OSError` in all processes if one cannot write its part.
        """
        failure: Exception | None = None
        try:
            own = Written(self._write_part())
        except Exception as error:  # raised again once the others know
            failure, own = error, Written(error=f"{type(error).__name__}: {error}")
        finally:
            self._writer.write_buckets = []
        every = gather_bytes(msgspec.json.encode(own), self._group)
        written = [msgspec.json.decode(one, type=Written) for one in every]
        errors = [f"process {rank}: {one.error}" for rank, one in enumerate(written) if one.error is not None]
        if errors:
            raise failure or OSError(f"a checkpoint is incomplete; {'; '.join(errors)}")
        if self._first:
            self._write_for_others(written)
            index = index_of(self._metadata.state_dict_metadata, written)
            (self._directory / INDEX).write_bytes(msgspec.json.encode(index))
            sizes = {file.name: file.stat().st_size for file in sorted(self._directory.iterdir())}
            sync_tree(self._directory)
            whole = msgspec.json.encode(msgspec.structs.replace(state, sizes=sizes))
            write_whole(self._directory / STATE, whole, durable=True)
            sync(self._directory.parent)

    def _write_part(self) -> list[tuple[str, tuple[int, ...], str, int, int]]:
        for name, tensors in self.own.items():
            write_tensors(self._directory / name, tensors)
        return [
            (one.index.fqn, tuple(one.index.offset), stored.relative_path, stored.offset, stored.length)
            for bucket in self._writer.write_buckets
            for one in self._write_bucket(bucket)
            for stored in (one.storage_data,)
        ]

    def _write_bucket(self, bucket: Any) -> list[Any]:
        from torch.distributed.checkpoint.filesystem import SerializationFormat, _write_item

        path, name, (_, tensors) = bucket
        results = []
        with open(path, "wb") as stream:
            for item, tensor in tensors:
                form = SerializationFormat.TORCH_SAVE
                host = tensor.detach().cpu()
                results.append(_write_item(self._writer.transforms, stream, host, item, name, form))
            stream.flush()
            os.fsync(stream.fileno())
        return results

    def _write_for_others(self, written: list[Written]) -> None:
        """The files by which Megatron's own programs know a checkpoint."""
        from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
        from torch.distributed.checkpoint.filesystem import _StorageInfo
        from torch.distributed.checkpoint.metadata import MetadataIndex
        from torch.distributed.checkpoint.storage import WriteResult

        self._metadata.__dict__.pop("all_local_plans", None)  # of use only for a save in the same layout
        results = [
            [
                WriteResult(MetadataIndex(name, torch.Size(offsets)), length, _StorageInfo(file, start, length))
                for name, offsets, file, start, length in one.places
            ]
            for one in written
        ]
        self._writer.finish(self._metadata, results)
        torch.save({"checkpoint_version": 3.0}, self._directory / "common.pt")
        save_config(CheckpointingConfig("torch_dist", 1), str(self._directory))
