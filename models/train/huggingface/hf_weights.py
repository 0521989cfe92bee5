"""Weights under Hugging Face names, as `save_pretrained` would write them.

Invariants: the order is fixed for a model; a tensor shared by two names appears once, under the name that a
checkpoint stores; what is yielded is not copied unless its precision changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch


def hf_tensors(model: Any, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of all weights; floating-point tensors are cast to `dtype` if one is given."""
    tensors = model.state_dict()
    for name, tensor in convert(model, {name: tensors[name] for name in stored_names(model)}):
        tensor = tensor.detach()
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        yield name, tensor.contiguous()


def stored_names(model: Any) -> list[str]:
    """Names of all weights of a model, in the order of its state, each shared tensor under the name that is stored."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    holders = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    names = list(model.state_dict().keys())
    seen: set[int] = set()
    out = []
    # Names that a checkpoint leaves out come last, so that the stored name of a shared tensor is the one that is kept.
    for name in [n for n in names if n not in tied] + [n for n in names if n in tied]:
        if id(holders[name]) not in seen:
            seen.add(id(holders[name]))
            out.append(name)
    return out


def convert(model: Any, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights of memory in the form of a checkpoint: all of a model, or all of a layer."""
    from transformers.core_model_loading import revert_weight_conversion

    # Some architectures fuse weights in memory (experts, for instance) that checkpoints store one by one.
    yield from revert_weight_conversion(model, dict(tensors)).items()


def dot_natural(name: str) -> Any:
    """Sort key of the order in which converted weights come."""
    from transformers.core_model_loading import dot_natural_key

    return dot_natural_key(name)
