"""Sending end of a weight group: one process group of this process (rank 0) and the ranks of one engine.

SGLang's `/init_weights_update_group` has every rank of the engine join through a TCP store, under a prefix made of the
group's name. The same backends are built here directly: torch's default group, its list of groups and its collectives
are not touched, so a process that already trains in groups of its own can hold any number of these.

Invariants:
- a collective that failed leaves a group of no use: it is closed, never used again;
- store and gloo listen on the address that leads to the engine only, which is loopback on one machine;
- nothing blocks for longer than `timeout_s`.

Mind where it blocks: `join` until all ranks of the engine are there, `broadcast` until it is sent. Call them from a
thread, while the engine's HTTP call that brings its ranks is pending.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any, Final
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from models.errors import GroupError

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
            self._store: Any = self._listen(host)
        except (RuntimeError, OSError) as error:
            raise GroupError(
                f"weight group {name} cannot listen on {host} ({_first_line(error)}); is it an address of this machine?"
            ) from error

    def _listen(self, host: str) -> Any:
        listener = socket.create_server((host, 0), family=_family(host))
        self.port = int(listener.getsockname()[1])
        # Not waiting for workers: the engine's ranks come only after they are told this port.
        store = dist.TCPStore(
            host,
            self.port,
            self.world_size,
            is_master=True,
            timeout=self._timeout,
            wait_for_workers=False,
            master_listen_fd=listener.fileno(),
            use_libuv=True,
        )
        listener.detach()  # the store owns the descriptor now
        return store

    def join(self) -> None:
        """Meet the engine's ranks. Waits for them; unblocked by the last one, or by the time limit: GroupError."""
        # Twice the name: once by whoever makes the group apart from the default one, once by torch for each group. Then
        # the first of the devices that the backend serves: torch makes one backend for all of them.
        store = dist.PrefixStore(f"{self.name}/", dist.PrefixStore(self.name, self._store))
        device = dist.Backend.backend_capability[self.backend][0]
        try:
            self._joined = self._connect(dist.PrefixStore(f"{device}/", store))
        except (RuntimeError, ValueError) as error:
            self.close()
            raise GroupError(
                f"weight group {self.name}: not all {self.world_size} ranks met on {self.host}:{self.port} within "
                f"{self._timeout.total_seconds():g} s ({_first_line(error)}); see the engine's log"
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
                f"weight group {self.name}: the broadcast of {tensor.nbytes} bytes broke off ({_first_line(error)}); "
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


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
