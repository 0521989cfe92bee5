"""The processes that train one policy together, seen from one of them.

Every process is handed all sequences of a batch, so that all take the same decisions (what a step consists of, its
denominators, advantages, thresholds) from the same numbers without asking each other. Work is divided by
micro-batches: `packing.micro_batches` assigns to each data-parallel rank its own. The processes of one rank (its
tensor, pipeline and context ranks) compute them together; one of them, `is_mp_src_rank`, hands in the results.

Invariants:
- every method is collective: all processes call the same ones in the same order, also with nothing to give;
- what comes back is bit-identical in every process;
- gradients are summed, never averaged: the step's denominator divides them, once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Float32Array = npt.NDArray[np.float32]
NOT_WRITTEN: Final = "another process could not write its part of the checkpoint; its message says why"
_BUCKET_BYTES: Final = 1 << 26  # of gradients that travel together


class DpGroup:
    """The processes of one trainer; here: this one alone."""

    processes: int = 1  # how many there are
    dp_rank: int = 0  # the data-parallel rank: which part of the micro-batches this process computes
    dp_size: int = 1  # how many data-parallel ranks there are
    # Whether this process hands in its data-parallel rank's results: of the last stage, rank 0 of the others.
    is_mp_src_rank: bool = True

    def gather_by_dp_rank(self, array: Float32Array) -> list[Float32Array]:
        """One-dimensional arrays of the source ranks, by data-parallel rank; lengths may differ."""
        return [array]

    def merge(self, numbers: Mapping[str, float], *, largest: bool = False) -> dict[str, float]:
        """Sums (or maxima) by name over data-parallel ranks; one may lack names, e.g. where it had nothing to do."""
        return dict(numbers)

    def all_reduce_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Replace each gradient by the sum over data-parallel ranks; one that none of them has stays absent.

        For models of which every process holds all.
        """


class DistributedDpGroup(DpGroup):
    """All processes of torch.distributed's default group, by a gloo group over them.

    `gloo`: a group of all processes for numbers, on the CPU, whatever the tensors travel by.
    """

    def __init__(self, *, dp_rank: int, dp_size: int, is_mp_src_rank: bool, gloo: Any | None = None) -> None:
        self.dp_rank, self.dp_size, self.is_mp_src_rank = dp_rank, dp_size, is_mp_src_rank
        self._gloo = gloo
        self.processes: int = torch.distributed.get_world_size()
        mine = torch.tensor([dp_rank if is_mp_src_rank else -1])
        dp_ranks = [int(one.item()) for one in all_gather(mine, gloo)]  # by process; -1: not a source rank
        self._sources = [dp_ranks.index(one) for one in range(dp_size)]

    def gather_by_dp_rank(self, array: Float32Array) -> list[Float32Array]:
        """By data-parallel rank."""
        own = array.astype(np.float32, copy=False).tobytes() if self.is_mp_src_rank else b""
        parts = gather_bytes(own, self._gloo)
        return [np.frombuffer(parts[rank], dtype=np.float32) for rank in self._sources]

    def merge(self, numbers: Mapping[str, float], *, largest: bool = False) -> dict[str, float]:
        """Sums or maxima, in the order of data-parallel ranks."""
        parts = gather_bytes(json.dumps(dict(numbers)).encode() if self.is_mp_src_rank else b"", self._gloo)
        out: dict[str, float] = {}
        for rank in self._sources:
            for name, value in json.loads(parts[rank]).items():
                out[name] = max(out.get(name, value), value) if largest else out.get(name, 0.0) + value
        return out

    def all_reduce_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """All-reduce in buckets, so that many small tensors cost few messages."""
        present = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8)
        torch.distributed.all_reduce(present, op=torch.distributed.ReduceOp.MAX, group=self._gloo)
        chosen = [one for one, any_has in zip(parameters, present.tolist(), strict=True) if any_has]
        for parameter in chosen:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for bucket in torch._utils._take_tensors([one.grad for one in chosen], _BUCKET_BYTES):
            flat = torch._utils._flatten_dense_tensors(bucket)
            torch.distributed.all_reduce(flat)
            torch._foreach_copy_(bucket, torch._utils._unflatten_dense_tensors(flat, bucket))


@contextmanager
def together(otherwise: Exception, group: Any | None = None) -> Iterator[None]:
    """A block that raises in all processes if it does in one; collective. `otherwise`: raised where it ended well."""
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    failed = torch.tensor([error is not None], dtype=torch.uint8)
    torch.distributed.all_reduce(failed, op=torch.distributed.ReduceOp.MAX, group=group)
    if error is not None:
        raise error
    if failed.item():
        raise otherwise


class BackgroundSave:
    """What a thread of each process still writes of a checkpoint; the thread may outlive the main one.

    `group`: over which the processes exchange how it ended.
    """

    def __init__(self, group: Any | None = None) -> None:
        self._thread, self._group = ThreadPoolExecutor(1, "checkpoint"), group
        self.pending: Future[None] | None = None

    def begin(self, complete: Callable[[], None]) -> None:
        """Let the thread complete a save. The one before is finished."""
        self.pending = self._thread.submit(complete)

    def finish(self) -> None:
        """Wait until the save that was begun is on disk in all processes; collective. Raises what went wrong here, or
        `OSError` for what went wrong elsewhere."""
        if self.pending is not None:
            pending, self.pending = self.pending, None
            with together(OSError(NOT_WRITTEN), self._group):
                pending.result()


def gather_bytes(data: bytes, group: Any | None) -> list[bytes]:
    """Of all processes of a group on the CPU, by rank. Padded to the longest on the way; collective."""
    lengths = [int(one.item()) for one in all_gather(torch.tensor([len(data)]), group)]
    padded = np.zeros(max(lengths), dtype=np.uint8)
    padded[: len(data)] = np.frombuffer(data, dtype=np.uint8)
    if not padded.size:
        return [b"" for _ in lengths]
    parts = all_gather(torch.from_numpy(padded), group)
    return [part.numpy()[:size].tobytes() for part, size in zip(parts, lengths, strict=True)]


def all_gather(own: Tensor, group: Any | None) -> list[Tensor]:
    """The tensors of all processes of a group, by rank; collective.

    Called on the group itself: what a thread still writes goes on when the process has destroyed its groups.
    """
    group = torch.distributed.group.WORLD if group is None else group
    own = own.contiguous()
    parts = [torch.empty_like(own) for _ in range(group.size())]
    group.allgather([parts], [own]).wait()
    return parts
