"""How much memory tensors take."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class Living(TorchDispatchMode):
    """The most bytes that were alive at one time of tensors made within it. `known`: made before.

    `width`: only tensors whose last dimension is that count; `rows` is the most that one of them had. `largest`: the
    elements of the largest one.
    """

    def __init__(self, *known: Tensor, width: int | None = None) -> None:
        super().__init__()
        self.peak = self.rows = self.largest = 0
        self._width = width
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and self._width in (None, *tensor.shape[-1:]):
                self._note(tensor)
        self._alive = {key: one for key, one in self._alive.items() if not one[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return out

    def _note(self, tensor: Tensor) -> None:
        self.largest = max(self.largest, tensor.numel())
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
            self.rows = max(self.rows, tensor.numel() // self._width if self._width else 0)
