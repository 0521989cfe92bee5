"""The state of Hugging Face models in training: the optimizer, AdamW over fp32 master parameters, and what a training
state is made of.

Invariant: with sharded parameters, each process updates its shards; the norm of the gradient is that of all shards
together, so that all processes clip alike, and refuse together.
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

from configs.schema.train import TrainConfig
from models.errors import TrainStateUnreadable
from models.train.huggingface.hf_files import local
from models.train.huggingface.loading import Placement
from models.train.spec import Updates


class Updater(Updates):
    """AdamW with warm-up, decay and gradient clipping (arXiv:1711.05101)."""

    def __init__(
        self, model: torch.nn.Module, train: TrainConfig, total_steps: int | None, placement: Placement
    ) -> None:
        super().__init__(train, total_steps)
        self._placement = placement
        self.named_parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        # Norms and biases are not pulled to zero: their scale is not a measure of complexity.
        matrices = [p for _, p in self.named_parameters if p.ndim > 1]
        vectors = [p for _, p in self.named_parameters if p.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": train.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=train.lr,
            betas=(train.adam_beta1, train.adam_beta2),
            eps=train.adam_eps,
            fused=True,
        )

    def _summed(self) -> tuple[float, list[Tensor] | None]:
        parameters = [parameter for _, parameter in self.named_parameters]
        self._placement.sum_gradients(parameters)
        gradients = [local(one.grad) for one in parameters if one.grad is not None]
        squares = 0.0
        if gradients:  # summed in fp64 so that many parameters do not overflow
            norms = torch.stack([norm.double() for norm in torch._foreach_norm(gradients)])
            squares = float(norms.square().sum())
        return math.sqrt(self._placement.sum_over_shards(squares)), gradients or None

    def _step(self) -> None:
        self.optimizer.step()

    def clear(self) -> None:
        """Drop all gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Optimizer state as flat tensors, `<parameter>/<entry>`."""
        out: dict[str, torch.Tensor] = {}
        for name, parameter in self.named_parameters:
            for entry, value in self.optimizer.state.get(parameter, {}).items():
                out[f"{name}/{entry}"] = value.detach()
        return out


# --------------------------------------------------------------------------------------------------
# What a training state is made of, whatever files hold it: parts, each with weights and, if it is trained, moments.
#
#     <part>/weights/<name>            a tensor of the model
#     <part>/optimizer/<name>/<entry>  AdamW's state of a parameter
#
# Parts are called policy, critic, reference. Invariant: what `check` lets through can be restored.


MODEL_DIR: Final = "hf"
TRAINER_DIR: Final = "trainer"
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
            start, by_name = f"{name}/optimizer/", dict(part.updater.named_parameters)
            state = part.updater.optimizer.state
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
