"""Writing end of the weight slots: two Hugging Face directories in shared memory, overwritten in turns.

Invariants:
- each slot's file is allocated and mapped once, and taken over where an owner was killed, since readers have it mapped;
  its header never changes, so any reader of safetensors can load it;
- the counter of a slot is odd from before the first byte of a write until after the last one, also if it fails;
- the newest complete version is never the one being overwritten; a write that failed leaves it in place, and the next
  write takes the same slot again;
- the announcement (the returned manifest) exists only after the write has finished;
- every byte of a contiguous tensor is copied once, and read once more for its digest, as soon as its piece is whole;
  several threads do so.

The caller must know whether readers have finished with the older slot: `next_path` is the slot of the next write.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from configs.schema.model_shapes import SCALE, fp8_block
from models.disk import remove
from models.errors import LayoutMismatch, SlotSpaceError, SourceError
from models.families.source import copy_all_but_weights, files_by_name, prediction_layers, read_hf_config
from models.weights.layout import (
    ELEMENT_BYTES,
    TORCH_NAMES,
    WEIGHTS_FILE,
    Layout,
    StoredTensor,
    TensorRange,
    TensorSpec,
    lay_out,
    read_layout,
)
from models.weights.shared_memory_reader import (
    PIECE_BYTES,
    SLOT,
    STATE_FILE,
    THREADS,
    SlotManifest,
    digest_of,
    fold_digests,
    in_pieces,
)
from models.weights.slot_directory import DirectoryLease

if TYPE_CHECKING:
    import torch

SLOTS: Final = 2
ASIDE_BYTES: Final = 1 << 20  # a smaller part is copied by the calling thread: a hand-over would take longer
AHEAD: Final = 4 * THREADS  # copies under way before the next one waits for the oldest

Exported = Iterator[tuple[str, "torch.Tensor | StoredTensor"]]  # names and tensors of one version


class _Slot:
    """One directory with its two mappings and the range of each tensor."""

    def __init__(self, directory: Path, layout: Layout) -> None:
        self.path = directory
        self._map = _allocated(directory / WEIGHTS_FILE, layout.file_bytes)
        self._map[: layout.data_start] = layout.header
        self.state = np.frombuffer(_allocated(directory / STATE_FILE, 8), dtype=np.uint64)
        self.data_start = layout.data_start
        self.bytes = np.frombuffer(self._map, dtype=np.uint8)
        self.data = self.bytes[layout.data_start :]
        self.tensors = {item.spec.name: item for item in layout.tensors}

    def begin(self) -> None:
        """Make the counter odd. A slot whose last write failed is odd already and moves to the next odd number."""
        counter = int(self.state[0])
        self.state[0] = counter + 2 if counter % 2 else counter + 1

    def target_and_source(self, place: TensorRange, tensor: torch.Tensor | StoredTensor) -> tuple[Any, Any]:
        """A tensor's place and its values, both flat, of elements of one size: bytes, where nothing is cast."""
        if isinstance(tensor, StoredTensor):
            return self.bytes[place.start : place.end], np.frombuffer(tensor.data, np.uint8)
        import torch  # loaded already by the maker of the tensor

        from models.weights.transfer import tensor_view

        target, flat = tensor_view(self._map, place.spec, place.start).view(-1), tensor.detach().reshape(-1)
        if flat.device.type != "cpu" or flat.dtype != target.dtype:
            return target, flat
        # One thread of numpy copies as fast as two of torch.
        return self.bytes[place.start : place.end], flat.view(torch.uint8).numpy()

    def finish(self) -> int:
        """The new generation."""
        self.state[0] += np.uint64(1)
        return int(self.state[0])


class _ParallelWrite:
    """One write: tensors are copied in pieces by several threads, and each piece is digested once it is whole."""

    def __init__(self, slot: _Slot, threads: ThreadPoolExecutor) -> None:
        self._slot, self._threads = slot, threads
        self._pieces = [slot.data[start : start + PIECE_BYTES] for start in range(0, len(slot.data), PIECE_BYTES)]
        self._missing = [len(piece) for piece in self._pieces]  # bytes
        self._digests = [b""] * len(self._pieces)
        self._lock = threading.Lock()
        self._copies: deque[Future[None]] = deque()

    def put(self, place: TensorRange, tensor: torch.Tensor | StoredTensor) -> None:
        """Copy it to its place. Waits while many copies are under way: a tensor may exist for its copy alone."""
        target, source = self._slot.target_and_source(place, tensor)
        start, end = place.start - self._slot.data_start, place.end - self._slot.data_start
        for number, begin, stop in in_pieces(start, end):
            part = slice((begin - start) // target.itemsize, (stop - start) // target.itemsize)
            if stop - begin < ASIDE_BYTES:
                self._copy(number, stop - begin, target[part], source[part])
            else:
                if len(self._copies) > AHEAD:
                    self._copies.popleft().result()
                self._copies.append(self._threads.submit(self._copy, number, stop - begin, target[part], source[part]))

    def folded(self) -> str:
        """The digest of the slot, once all tensors are written. Waits for the last pieces."""
        for copy in self._copies:
            copy.result()
        return fold_digests(self._digests)

    def _copy(self, number: int, nbytes: int, target: Any, source: Any) -> None:
        """A part of a tensor, which lies in one piece."""
        target.copy_(source) if hasattr(target, "copy_") else np.copyto(target, source)
        with self._lock:
            self._missing[number] -= nbytes
            if self._missing[number]:
                return
        self._digests[number] = digest_of(self._pieces[number])


class SlotWriter:
    """Publishes weights by version into two reused slots of one machine.

    Args:
        directory: where the slots go, e.g. from `choose_directory`; created 0700, removed by `close`.
        leased: the caller holds the `DirectoryLease` of a directory that exists, and removes it.
        source_checkpoint: Hugging Face directory whose tensors (names, shapes), configuration and tokenizer the slots
            take over, and to whose types written tensors are cast, or quantised where it has scales of blocks.

    Raises CheckpointUnavailable, SourceError, SlotDirectoryError, SlotSpaceError.
    """

    def __init__(self, directory: Path, source_checkpoint: Path, *, leased: bool = False) -> None:
        files = sorted(set(files_by_name(source_checkpoint).values()))
        config = read_hf_config(source_checkpoint)
        self._block = fp8_block(config)
        # What a checkpoint may store although no export has it; a head that is the embedding may be in either.
        absent = [*prediction_layers(config), r".*\.rotary_emb\.inv_freq"]
        absent += [r"lm_head\.weight"] if config.get("tie_word_embeddings") else []
        self._absent = re.compile("|".join(absent))
        self.layout = lay_out(_slot_specs(files, self._absent))
        self._lease = None if leased else DirectoryLease(directory)
        self._next, self._slots = 0, list[_Slot]()
        try:
            self._slots = [self._make_slot(directory / f"{SLOT}{i}", source_checkpoint) for i in range(SLOTS)]
        except BaseException:
            self.close()
            raise

    @property
    def next_path(self) -> Path:
        """The slot that the next write overwrites."""
        return self._slots[self._next].path

    def write(self, version: int, run_generation: int, tensors: Exported) -> SlotManifest:
        """Copy one version into the older slot and return its manifest.

        `tensors` must name every tensor of the layout once, in any order and on any device. Raises LayoutMismatch
        (unknown, repeated, missing or misshapen tensor); whatever is raised, the other slot stays valid.
        """
        slot = self._slots[self._next]
        slot.begin()
        seen: set[str] = set()
        coarsest = 8
        torch = sys.modules.get("torch")  # without it there is nothing to compute, and no graph of it
        with torch.no_grad() if torch else contextlib.nullcontext(), ThreadPoolExecutor(THREADS, "slot") as threads:
            writing = _ParallelWrite(slot, threads)
            for name, tensor in self._as_stored(tensors):
                place = _place(slot, name, tensor, seen, version)
                writing.put(place, tensor)
                seen.add(name)
                coarsest = min(coarsest, ELEMENT_BYTES[place.spec.dtype], _element_bytes(tensor))
        missing = slot.tensors.keys() - seen
        if missing:
            raise LayoutMismatch(
                f"version {version} lacks {len(missing)} of {len(slot.tensors)} tensors, {min(missing)!r} among them; "
                "export exactly the names of the source checkpoint"
            )
        manifest = SlotManifest(run_generation, version, str(slot.path), writing.folded(), slot.finish(), coarsest)
        self._next = (self._next + 1) % SLOTS
        return manifest

    def _as_stored(self, tensors: Exported) -> Exported:
        """Those that slots have, quantised as in the source."""
        places, cast = self._slots[0].tensors, TORCH_NAMES.keys()
        for name, tensor in tensors:
            if self._absent.fullmatch(name):
                continue
            place = places.get(name)
            if isinstance(tensor, StoredTensor) and place and tensor.spec.dtype in cast - {place.spec.dtype}:
                from models.weights.transfer import tensor_view

                tensor = tensor_view(bytearray(tensor.data), tensor.spec)
            if self._block is None or isinstance(tensor, StoredTensor) or name + SCALE not in places:
                yield name, tensor
                continue
            from models.families.fp8 import quantised

            yield from zip((name, name + SCALE), quantised(tensor, self._block), strict=True)

    def close(self) -> None:
        """Remove the directory. Memory goes back once the last reader has dropped its mapping. May be called twice."""
        self._slots.clear()
        if self._lease is not None:
            self._lease.release()

    def _make_slot(self, path: Path, source: Path) -> _Slot:
        fits = _is_laid_out(path / WEIGHTS_FILE, self.layout)
        for left in path.iterdir() if path.is_dir() else ():  # by an owner that was killed
            if not fits or left.name not in (WEIGHTS_FILE, STATE_FILE):
                remove(left)
        path.mkdir(mode=0o700, exist_ok=True)
        try:
            copy_all_but_weights(source, path)
            return _Slot(path, self.layout)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
                raise SlotSpaceError(
                    f"{path}: no room for two slots of {self.layout.file_bytes} bytes; free space there or put the "
                    "slots into a directory on disk"
                ) from error
            raise


def _place(slot: _Slot, name: str, tensor: torch.Tensor | StoredTensor, seen: set[str], version: int) -> TensorRange:
    """The range that a tensor goes to. Raises LayoutMismatch."""
    place = slot.tensors.get(name)
    if place is None or name in seen:
        problem = "was offered twice" if name in seen else "is not in the slot's layout"
        raise LayoutMismatch(
            f"tensor {name!r} of version {version} {problem}; export each name of the source checkpoint once"
        )
    shape = tensor.spec.shape if isinstance(tensor, StoredTensor) else tuple(tensor.shape)
    if shape != place.spec.shape:
        raise LayoutMismatch(
            f"tensor {name!r} of version {version} has shape {shape}, the slot was laid out for "
            f"{place.spec.shape}; export whole tensors in Hugging Face shapes"
        )
    if isinstance(tensor, StoredTensor) and tensor.spec.dtype != place.spec.dtype:
        raise LayoutMismatch(
            f"tensor {name!r} of version {version} is stored as {tensor.spec.dtype}, the slot was laid out for "
            f"{place.spec.dtype}; only floating-point numbers are cast"
        )
    return place


def _element_bytes(tensor: torch.Tensor | StoredTensor) -> int:
    return ELEMENT_BYTES[tensor.spec.dtype] if isinstance(tensor, StoredTensor) else tensor.element_size()


def _slot_specs(files: Sequence[Path], absent: re.Pattern[str]) -> list[TensorSpec]:
    specs = [item.spec for file in files for item in read_layout(file).tensors if not absent.fullmatch(item.spec.name)]
    names = {spec.name for spec in specs}
    for spec in specs:
        if spec.dtype not in TORCH_NAMES or (spec.dtype == "F8_E4M3" and spec.name + SCALE not in names):
            raise SourceError(
                f"{files[0].parent}: tensor {spec.name!r} has dtype {spec.dtype}; slots hold {', '.join(TORCH_NAMES)}, "
                f"the last with {SCALE} beside it: use a checkpoint in bfloat16, or one in float8 with scales of blocks"
            )
    return specs


def _is_laid_out(path: Path, layout: Layout) -> bool:
    with contextlib.suppress(OSError), path.open("rb") as file:
        return os.fstat(file.fileno()).st_size == layout.file_bytes and file.read(layout.data_start) == layout.header
    return False


def _allocated(path: Path, nbytes: int) -> mmap.mmap:
    """A file whose every byte is backed: a sparse one would end the writer with SIGBUS when memory runs out."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
        return mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)
