"""The reference policy of a Megatron run: weights on the host that take the place of the policy's while it scores.

A second model would cost as much memory of the accelerator as the first. A batch is scored at one time, which costs two
exchanges: the policy out and in again.

Invariants: outside `in_place` the model holds the policy, whatever happened inside; the exchange changes no bit; the
reference is never trained; with `ref_update_interval` it is part of the checkpoint, since no other file holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from models.errors import TrainStateUnreadable


class SwappedReference:
    """Weights of the reference for this process's chunks."""

    def __init__(self, chunks: Sequence[Any], settle: Callable[[], None], *, renewed: bool) -> None:
        """The reference is what the chunks hold now. `settle`: makes their parameters current.

        `renewed`: whether it becomes the policy from time to time.
        """
        self._chunks = list(chunks)
        self._settle = settle
        self.renewed = renewed
        self._host: dict[str, Tensor] = {}
        for name, tensor in self._live():
            pinned = tensor.device.type == "cuda"
            host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
            self._host[name] = host.copy_(tensor)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within it the chunks are the reference. Collective."""
        self._settle()
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def renew(self) -> None:
        """Become the policy as it is now. Collective."""
        self._settle()
        for name, tensor in self._live():
            self._host[name].copy_(tensor)

    def state_tensors(self) -> dict[str, Tensor]:
        """This process's part of the weights, by chunk and name; live."""
        return self._host

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `state_tensors` gave in the same layout. Raises `TrainStateUnreadable`, nothing changed."""
        expected = {name: tuple(tensor.shape) for name, tensor in self._host.items()}
        if expected != {name: tuple(tensor.shape) for name, tensor in tensors.items()}:
            raise TrainStateUnreadable(
                "the saved reference has other names or shapes than this one; resume with the --ref-load and the "
                "parallel sizes that the run was started with"
            )
        for name, host in self._host.items():
            host.copy_(tensors[name])

    def _exchange(self) -> None:
        """The copies follow one another on the device's stream; the host waits once, for all of them."""
        for name, tensor in self._live():
            host = self._host[name]
            of_policy = tensor.clone()  # one tensor at a time: the allocator gives its memory to the next
            tensor.copy_(host, non_blocking=True)
            host.copy_(of_policy, non_blocking=True)
        if any(tensor.device.type == "cuda" for _, tensor in self._live()):
            torch.cuda.synchronize()

    def _live(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters, and what else of the chunks a checkpoint would hold."""
        for number, chunk in enumerate(self._chunks):
            for name, parameter in chunk.named_parameters():
                yield f"{number}.{name}", parameter.detach()
            kept = chunk.state_dict()
            for name, buffer in chunk.named_buffers():
                if name in kept:
                    yield f"{number}.{name}", buffer
