"""Tensors over bytes that lie in memory already."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch


def tensor_view(memory: Any, dtype: str, shape: Sequence[int], start: int = 0) -> torch.Tensor:
    """A tensor over the bytes of a buffer from `start` on, or one without elements. `dtype`: as torch calls it."""
    kind: Any = getattr(torch, dtype)
    count = math.prod(shape)
    if count == 0:  # torch takes no empty buffer
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(memory, dtype=kind, count=count, offset=start).view(shape)
