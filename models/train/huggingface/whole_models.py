"""Models of which every process holds all, alone or as plain copies, on a CPU or a GPU; and the files of their state.

    directory/hf/                          loadable by transformers: model, configuration, tokenizer
    directory/trainer/optimizer.safetensors  AdamW moments, random states
    directory/trainer/<part>.safetensors     critic, reference that is renewed
    directory/trainer/state.json             counters

Invariants: no pickle; every file and directory is fsync'd before `save` returns; `state.json` is written last,
so that a directory without it is incomplete; loading checks everything that it can before it changes anything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from models.disk import read_file, sync, write_whole
from models.errors import TrainStateUnreadable
from models.train.dp_group import DpGroup
from models.train.huggingface import checkpoint
from models.train.huggingface.hf_files import model_tensors, write_hf, write_tensors
from models.train.huggingface.loading import Placement
from models.train.huggingface.models import HfModels
from models.train.model_set import Counters
from models.train.spec import TrainSpec

FORMAT_VERSION: Final = 1
_STATE: Final = f"{checkpoint.TRAINER_DIR}/state.json"
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


class TorchModels(HfModels):
    """`ModelSet` of which every process holds all: alone, or as plain copies."""

    def __init__(self, spec: TrainSpec, dp_group: DpGroup | None = None) -> None:
        """`dp_group`: the processes that hold copies (default: this one alone).

        Raises `CheckpointUnavailable`, `UnsupportedModel` or `TrainConfigInvalid`.
        """
        super().__init__(spec, Placement(spec, dp_group))

    def save(self, directory: Path, counters: Counters) -> None:
        """Write the policy to `directory/hf` and all else beside it, synchronised to disk. Raises `OSError`."""
        trainer, parts = directory / checkpoint.TRAINER_DIR, self.parts()
        trainer.mkdir(parents=True, exist_ok=True)
        (directory / _STATE).unlink(missing_ok=True)
        write_hf(directory / checkpoint.MODEL_DIR, self._weights(None), self._spec.train.hf_checkpoint)
        tensors, updates = _in_files(parts).tensors(), parts.updates
        tensors |= {_RNG + name: state for name, state in checkpoint.random_state(self.device).items()}
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

    def finish_save(self) -> None:
        """Nothing: `save` returns when all is on disk."""

    def load(self, directory: Path) -> Counters:
        """Restore what `save` wrote. Raises `TrainStateUnreadable`, then nothing is changed."""
        from safetensors import SafetensorError

        parts = _in_files(self.parts())
        try:
            state = msgspec.json.decode(read_file(directory / _STATE), type=TrainerState)
            checkpoint.check_format(directory, state.format_version, FORMAT_VERSION)
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
        parts.check(directory, present, {name: tensor.shape for name, tensor in tensors.items()})
        parts.restore(tensors, updates)
        checkpoint.restore_random_state(rng, self.device)
        return Counters(state.batches, state.steps, state.skipped_steps, state.empty_steps)


def _in_files(parts: checkpoint.StateParts) -> checkpoint.StateParts:
    """Of the critic, what is trained: the rest is in the checkpoint that it started from."""
    out = checkpoint.StateParts(parts)
    if (critic := parts.get("critic")) is not None and critic.updater is not None:
        trained = {name for name, _ in critic.updater.named_parameters}
        weights = {name: tensor for name, tensor in critic.weights.items() if name in trained}
        out["critic"] = checkpoint.StatePart(weights, critic.updater)
    return out


def _read(directory: Path, parts: Iterable[str]) -> dict[str, Tensor]:
    """Tensors of these parts' files, and the policy's weights."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    out: dict[str, Tensor] = {}
    for part in parts:
        file, start = _FILES[part]
        stored = load_file(directory / checkpoint.TRAINER_DIR / f"{file}.safetensors")
        out |= {start + name: tensor for name, tensor in stored.items()}
    model = AutoModelForCausalLM.from_pretrained(str(directory / checkpoint.MODEL_DIR), dtype=torch.float32)
    return out | {f"policy/weights/{name}": tensor for name, tensor in model_tensors(model).items()}
