"""What several processes that train one policy together must agree on: sums over all of them.

Each process holds a shard of the sequences. Denominators, whitening, the facts of a step, metrics and gradients are
those of all shards together, so that the update is that of one process with all sequences.

Invariants:
- every method is collective: all processes call the same ones in the same order, also with nothing to give;
- what comes back is bit-identical in every process, so that they take the same decisions from it;
- gradients are summed, never averaged: the step's denominator divides them, once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

FloatArray = npt.NDArray[np.float64]
_BUCKET_ELEMENTS: Final = 1 << 24  # of gradients that travel together


class Reducer(Protocol):
    """The processes that share a batch, seen from one of them."""

    @property
    def rank(self) -> int:
        """Which of the processes this is, from 0 on."""

    @property
    def world(self) -> int:
        """How many processes there are."""

    def gather(self, array: npt.NDArray[np.generic]) -> list[npt.NDArray[np.generic]]:
        """One-dimensional arrays of all processes in a fixed order; lengths may differ, the dtype may not."""

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all processes. Shapes and dtypes are the same everywhere."""


class LocalReducer:
    """One process alone."""

    rank = 0
    world = 1

    def gather(self, array: npt.NDArray[np.generic]) -> list[npt.NDArray[np.generic]]:
        """The array itself."""
        return [array]

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Nothing: the sum over one process."""


class ProcessGroupReducer:
    """The processes of a torch.distributed group (gloo: `device` cpu; NCCL: the process's own CUDA device)."""

    def __init__(self, group: torch.distributed.ProcessGroup | None = None, *, device: torch.device | None = None):
        self._group = group
        self._device = torch.device("cpu") if device is None else device
        self.rank = torch.distributed.get_rank(group)
        self.world = torch.distributed.get_world_size(group)

    def gather(self, array: npt.NDArray[np.generic]) -> list[npt.NDArray[np.generic]]:
        """Arrays of all processes, by rank. Travels as bytes, padded to the longest."""
        data = np.frombuffer(np.ascontiguousarray(array).tobytes(), dtype=np.uint8)
        lengths = [int(one.item()) for one in self._all_gather(torch.tensor([data.size]))]
        padded = np.zeros(max(lengths), dtype=np.uint8)
        padded[: data.size] = data
        parts = self._all_gather(torch.from_numpy(padded)) if padded.size else []
        found = [part.cpu().numpy()[:size].tobytes() for part, size in zip(parts, lengths, strict=True)]
        return [np.frombuffer(part, dtype=array.dtype) for part in found] or [array[:0]] * self.world

    def _all_gather(self, own: Tensor) -> list[Tensor]:
        own = own.to(self._device)
        parts = [torch.empty_like(own) for _ in range(self.world)]
        torch.distributed.all_gather(parts, own, group=self._group)
        return parts

    def add(self, tensors: Sequence[Tensor]) -> None:
        """All-reduce in buckets, so that many small tensors cost few messages."""
        bucket: list[Tensor] = []
        for tensor in tensors:
            if bucket and (
                tensor.dtype != bucket[0].dtype or sum(t.numel() for t in bucket) + tensor.numel() > _BUCKET_ELEMENTS
            ):
                self._add_bucket(bucket)
                bucket = []
            bucket.append(tensor)
        if bucket:
            self._add_bucket(bucket)

    def _add_bucket(self, bucket: Sequence[Tensor]) -> None:
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        torch.distributed.all_reduce(flat, group=self._group)
        for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(part.view_as(tensor))


def gathered(reducer: Reducer, array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """The arrays of all processes, one behind the other."""
    return np.concatenate(reducer.gather(array))


def total(reducer: Reducer, values: FloatArray) -> FloatArray:
    """Elementwise sum [k] over all processes, in a fixed order."""
    summed: FloatArray = np.sum(reducer.gather(values), axis=0, dtype=np.float64)
    return summed


def merged(reducer: Reducer, numbers: Mapping[str, float], *, largest: bool = False) -> dict[str, float]:
    """Sums (or maxima) by name over all processes; a process may lack names, e.g. where it had no sequence."""
    if reducer.world == 1:
        return dict(numbers)
    text = np.frombuffer(json.dumps(dict(numbers)).encode(), dtype=np.uint8)
    out: dict[str, float] = {}
    for part in reducer.gather(text):
        for name, value in json.loads(part.tobytes()).items():
            out[name] = max(out.get(name, value), value) if largest else out.get(name, 0.0) + value
    return out


def add_gradients(reducer: Reducer, parameters: Sequence[torch.nn.Parameter]) -> None:
    """Sum the gradients of all processes; one that no process has stays absent."""
    if reducer.world == 1:
        return
    present = np.array([parameter.grad is not None for parameter in parameters], dtype=np.uint8)
    wanted = np.max(reducer.gather(present), axis=0)
    chosen = [parameter for parameter, any_has in zip(parameters, wanted, strict=True) if any_has]
    for parameter in chosen:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    reducer.add([parameter.grad for parameter in chosen if parameter.grad is not None])
