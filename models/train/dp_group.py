"""The processes that train one policy together, seen from one of them.

Every process is handed all sequences of a batch, so that all take the same decisions (what a step consists of, its
denominators, advantages, thresholds) from the same numbers without asking each other. Work is shared by micro-batches:
`dealing` gives each *share* its own. Several processes may compute one share together (tensor, pipeline and context
parallel); one of them speaks for it.

Invariants:
- every method is collective: all processes call the same ones in the same order, also with nothing to give;
- what comes back is bit-identical in every process;
- gradients are summed, never averaged: the step's denominator divides them, once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Float32Array = npt.NDArray[np.float32]
_BUCKET_ELEMENTS: Final = 1 << 24  # of gradients that travel together


class DpGroup(Protocol):
    """The processes of one trainer."""

    @property
    def processes(self) -> int:
        """How many processes there are."""

    @property
    def speaks(self) -> bool:
        """Whether this process speaks for its share."""

    @property
    def dp_rank(self) -> int:
        """Which share of the micro-batches this process computes, from 0 on."""

    @property
    def dp_size(self) -> int:
        """How many shares there are."""

    def gather_by_dp_rank(self, array: Float32Array) -> list[Float32Array]:
        """One-dimensional arrays of those who speak, by share; lengths may differ. What others give is not used."""

    def merge(self, numbers: Mapping[str, float], *, largest: bool = False) -> dict[str, float]:
        """Sums (or maxima) by name over the shares; a share may lack names, e.g. where it had nothing to do."""

    def all_reduce_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Replace each gradient by the sum over the shares; one that no share has stays absent.

        For models of which every process holds all.
        """


class Alone:
    """One process."""

    processes = 1
    speaks = True
    dp_rank = 0
    dp_size = 1

    def gather_by_dp_rank(self, array: Float32Array) -> list[Float32Array]:
        """The array itself."""
        return [array]

    def merge(self, numbers: Mapping[str, float], *, largest: bool = False) -> dict[str, float]:
        """The numbers themselves."""
        return dict(numbers)

    def all_reduce_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Nothing: the sum over one process."""


class DistributedDpGroup:
    """All processes of torch.distributed's default group, by a gloo group over them.

    `gloo`: a group of all processes for numbers, on the CPU, whatever the tensors travel by. `data_group`: those that
    compute the same part of the model, one per share, for `all_reduce_gradients`; None = all processes.
    """

    def __init__(
        self,
        *,
        dp_rank: int,
        dp_size: int,
        speaks: bool,
        gloo: Any | None = None,
        data_group: Any | None = None,
    ) -> None:
        self.dp_rank, self.dp_size, self.speaks = dp_rank, dp_size, speaks
        self._gloo = gloo
        self._data_group = data_group
        self.processes: int = torch.distributed.get_world_size()
        mine = torch.tensor([dp_rank if speaks else -1])
        shares = [int(one.item()) for one in self._all_gather(mine)]
        if sorted(share for share in shares if share >= 0) != list(range(dp_size)):
            raise ValueError(f"the shares that processes speak for are {shares}; each of {dp_size} needs one")
        self._speakers = [shares.index(share) for share in range(dp_size)]

    def gather_by_dp_rank(self, array: Float32Array) -> list[Float32Array]:
        """Arrays of those who speak."""
        parts = self._gather_bytes(array.astype(np.float32, copy=False).tobytes() if self.speaks else b"")
        return [np.frombuffer(parts[rank], dtype=np.float32) for rank in self._speakers]

    def merge(self, numbers: Mapping[str, float], *, largest: bool = False) -> dict[str, float]:
        """Sums or maxima, in the order of the shares."""
        parts = self._gather_bytes(json.dumps(dict(numbers)).encode() if self.speaks else b"")
        out: dict[str, float] = {}
        for rank in self._speakers:
            for name, value in json.loads(parts[rank]).items():
                out[name] = max(out.get(name, value), value) if largest else out.get(name, 0.0) + value
        return out

    def all_reduce_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """All-reduce in buckets, so that many small tensors cost few messages."""
        present = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8)
        torch.distributed.all_reduce(present, op=torch.distributed.ReduceOp.MAX, group=self._gloo)
        chosen = [one for one, any_has in zip(parameters, present.tolist(), strict=True) if any_has]
        bucket: list[Tensor] = []
        for parameter in chosen:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = parameter.grad
            size = sum(one.numel() for one in bucket) + gradient.numel()
            if bucket and (gradient.dtype != bucket[0].dtype or size > _BUCKET_ELEMENTS):
                self._add_bucket(bucket)
                bucket = []
            bucket.append(gradient)
        if bucket:
            self._add_bucket(bucket)

    def _add_bucket(self, bucket: Sequence[Tensor]) -> None:
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        torch.distributed.all_reduce(flat, group=self._data_group)
        for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def _gather_bytes(self, data: bytes) -> list[bytes]:
        """Of all processes, by rank. Padded to the longest on the way."""
        lengths = [int(one.item()) for one in self._all_gather(torch.tensor([len(data)]))]
        padded = np.zeros(max(lengths), dtype=np.uint8)
        padded[: len(data)] = np.frombuffer(data, dtype=np.uint8)
        if not padded.size:
            return [b""] * self.processes
        parts = self._all_gather(torch.from_numpy(padded))
        return [part.numpy()[:size].tobytes() for part, size in zip(parts, lengths, strict=True)]

    def _all_gather(self, own: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(own) for _ in range(self.processes)]
        torch.distributed.all_gather(parts, own, group=self._gloo)
        return parts
