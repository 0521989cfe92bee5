"""Two ways to hand tensors to an engine: by reference through shared memory, and by broadcast in a process group."""

from __future__ import annotations

import base64
import contextlib
import io
import math
import socket
from collections.abc import Iterator, Sequence
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
import torch.multiprocessing as torch_multiprocessing
from torch.multiprocessing.reductions import rebuild_storage_filename, reduce_tensor

from models.errors import GroupError, RouteUnfit, first_line
from models.weights.layout import TORCH_NAMES, Bucket, TensorSpec

# --------------------------------------------------------------------------------------------------
# Tensors over bytes that lie in memory already.


def tensor_view(memory: Any, spec: TensorSpec, start: int = 0) -> torch.Tensor:
    """A tensor over the bytes of a buffer from `start` on, or one without elements."""
    kind: Any = getattr(torch, TORCH_NAMES[spec.dtype])
    count = math.prod(spec.shape)
    if count == 0:  # torch takes no empty buffer
        return torch.empty(spec.shape, dtype=kind)
    return torch.frombuffer(memory, dtype=kind, count=count, offset=start).view(spec.shape)


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
# payloads alone; torch's setting for the process does not change.
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
    def lent(self, bucket: Bucket, devices: Sequence[str]) -> Iterator[list[str]]:
        """What each rank gets: the bucket's tensors as views of the memory, whose first bytes must be the bucket's.
        `devices`: of each rank, as this process names them.

        On a GPU they are views of a copy on the rank's own one, the only one that it can open. There is a new copy for
        each bucket: its answer may come before the engine's stream has read it, and torch keeps memory that others hold
        a handle of.
        """
        views = {device: self._views(bucket, device) for device in dict.fromkeys(devices)}
        yield [_write(views[device]) for device in devices]

    def _views(self, bucket: Bucket, device: str) -> list[tuple[str, torch.Tensor]]:
        flat = self.memory if device == "cpu" else self.memory[: bucket.nbytes].to(device)
        if flat.is_cuda:
            torch.cuda.current_stream(flat.device).synchronize()
        return [
            (item.spec.name, _view(flat[item.start - bucket.start : item.end - bucket.start], item.spec))
            for item in bucket.tensors
        ]


def _write(named: list[tuple[str, torch.Tensor]]) -> str:
    written = io.BytesIO()
    _NamedMemoryPickler(written).dump(named)
    return base64.b64encode(written.getbuffer()).decode()


def _view(data: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    kind = getattr(torch, TORCH_NAMES[spec.dtype])
    return data.view(kind).view(spec.shape) if len(data) else torch.empty(spec.shape, dtype=kind)


# --------------------------------------------------------------------------------------------------
# The sending end of a weight group: one process group of this process (rank 0) and the ranks of one engine.
#
# SGLang's `/init_weights_update_group` has every rank of the engine join through a TCP store, under a prefix made of
# the group's name. The code below builds the same backends directly: it leaves torch's default group, its list of
# groups and its collectives alone, so a process that already trains in groups of its own can hold any number of these.
#
# Invariants:
# - a group is useless after a failed collective: it is closed and never used again;
# - store and gloo listen only on the address that leads to the engine: loopback on one machine;
# - nothing blocks for longer than `timeout_s`.
#
# `join` blocks until all ranks of the engine have joined, `broadcast` until the bytes are sent. Call them from a
# thread, while the engine's HTTP call that brings its ranks is pending.


_ROOT: Final = 0


def address_towards(url: str) -> str:
    """The address of this machine that a connection to `url` leaves from. No packet is sent."""
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise GroupError(
            f"no way to {url} from this machine ({error}); a weight group needs one: check the address"
        ) from error


class WeightGroup:
    """Rank 0 of `world_size` ranks. Listens from construction on; `join`, any number of `broadcast`, `close`."""

    def __init__(self, name: str, world_size: int, backend: str, host: str, *, timeout_s: float) -> None:
        if backend not in ("gloo", "nccl"):
            raise GroupError(f"backend {backend!r} of weight group {name} is unknown; use gloo (CPU) or nccl (CUDA)")
        self.name, self.world_size, self.backend, self.host = name, world_size, backend, host
        self._timeout = timedelta(seconds=timeout_s)
        self._joined: Any = None
        try:
            listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
            self.port = int(listener.getsockname()[1])
            # Not waiting for workers: the engine's ranks join only once they know this port.
            self._store: Any = dist.TCPStore(
                host,
                self.port,
                world_size,
                is_master=True,
                timeout=self._timeout,
                wait_for_workers=False,
                master_listen_fd=listener.fileno(),
                use_libuv=True,
            )
            listener.detach()  # the store owns the descriptor now
        except (RuntimeError, OSError) as error:
            raise GroupError(
                f"weight group {name} cannot listen on {host} ({first_line(error)}); is it an address of this machine?"
            ) from error

    def join(self) -> None:
        """Meet the engine's ranks. Waits for them; unblocked by the last one, or by the time limit: GroupError."""
        # Twice the name: once by the maker of a group beside the default group, once by torch for each group. Then
        # the first of the devices that the backend serves: torch makes one backend for all of them.
        store = dist.PrefixStore(f"{self.name}/", dist.PrefixStore(self.name, self._store))
        device = dist.Backend.backend_capability[self.backend][0]
        try:
            self._joined = self._connect(dist.PrefixStore(f"{device}/", store))
        except (RuntimeError, ValueError) as error:
            self.close()
            raise GroupError(
                f"weight group {self.name}: not all {self.world_size} ranks met on {self.host}:{self.port} within "
                f"{self._timeout.total_seconds():g} s ({first_line(error)}); see the engine's log"
            ) from error

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Send one contiguous tensor to all ranks of the engine. Raises GroupError; the group is closed then."""
        joined = self._joined
        if joined is None:
            raise GroupError(f"weight group {self.name} is closed; make a new one")
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = _ROOT, 0, self._timeout
        try:
            joined.broadcast([tensor], options).wait()
            if tensor.is_cuda:
                torch.cuda.current_stream().synchronize()
        except RuntimeError as error:
            self.close()
            raise GroupError(
                f"weight group {self.name}: the broadcast of {tensor.nbytes} bytes broke off ({first_line(error)}); "
                "the engine holds mixed weights until a whole update succeeds"
            ) from error

    def close(self) -> None:
        """Leave the group: the engine's ranks get an error from what they wait for. May be called twice."""
        joined, self._joined, self._store = self._joined, None, None
        if joined is not None:
            joined.abort() if self.backend == "nccl" else joined.shutdown()

    def _connect(self, store: Any) -> Any:
        if self.backend == "gloo":
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=self.host)]
            options._timeout = self._timeout
            options._threads = 1
            return dist.ProcessGroupGloo(store, _ROOT, self.world_size, options)
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = self._timeout
        nccl.is_high_priority_stream = False
        return dist.ProcessGroupNCCL(store, _ROOT, self.world_size, nccl)
