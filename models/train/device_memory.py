"""The device memory of a trainer that takes turns with engines: its contents go to the host and come back in place.

Only the storages of tensors are emptied and filled again. The tensors stay the same objects, and views of each other,
so this serves plain models, the shards of FSDP2 and the buffers of Megatron-core alike.

Invariants: between `offload` and `onload` no tensor may be read; contents come back bit for bit; what the caller says
is cleared comes back as zeros, and is copied nowhere.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from models.train.huggingface.hf_files import local


class DeviceMemory:
    """Of one process."""

    def __init__(self) -> None:
        self._away: list[tuple[torch.UntypedStorage, int, Tensor | None]] = []  # storage, bytes, contents

    @property
    def away(self) -> bool:
        """Whether the memory is given away now."""
        return bool(self._away)

    def offload(self, device: torch.device, kept: Iterable[Tensor], cleared: Iterable[Tensor] = ()) -> None:
        """Copy `kept` to the host, and give its memory and that of `cleared` back to the device. Tensors on devices of
        another type stay where they are."""
        on_gpu = device.type == "cuda"
        seen: set[int] = set()
        for tensors, keep in ((kept, True), (cleared, False)):
            for storage in (local(tensor).untyped_storage() for tensor in tensors):
                size = storage.nbytes()
                if storage.device.type != device.type or not size or not storage.resizable():
                    continue
                if storage.data_ptr() in seen:  # another view of it
                    continue
                seen.add(storage.data_ptr())
                host = None
                if keep:
                    host = torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu)
                    host.untyped_storage().copy_(storage, non_blocking=True)
                self._away.append((storage, size, host))
        if on_gpu:
            torch.cuda.synchronize()  # once, for all copies
        for storage, _, _ in self._away:
            storage.resize_(0)
        if on_gpu:
            torch.cuda.empty_cache()  # or another process could not have what was given back

    def onload(self) -> None:
        """Take the memory back, with its contents."""
        on_gpu = any(storage.device.type == "cuda" for storage, _, _ in self._away)
        for storage, size, host in self._away:
            storage.resize_(size)
            if host is None:
                storage.fill_(0)
            else:
                storage.copy_(host.untyped_storage(), non_blocking=True)
        if on_gpu:
            torch.cuda.synchronize()  # the host's copies are dropped below
        self._away.clear()
