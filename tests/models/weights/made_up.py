"""Checkpoints of a few tensors whose values are their version."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors.torch import save_file

from models.weights.shared_memory_reader import SlotManifest
from models.weights.shared_memory_writer import SlotWriter

ROOT = Path(__file__).parents[3]
SHAPES = {"a.weight": (8, 16), "b.bias": (5,), "c.scale": (), "d.weight": (3, 7)}


def checkpoint(path: Path, tensors: dict[str, torch.Tensor] | None = None, config: str = "{}") -> Path:
    path.mkdir()
    (path / "config.json").write_text(config)
    (path / "tokenizer.json").write_text("{}")
    (path / "pytorch_model.bin").write_bytes(b"not to be copied")
    save_file(tensors or values(0), path / "model.safetensors")
    return path


def values(version: int) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, float(version)) for name, shape in SHAPES.items()}


def publish(writer: SlotWriter, version: int) -> SlotManifest:
    return writer.write(version, 0, iter(values(version).items()))


def flip(path: Path, place: int = -1) -> None:
    """Change one bit of a byte, counted from the end of the file."""
    byte = path.read_bytes()[place]
    with path.open("r+b") as file:
        file.seek(place, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
