"""Whole weights out of shards, bucket by bucket, under the names of a checkpoint.

Invariants: names, order and values are those of `weights_io.hf_tensors` for the same model in one process; no more
than one bucket (a decoder layer, or one tensor that belongs to none) is whole at a time; a parameter is gathered from
the shards that the optimizer updates, never from a gathered copy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from models.train.huggingface.hf_weights import convert, dot_natural, stored_names

_LAYER = re.compile(r"^(.*\.\d+)\.")


def whole(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor without its sharding, on `device`, in `dtype` if it is floating-point. Collective."""
    if not isinstance(tensor, DTensor):
        return _cast(tensor.detach(), dtype).to(device)
    placed = _cast(tensor.detach(), dtype)  # before it travels
    if placed.to_local().device != device and device.type == "cuda":  # offloaded: gathered on the GPU
        placed = DTensor.from_local(
            placed.to_local().to(device),
            placed.device_mesh,
            placed.placements,
            run_check=False,
            shape=placed.shape,
            stride=placed.stride(),
        )
    return placed.full_tensor()


def buckets(names: Sequence[str]) -> Iterator[list[str]]:
    """Names of one layer together, others alone, in the order given."""

    def layer(name: str) -> str:
        found = _LAYER.match(name)
        return found.group(1) if found else name

    return (list(group) for _, group in groupby(names, key=layer))


def gathered(
    model: Any,
    *,
    first: bool,
    device: torch.device,
    dtype: torch.dtype | None,
    sort: bool,
    tensor_of: Callable[[str], Tensor] | None = None,
    names: Sequence[str] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of all weights, as a checkpoint stores them; nothing but in the first process.

    Collective: run it to its end everywhere. `sort`: whether the model's weights are converted on the way, which sorts
    them; `tensor_of`: the whole tensor of a name, if it is not simply a parameter; `names`: of `tensor_of`.
    """
    if tensor_of is None:
        state = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))

        def tensor_of(name: str) -> Tensor:
            return whole(state[name], device, dtype)

    names = stored_names(model) if names is None else list(names)
    if sort:
        names = sorted(names, key=dot_natural)
    for bucket in buckets(names):
        # All gather before one converts: what the first process does with them must not hold up the others.
        found = {name: _cast(tensor_of(name), dtype) for name in bucket}
        if first:
            yield from ((name, tensor.contiguous()) for name, tensor in convert(model, found))


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
