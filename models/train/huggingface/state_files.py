"""A training state on disk: the model in Hugging Face format, the optimizer as safetensors, counters as JSON.

    directory/hf/                          loadable by transformers: model, configuration, tokenizer
    directory/trainer/optimizer.safetensors  AdamW moments, random states
    directory/trainer/<part>.safetensors     critic, reference that is renewed
    directory/trainer/state.json             counters

Invariants: no pickle; every file and directory is fsync'd before `save_state` returns; `state.json` is written last,
so that a directory without it is incomplete.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from msgspec import Struct

from models.train.errors import TrainStateUnreadable

MODEL_DIR: Final = "hf"
TRAINER_DIR: Final = "trainer"
FORMAT_VERSION: Final = 1
_WEIGHT_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")


class TrainerState(Struct, frozen=True, kw_only=True):
    """Counters of a training run."""

    updates: int
    steps: int
    skipped_steps: int
    empty_steps: int
    batches: int = 0
    parts: tuple[str, ...] = ()  # further files of tensors
    format_version: int = FORMAT_VERSION


def save_state(
    directory: Path,
    model: Any,
    tensors: dict[str, torch.Tensor],
    state: TrainerState,
    tokenizer_source: str,
    parts: Mapping[str, dict[str, torch.Tensor]] | None = None,
) -> None:
    """Write all of it. `tokenizer_source`: directory or hub id whose tokenizer goes beside the model.

    `parts`: further tensors by the name of their file.
    """
    parts = parts or {}
    state = msgspec.structs.replace(state, parts=tuple(parts))

    hf, trainer = directory / MODEL_DIR, directory / TRAINER_DIR
    hf.mkdir(parents=True, exist_ok=True)
    trainer.mkdir(parents=True, exist_ok=True)
    (trainer / "state.json").unlink(missing_ok=True)
    model.save_pretrained(hf)
    copy_tokenizer(tokenizer_source, hf)
    for part, content in {"optimizer": tensors, **parts}.items():
        _save_tensors(content, trainer / f"{part}.safetensors")
    _sync_tree(directory)
    (trainer / "state.json").write_bytes(msgspec.json.encode(state))
    _sync(trainer / "state.json")
    _sync(trainer)


def load_state(directory: Path) -> tuple[dict[str, torch.Tensor], TrainerState]:
    """Optimizer tensors and counters. Raises `TrainStateUnreadable`."""
    try:
        state = msgspec.json.decode((directory / TRAINER_DIR / "state.json").read_bytes(), type=TrainerState)
    except (OSError, msgspec.DecodeError) as error:
        raise _incomplete(directory, error) from error
    tensors = _load_tensors(directory, "optimizer")
    if state.format_version != FORMAT_VERSION:
        raise TrainStateUnreadable(
            f"{directory} has format version {state.format_version}, this program reads {FORMAT_VERSION}; "
            "resume with the program version that wrote it"
        )
    return tensors, state


def load_part(directory: Path, state: TrainerState, part: str) -> dict[str, torch.Tensor]:
    """Further tensors that `save_state` was given. Raises `TrainStateUnreadable`."""
    if part not in state.parts:
        raise TrainStateUnreadable(
            f"{directory} holds no {part}, which this run needs: it was saved by a run with other options; resume "
            "with those, or start a new run from its weights"
        )
    return _load_tensors(directory, part)


def _save_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)


def _load_tensors(directory: Path, part: str) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors: dict[str, torch.Tensor] = load_file(directory / TRAINER_DIR / f"{part}.safetensors")
    except (OSError, SafetensorError) as error:
        raise _incomplete(directory, error) from error
    return tensors


def _incomplete(directory: Path, error: Exception) -> TrainStateUnreadable:
    return TrainStateUnreadable(
        f"{directory} holds no complete training state ({error}); resume from another checkpoint"
    )


def copy_tokenizer(source: str, target: Path) -> None:
    """Put the tokenizer of `source` beside a model: files of a directory as they are, else through transformers."""
    path = Path(source).expanduser()
    if not path.is_dir():
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(source).save_pretrained(target)
        return
    for file in sorted(path.iterdir()):
        if file.is_file() and not file.name.endswith(_WEIGHT_SUFFIXES) and not (target / file.name).exists():
            shutil.copyfile(file, target / file.name)


def _sync_tree(directory: Path) -> None:
    for root, _, files in os.walk(directory):
        for name in files:
            _sync(Path(root) / name)
        _sync(Path(root))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
