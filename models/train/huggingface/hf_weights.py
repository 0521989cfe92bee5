"""Whole weights under Hugging Face names, as `save_pretrained` would write them, out of one process or out of shards.

Invariants: names, order and values are the same however a model is sharded; a tensor shared by two names appears once,
under the name that a checkpoint stores; no more than one bucket (a decoder layer, or one tensor that belongs to none)
is gathered at a time, from the shards that the optimizer updates; what is whole already is not copied unless its
precision changes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_LAYER = re.compile(r"^(.*\.\d+)\.")


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor; a view."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor without its sharding, in `dtype` if it is floating-point; gathered on `device`. Collective."""
    tensor = _cast(tensor.detach(), dtype)  # before it travels
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.to_local().device != device and device.type == "cuda":  # offloaded: gathered on the GPU
        tensor = DTensor.from_local(
            tensor.to_local().to(device),
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
    return tensor.full_tensor()


def hf_tensors(
    model: Any,
    *,
    device: torch.device,
    dtype: torch.dtype | None,
    sort: bool,
    first: bool = True,
    merged: Mapping[str, Callable[[], Tensor]] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of all weights, as a checkpoint stores them; nothing but in the first process.

    Collective: run it to its end everywhere. `dtype`: what floating-point tensors are cast to; `sort`: whether the
    model's weights are converted on the way, which sorts them; `merged`: what makes each whole weight, where it is not
    simply a parameter.
    """
    from transformers.core_model_loading import dot_natural_key, revert_weight_conversion

    if merged is None:
        state = _holders(model)
        merged = {name: partial(whole, state[name], device, dtype) for name in stored_names(model)}
    names = sorted(merged, key=dot_natural_key) if sort else list(merged)
    for bucket in buckets(names):
        # All gather before one converts: what the first process does with them must not hold up the others.
        found = {name: _cast(merged[name](), dtype) for name in bucket}
        if first:
            # Some architectures fuse weights in memory (experts, for instance) that checkpoints store one by one.
            yield from ((name, tensor.contiguous()) for name, tensor in revert_weight_conversion(model, found).items())


def converts(model: Any) -> bool:
    """Whether checkpoints of a loaded model store some of its weights in another form, sorted by name."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    if getattr(model, "_weight_conversions", None) is not None:
        return True
    return bool(get_model_conversion_mapping(model, add_legacy=False))


def buckets(names: Sequence[str]) -> Iterator[list[str]]:
    """Names of one layer together, others alone, in the order given."""

    def layer(name: str) -> str:
        found = _LAYER.match(name)
        return found.group(1) if found else name

    return (list(group) for _, group in groupby(names, key=layer))


def stored_names(model: Any) -> list[str]:
    """Names of all weights of a model, in the order of its state, each shared tensor under the name that is stored."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    holders = _holders(model)
    names = list(model.state_dict().keys())
    seen: set[int] = set()
    out = []
    # Names that a checkpoint leaves out come last, so that the stored name of a shared tensor is the one that is kept.
    for name in [n for n in names if n not in tied] + [n for n in names if n in tied]:
        if id(holders[name]) not in seen:
            seen.add(id(holders[name]))
            out.append(name)
    return out


def model_tensors(model: Any) -> dict[str, Tensor]:
    """Parameters, each shared one once, and what else a checkpoint would hold."""
    kept = model.state_dict()
    found = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return found | {name: buffer for name, buffer in model.named_buffers() if name in kept}


def _holders(model: Any) -> dict[str, Tensor]:
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
