"""Tensors as bytes: views of shared memory, and the payload of SGLang's tensor route."""

from __future__ import annotations

import base64
import contextlib
import io
import math
from collections.abc import Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final

import torch
import torch.multiprocessing as torch_multiprocessing
from torch.multiprocessing.reductions import rebuild_storage_filename, reduce_tensor

from models.errors import RouteUnfit
from models.weights.layout import Bucket

# --------------------------------------------------------------------------------------------------
# Tensors over bytes that lie in memory already.


def tensor_view(memory: Any, dtype: str, shape: Sequence[int], start: int = 0) -> torch.Tensor:
    """A tensor over the bytes of a buffer from `start` on, or one without elements. `dtype`: as torch calls it."""
    kind: Any = getattr(torch, dtype)
    count = math.prod(shape)
    if count == 0:  # torch takes no empty buffer
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(memory, dtype=kind, count=count, offset=start).view(shape)


# --------------------------------------------------------------------------------------------------
# Tensors handed over by reference: the payload of SGLang's `/update_weights_from_tensor`.
#
# Why this file writes a pickle, the only one in the project: the server takes nothing else. It expects, base64-encoded
# and one per tensor-parallel rank, what torch's multiprocessing makes of a list of (name, tensor), and unpickles it
# with a restricted reader. Nothing here, and nothing else in the project, ever reads one.
#
# The payload holds no weights, only the name of the shared memory that they lie in. On a CPU that must be memory with a
# name ("file_system" in torch's words): with the default, a descriptor, the receiver would ask this process for it over
# a socket whose key only child processes know, and SGLang's scheduler dies of the refusal. The choice is made for these
# payloads alone; torch's setting for the process stays what it is.
#
# Invariants: one buffer is allocated per update and reused by its buckets, so it may be written again only after the
# engine answered; each payload is to be read once (reading gives back one reference to the memory).


_DEVICE: Final = 6  # place of the device among what rebuilds a CUDA tensor

# Importing it is what teaches ForkingPickler about tensors.
assert torch_multiprocessing.reductions is not None


class _NamedMemoryPickler(ForkingPickler):
    """Writes storages as the name of shared memory, whatever this process' sharing strategy is, and CUDA tensors with
    the id of their device, for the receiver may count devices in another way."""

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, torch.UntypedStorage) and value.device.type == "cpu" and value.nbytes():
            where = value._share_filename_cpu_()
            value._shared_incref()  # the reader's reference
            return rebuild_storage_filename, (type(value), *where)
        if isinstance(value, torch.Tensor) and value.is_cuda:
            rebuild, about = reduce_tensor(value)
            device = str(torch.cuda.get_device_properties(value.device).uuid)
            return rebuild, (*about[:_DEVICE], device, *about[_DEVICE + 1 :])
        return NotImplemented


class SharedBuffer:
    """Shared memory for the largest bucket of an update. `memory` is a flat uint8 tensor."""

    def __init__(self, nbytes: int) -> None:
        try:
            storage = torch.UntypedStorage._new_using_filename_cpu(max(nbytes, 1))
        except RuntimeError as error:
            raise RouteUnfit(
                f"no shared memory for a bucket of {nbytes} bytes ({error}); lower --update-weight-buffer-size or use "
                "--update-weight-transport disk"
            ) from error
        self.memory = torch.empty(0, dtype=torch.uint8).set_(storage)

    @contextlib.contextmanager
    def lent(self, bucket: Bucket, ranks: int, device: str = "cpu") -> Iterator[list[str]]:
        """What each rank gets: the bucket's tensors as views of the memory, whose first bytes must be the bucket's.

        On a GPU they are views of a copy there, a new one for each bucket: its answer may come before the engine's
        stream has read it, and torch keeps memory that others hold a handle of.
        """
        flat = self.memory if device == "cpu" else self.memory[: bucket.nbytes].to(device)
        if flat.is_cuda:
            torch.cuda.current_stream().synchronize()
        named = [
            (item.spec.name, _view(flat[item.start - bucket.start : item.end - bucket.start], dtype, item.spec.shape))
            for item, dtype in zip(bucket.tensors, bucket.dtypes, strict=True)
        ]
        yield [_write(named) for _ in range(ranks)]


def _write(named: list[tuple[str, torch.Tensor]]) -> str:
    written = io.BytesIO()
    _NamedMemoryPickler(written).dump(named)
    return base64.b64encode(written.getbuffer()).decode()


def _view(data: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    kind = getattr(torch, dtype)
    return data.view(kind).view(shape) if len(data) else torch.empty(shape, dtype=kind)
