"""What a training state is made of, whatever files hold it: parts, each with weights and, if it is trained, moments.

    <part>/weights/<name>            a tensor of the model
    <part>/optimizer/<name>/<entry>  AdamW's state of a parameter

Parts are called policy, critic, reference. Invariant: what `check` lets through can be restored.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from models.errors import TrainStateUnreadable
from models.train.huggingface.hf_weights import local
from models.train.huggingface.optimizer import Updater

STEP: Final = "step"  # of each parameter: the optimizer counts it up once per parameter


@dataclass(frozen=True)
class StatePart:
    """Live tensors, which are saved and overwritten in place."""

    weights: Mapping[str, Tensor]
    updater: Updater | None = None  # None: never trained


class StateParts(dict[str, StatePart]):
    """All parts of one set of models."""

    @property
    def updates(self) -> dict[str, int]:
        """How many were made, by part that is trained."""
        return {name: part.updater.updates for name, part in self.items() if part.updater is not None}

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the state by name."""
        out: dict[str, Tensor] = {}
        for name, part in self.items():
            out |= {f"{name}/weights/{key}": tensor for key, tensor in part.weights.items()}
            if part.updater is not None:
                out |= {f"{name}/optimizer/{key}": one for key, one in part.updater.state_tensors().items()}
        return out

    def check(self, directory: Path, present: Collection[str], saved: Mapping[str, Sequence[int]]) -> None:
        """Raise `TrainStateUnreadable` unless `saved` (shapes by name, of the parts `present`) is of these parts."""
        for name, part in self.items():
            if name not in present:
                raise TrainStateUnreadable(
                    f"{directory} holds no {name}, which this run needs: it was saved by a run with other options; "
                    "resume with those, or start a new run from its weights"
                )
            start = f"{name}/weights/"
            found = {key.removeprefix(start): tuple(shape) for key, shape in saved.items() if key.startswith(start)}
            if found != {key: tuple(tensor.shape) for key, tensor in part.weights.items()}:
                raise TrainStateUnreadable(
                    f"the {name} in {directory} has other names or shapes than this one; resume with the "
                    "--hf-checkpoint, --ref-load, --critic-load, --lora-* and the other options that the run was "
                    "started with"
                )
            if part.updater is None:
                continue
            start = f"{name}/optimizer/"
            shapes = {key: tuple(parameter.shape) for key, parameter in part.updater.named_parameters}
            for key, shape in saved.items():
                parameter, _, entry = key.removeprefix(start).rpartition("/")
                fits = math.prod(shape) == 1 if entry == STEP else tuple(shape) == shapes.get(parameter)
                if key.startswith(start) and not (parameter in shapes and fits):
                    raise TrainStateUnreadable(
                        f"optimizer state {entry!r} of {parameter!r} in {directory} is of another model; resume with "
                        "the options that the run was started with"
                    )

    def restore(self, tensors: Mapping[str, Tensor], updates: Mapping[str, int]) -> None:
        """Overwrite the parts with checked tensors."""
        for name, part in self.items():
            with torch.no_grad():
                for key, tensor in part.weights.items():
                    local(tensor).copy_(local(tensors[f"{name}/weights/{key}"]))
            if part.updater is None:
                continue
            part.updater.updates = updates[name]
            start, by_name, state = (
                f"{name}/optimizer/",
                dict(part.updater.named_parameters),
                part.updater.optimizer.state,
            )
            state.clear()
            for key in [key for key in tensors if key.startswith(start)]:
                parameter, _, entry = key.removeprefix(start).rpartition("/")
                held, value = by_name[parameter], tensors[key]
                if entry == STEP:
                    value = value.reshape(())
                # A shard is there for this; what was read from a file may still be a view of it.
                own = value if isinstance(value, DTensor) else value.to(local(held).device, copy=True)
                state[held][entry] = own


def check_format(directory: Path, found: int, known: int) -> None:
    """Raise `TrainStateUnreadable` for a state of another version of the format."""
    if found != known:
        raise TrainStateUnreadable(
            f"{directory} has format version {found}, this program reads {known}; resume with the program version that "
            "wrote it"
        )


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Of this process, by kind of device."""
    on_gpu = {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    return {"cpu": torch.get_rng_state(), **on_gpu}


def restore_random_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Go on as the process whose state it is."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
