"""Models and optimizers move between their device and the host's memory, for a trainer that shares its GPU in turns.

Invariants: parameters stay the same objects, so that optimizer, packing and scorers still know them; nothing is lost on
the way: what is on the host can be saved and exported from there. On a CPU nothing moves.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

HOST = torch.device("cpu")


def move(modules: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer], device: torch.device) -> None:
    """Move parameters, buffers and optimizer state; gradients are expected to be cleared."""
    for module in modules:
        module.to(device)
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for entry, value in state.items():
                if torch.is_tensor(value):
                    state[entry] = value.to(device)
    if device.type == "cpu" and torch.cuda.is_available():
        torch.cuda.empty_cache()  # or another process could not have what was given back
