"""What the ranks tell each other beside their training: the next call, a sign of life, and how a call ended.

A gloo group of its own, whatever the tensors travel by, so that nothing meets a collective of the model.

Invariant: every method is collective; a rank that is dead or stands still shows in the others as an error after at most
the group's timeout, also while nothing is trained, for rank 0 gives a sign of life now and then.
"""

from __future__ import annotations

from typing import Any

import torch
import xxhash
from torch import distributed

NOTHING_RAISED = 0
NO_SAY = -1  # the call was not this rank's to make


class ControlGroup:
    """The ranks, seen from one of them. `group`: a gloo group of all; None = the default group, which must be gloo."""

    def __init__(self, group: Any | None = None) -> None:
        self.gloo = group
        self.rank: int = distributed.get_rank()
        self.processes: int = distributed.get_world_size()

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def tell(self, data: bytes) -> None:
        """Rank 0's: give the bytes to all others."""
        self._broadcast(torch.tensor([len(data)]))
        if data:
            self._broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def sign_of_life(self) -> None:
        """Rank 0's, while it has nothing to tell."""
        self.tell(b"")

    def hear(self) -> bytes:
        """The others': the next bytes of rank 0. Waits for them through any number of signs of life."""
        length = torch.zeros(1, dtype=torch.int64)
        while length.item() == 0:
            self._broadcast(length)
        data = torch.empty(int(length.item()), dtype=torch.uint8)
        self._broadcast(data)
        heard: bytes = data.numpy().tobytes()
        return heard

    def endings(self, own: int) -> list[int]:
        """How the call ended for each rank: `NOTHING_RAISED`, `NO_SAY`, or `ending_of` an error. Waits for all."""
        found = [torch.zeros(1, dtype=torch.int64) for _ in range(self.processes)]
        distributed.all_gather(found, torch.tensor([own]), group=self.gloo)
        return [int(one.item()) for one in found]

    def _broadcast(self, tensor: torch.Tensor) -> None:
        distributed.broadcast(tensor, src=0, group=self.gloo)


def ending_of(error: Exception) -> int:
    """A positive number that stands for the error's class."""
    return 1 + xxhash.xxh3_64_intdigest(type(error).__name__.encode()) % (1 << 62)
