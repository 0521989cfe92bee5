"""The files of a Megatron training state.

    directory/megatron/__<process>_0.distcp   tensors, as Megatron's dist_checkpointing writes them
    directory/megatron/.metadata, common.pt, metadata.json   for other programs; never read here, since two are pickles
    directory/megatron/index.json             where each tensor lies
    directory/megatron/random-<process>.safetensors          random states
    directory/megatron/state.json             counters, layout, sizes of all files

Invariants:
- `state.json` is written last, when the files of all processes are on disk: a directory without it is incomplete;
- nothing that could run code is read: the index is JSON, tensors are read with `weights_only`;
- processes agree by files, not by collectives, so that a state can be completed while the next batch trains.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from msgspec import Struct

from models.train.errors import TrainStateUnreadable
from models.train.huggingface.hf_files import sync, sync_tree
from models.train.huggingface.state_files import MODEL_DIR, TRAINER_DIR

STATE_DIR: Final = "megatron"
STATE: Final = "state.json"
INDEX: Final = "index.json"
FORMAT_VERSION: Final = 1
_STALLED_S: Final = 1800.0  # without a sign of another process
_POLL_S: Final = 0.02


class ModelCounters(Struct, frozen=True):
    """Of one model with an optimizer."""

    updates: int
    adam_steps: int


class MegatronState(Struct, frozen=True, kw_only=True):
    """What `state.json` holds."""

    models: dict[str, ModelCounters]  # policy, critic
    parts: tuple[str, ...] = ()  # further tensors: reference
    batches: int
    steps: int
    skipped_steps: int
    empty_steps: int
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
    """Says that one process's files are on disk, or why they are not."""

    places: list[tuple[str, tuple[int, ...], str, int, int]] = []  # tensor, offsets, file, start, length
    error: str | None = None


# ---------------------------------------------------------------------- writing


class Saving:
    """A state on its way to disk, as one process sees it."""

    def __init__(self, write: Callable[[], None]) -> None:
        """`write`: runs in a thread that outlives the main one, and leaves its failure behind."""
        self._write = write
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=False)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._write()
        except Exception as error:  # handed to the next call of `wait`, in the thread that trains
            self.error = error

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def wait(self) -> None:
        """Return once this process has written its part. What failed is in `error`."""
        self._thread.join()


def begin(directory: Path, rank: int) -> None:
    """Announce that this process is going to write. All do before the first one collects."""
    _announced(directory, rank).touch()


def give_up(directory: Path, rank: int, error: Exception) -> None:
    """Tell the first process that this one failed, also when the disk is full: taking a file away needs no room."""
    with contextlib.suppress(OSError):
        mark(directory, rank, Written(error=f"{type(error).__name__}: {error}"))
    _announced(directory, rank).unlink()


def mark(directory: Path, rank: int, written: Written) -> None:
    """Tell the first process that this one is done."""
    path = _mark(directory, rank)
    aside = path.with_suffix(".part")
    aside.write_bytes(msgspec.json.encode(written))
    aside.replace(path)


def collect(directory: Path, world: int) -> list[Written]:
    """Wait for the marks of all processes. Raises `OSError` if one failed or shows no sign of life for 30 minutes."""
    found: dict[int, Written] = {}
    seen_s, pause_s = time.monotonic(), _POLL_S
    while True:
        there = {path.name for path in directory.iterdir()}
        for rank in range(world):
            path = _mark(directory, rank)
            if rank in found:
                continue
            if path.name in there:
                found[rank] = msgspec.json.decode(path.read_bytes(), type=Written)
                seen_s, pause_s = time.monotonic(), _POLL_S
            elif _announced(directory, rank).name not in there and not path.exists():
                found[rank] = Written(error="it could not write, not even why")
        if len(found) == world:
            break
        if time.monotonic() - seen_s > _STALLED_S:
            missing = sorted(set(range(world)) - found.keys())
            raise OSError(f"processes {missing} did not write their part of {directory} within {_STALLED_S:.0f} s")
        time.sleep(pause_s)
        pause_s = min(1.0, 1.5 * pause_s)
    errors = [f"process {rank}: {one.error}" for rank, one in sorted(found.items()) if one.error is not None]
    if errors:
        raise OSError(f"{directory} is incomplete; {'; '.join(errors)}")
    return [found[rank] for rank in range(world)]


def _mark(directory: Path, rank: int) -> Path:
    return directory / f".written-{rank:05d}.json"


def _announced(directory: Path, rank: int) -> Path:
    return directory / f".writing-{rank:05d}"


def complete(directory: Path, state: MegatronState, index: Index, world: int) -> None:
    """Write what makes a state of files, the first process, after all have marked theirs."""
    (directory / INDEX).write_bytes(msgspec.json.encode(index))
    for rank in range(world):
        _mark(directory, rank).unlink()
        _announced(directory, rank).unlink()
    sizes = {file.name: file.stat().st_size for file in sorted(directory.iterdir())}
    sync_tree(directory)
    aside = directory / f".{STATE}.part"
    aside.write_bytes(msgspec.json.encode(msgspec.structs.replace(state, sizes=sizes)))
    sync(aside)
    aside.replace(directory / STATE)
    sync(directory)
    sync(directory.parent)


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
        data = (files / STATE).read_bytes()
        version = msgspec.json.decode(data, type=_Version).format_version
        if version != FORMAT_VERSION:
            raise TrainStateUnreadable(
                f"{directory} has format version {version}, this program reads {FORMAT_VERSION}; resume with the "
                "program version that wrote it"
            )
        state = msgspec.json.decode(data, type=MegatronState)
        for name, size in state.sizes.items():
            found = (files / name).stat().st_size
            if found != size:
                raise OSError(f"{name} has {found} bytes instead of {size}")
        index = msgspec.json.decode((files / INDEX).read_bytes(), type=Index)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TrainStateUnreadable(
            f"{directory} holds no complete training state ({error}); resume from another checkpoint"
        ) from error
    return state, index


class _Version(Struct):
    format_version: int


def torch_metadata(index: Index) -> Any:
    """The index as torch's distributed checkpoints have it."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    tensors, places = {}, {}
    for name, entry in index.items():
        chunks = [ChunkStorageMetadata(torch.Size(one.offsets), torch.Size(one.shape)) for one in entry.chunks]
        properties = TensorProperties(dtype=getattr(torch, entry.dtype))
        tensors[name] = TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
        for one in entry.chunks:
            places[MetadataIndex(name, torch.Size(one.offsets))] = _StorageInfo(one.file, one.start, one.length)
    return Metadata(state_dict_metadata=tensors, storage_data=places, storage_meta=StorageMeta())
