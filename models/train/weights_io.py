"""Weights under Hugging Face names, as `save_pretrained` would write them.

Invariants: the order is fixed for a model; a tensor shared by two names appears once, under the name that a
checkpoint stores; what is yielded is not copied unless its precision changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def hf_tensors(model: Any, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of all weights; floating-point tensors are cast to `dtype` if one is given."""
    from transformers.core_model_loading import revert_weight_conversion

    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    state: dict[str, torch.Tensor] = {}
    seen: set[tuple[int, torch.Size]] = set()
    entries = list(model.state_dict().items())
    # Names that a checkpoint leaves out come last, so that the stored name of a shared tensor is the one that is kept.
    for name, tensor in [e for e in entries if e[0] not in tied] + [e for e in entries if e[0] in tied]:
        place = (tensor.data_ptr(), tensor.shape)
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        state[name] = tensor
    # Some architectures fuse weights in memory (experts, for instance) that checkpoints store one by one.
    for name, tensor in revert_weight_conversion(model, state).items():
        tensor = tensor.detach()
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        yield name, tensor.contiguous()
