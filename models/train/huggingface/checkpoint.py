"""Training states of Hugging Face models: what they are made of, and their files."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import torch
from msgspec import Struct
from torch import Tensor
from torch.distributed.tensor import DTensor

from models.disk import read_file, sync, write_whole
from models.errors import TrainStateUnreadable
from models.train.huggingface.hf_files import local, model_tensors, write_hf, write_tensors
from models.train.huggingface.optimizer import Updater
from models.train.model_set import Counters

# --------------------------------------------------------------------------------------------------
# What a training state is made of, whatever files hold it: parts, each with weights and, if it is trained, moments.
#
#     <part>/weights/<name>            a tensor of the model
#     <part>/optimizer/<name>/<entry>  AdamW's state of a parameter
#
# Parts are called policy, critic, reference. Invariant: what `check` lets through can be restored.


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


# --------------------------------------------------------------------------------------------------
# A training state on disk: the model in Hugging Face format, the optimizer as safetensors, counters as JSON.
#
#     directory/hf/                          loadable by transformers: model, configuration, tokenizer
#     directory/trainer/optimizer.safetensors  AdamW moments, random states
#     directory/trainer/<part>.safetensors     critic, reference that is renewed
#     directory/trainer/state.json             counters
#
# Invariants: no pickle; every file and directory is fsync'd before `save_state` returns; `state.json` is written last,
# so that a directory without it is incomplete; loading checks everything that it can before it changes anything.


MODEL_DIR: Final = "hf"
TRAINER_DIR: Final = "trainer"
FORMAT_VERSION: Final = 1
_STATE: Final = f"{TRAINER_DIR}/state.json"
# Part -> its file, and what the names of the file's tensors begin with, which the file leaves out.
_FILES: Final = {
    "policy": ("optimizer", "policy/optimizer/"),
    "critic": ("critic", "critic/"),
    "reference": ("reference", "reference/weights/"),
}
_RNG: Final = "policy/optimizer/rng/"
_CRITIC_UPDATES: Final = "critic/updates"


class TrainerState(Struct, frozen=True, kw_only=True):
    """Counters of a training run."""

    updates: int
    steps: int
    skipped_steps: int
    empty_steps: int
    batches: int = 0
    parts: tuple[str, ...] = ()  # beside the policy
    format_version: int = FORMAT_VERSION


def save_state(
    directory: Path,
    parts: StateParts,
    counters: Counters,
    *,
    weights: Iterable[tuple[str, Tensor]],
    source: str,
    device: torch.device,
) -> None:
    """Write all of it. `weights`: those that are trained, for `hf`; `source`: whose configuration and tokenizer go
    beside them; `device`: whose random state is kept. Raises `OSError`.
    """
    trainer = directory / TRAINER_DIR
    trainer.mkdir(parents=True, exist_ok=True)
    (directory / _STATE).unlink(missing_ok=True)
    write_hf(directory / MODEL_DIR, weights, source)
    tensors, updates = _in_files(parts).tensors(), parts.updates
    tensors |= {_RNG + name: state for name, state in random_state(device).items()}
    if "critic" in parts:
        tensors[_CRITIC_UPDATES] = torch.tensor(updates["critic"])
    for part in parts:
        file, start = _FILES[part]
        own = {name.removeprefix(start): one for name, one in tensors.items() if name.startswith(start)}
        host = {name: tensor.detach().cpu().contiguous() for name, tensor in own.items()}
        write_tensors(trainer / f"{file}.safetensors", host)
    beside = tuple(part for part in parts if part != "policy")
    state = TrainerState(updates=updates["policy"], parts=beside, **dataclasses.asdict(counters))
    write_whole(directory / _STATE, msgspec.json.encode(state), durable=True)
    sync(directory)


def load_state(directory: Path, parts: StateParts, device: torch.device) -> Counters:
    """Restore what `save_state` wrote. Raises `TrainStateUnreadable`, then nothing is changed."""
    from safetensors import SafetensorError

    try:
        state = msgspec.json.decode(read_file(directory / _STATE), type=TrainerState)
        check_format(directory, state.format_version, FORMAT_VERSION)
        present = ("policy", *state.parts)
        tensors = _read(directory, [part for part in parts if part in present])
        rng = {name.removeprefix(_RNG): tensors.pop(name) for name in list(tensors) if name.startswith(_RNG)}
        updates = {"policy": state.updates}
        if "critic" in parts and "critic" in present:
            updates["critic"] = int(tensors.pop(_CRITIC_UPDATES))
        if "cpu" not in rng:
            raise ValueError("no random state")
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise TrainStateUnreadable(
            f"{directory} holds no complete training state ({error}); resume from another checkpoint"
        ) from error
    in_files = _in_files(parts)
    in_files.check(directory, present, {name: tensor.shape for name, tensor in tensors.items()})
    in_files.restore(tensors, updates)
    restore_random_state(rng, device)
    return Counters(state.batches, state.steps, state.skipped_steps, state.empty_steps)


def _in_files(parts: StateParts) -> StateParts:
    """Of the critic, what is trained: the rest is in the checkpoint that it started from."""
    out = StateParts(parts)
    if (critic := parts.get("critic")) is not None and critic.updater is not None:
        trained = {name for name, _ in critic.updater.named_parameters}
        weights = {name: tensor for name, tensor in critic.weights.items() if name in trained}
        out["critic"] = StatePart(weights, critic.updater)
    return out


def _read(directory: Path, parts: Iterable[str]) -> dict[str, Tensor]:
    """Tensors of these parts' files, and the policy's weights."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    out: dict[str, Tensor] = {}
    for part in parts:
        file, start = _FILES[part]
        stored = load_file(directory / TRAINER_DIR / f"{file}.safetensors")
        out |= {start + name: tensor for name, tensor in stored.items()}
    model = AutoModelForCausalLM.from_pretrained(str(directory / MODEL_DIR), dtype=torch.float32)
    return out | {f"policy/weights/{name}": tensor for name, tensor in model_tensors(model).items()}
