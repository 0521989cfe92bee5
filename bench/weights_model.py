"""Qwen3-shaped random models of a given size, and two versions of their weights that differ as one step makes them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import torch
from safetensors.torch import load_file

from models.tiny import make_tiny_checkpoint
from models.weights.delta import compress

# megabytes of float32 -> vocabulary, hidden size, layers; the MLP is four times as wide
SHAPES: Final = {10: (4096, 128, 6), 100: (8192, 512, 4), 1000: (32768, 1024, 12)}
STEP: Final = 1e-6  # what every weight moves by: Adam's step at this learning rate
WEIGHT_FILES: Final = ("model.safetensors", "config.json", "tiny.json", "generation_config.json")


class Versions:
    """A checkpoint in `path` and its weights one step apart; odd versions are the one, even ones the other."""

    def __init__(self, path: Path) -> None:
        self.path = path
        first = load_file(path / "model.safetensors")
        random = torch.Generator().manual_seed(1)
        self._both = [
            first,
            {name: tensor + STEP * torch.randn(tensor.shape, generator=random) for name, tensor in first.items()},
        ]
        self.nbytes = sum(tensor.nbytes for tensor in first.values())

    def tensors(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._both[version % 2].items())

    def bfloat16_ratio(self) -> float:
        """Bytes of the largest tensor by bytes of its difference, if the weights are kept in bfloat16."""
        name = max(self._both[0], key=lambda name: self._both[0][name].nbytes)
        old, new = (tensors[name].to(torch.bfloat16).view(torch.uint8).numpy().reshape(-1) for tensors in self._both)
        return len(new) / max(1, sum(map(len, compress(old, np.ascontiguousarray(new), 2))))


def make_model(path: Path, megabytes: int) -> Versions:
    """A random checkpoint of about so many megabytes, with a tokenizer of bytes."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    if megabytes not in SHAPES:
        raise SystemExit(f"--sizes {megabytes}: known are {', '.join(map(str, SHAPES))}")
    vocabulary, hidden, layers = SHAPES[megabytes]
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 128),
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        dtype="float32",
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(path, max_shard_size="100GB")
    tokenizer = make_tiny_checkpoint(path.with_name(f"{path.name}-tokenizer"))
    for file in tokenizer.iterdir():
        if file.name not in WEIGHT_FILES:
            shutil.copyfile(file, path / file.name)
    return Versions(path)
