"""The work of one training step: models, and a batch with the spread of lengths that rollouts have."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch

from bench.rigs.sums import MEMBERS, Row, sequence
from configs.help import preset_config
from models.train.interface import TrainSequence

SIZES: Final = ("0.6B", "1.7B", "4B", "cpu", "quick")
_SMALL: Final = {
    "model_type": "qwen3", "hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": True, "max_position_embeddings": 40960,
}  # fmt: skip


def model_config(size: str) -> dict[str, Any]:
    """Contents of a config.json: a small Qwen3, or a published one, as the presets of `--model` have it."""
    if size == "quick":
        return {**_SMALL, "num_hidden_layers": 2, "vocab_size": 2048}
    if size == "cpu":
        return {**_SMALL, "num_hidden_layers": 4, "vocab_size": 4096}
    return preset_config(f"qwen3-{size.lower()}").model.architecture


@dataclass(frozen=True)
class Contender:
    """A backend in a layout."""

    name: str
    backend: Literal["torch", "fsdp", "megatron"]
    processes: int


CONTENDERS: Final = (
    Contender("torch", "torch", 1),
    Contender("fsdp", "fsdp", 1),
    Contender("megatron", "megatron", 1),
    Contender("fsdp, 2 processes", "fsdp", 2),
    Contender("megatron, TP 2", "megatron", 2),
)


@dataclass(frozen=True)
class Setting:
    """What all contenders are given. Crosses to their processes as JSON."""

    checkpoint: str
    size: str
    device: str
    groups: int
    prompt: float  # median tokens
    response: float
    longest: int
    budget: int  # tokens of a micro-batch
    rounds: int
    recompute: bool = False

    @property
    def config(self) -> dict[str, Any]:
        return model_config(self.size)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    def batch(self) -> list[TrainSequence]:
        """The same batch each time: groups of responses to one prompt, by group.

        Prompts are log-normal (sigma 0.5), responses too (sigma 0.8, and 0.5 of it common to the group: hard prompts
        have long answers), with the given medians; both are cut at `longest`, where a part of the responses of a
        reasoning model ends.
        """
        rng, vocabulary, longest = np.random.default_rng(20261121), self.config["vocab_size"], self.longest
        out = []
        for group in range(self.groups):
            size = int(np.clip(rng.lognormal(np.log(self.prompt), 0.5), 8, longest // 2))
            common, row = rng.normal(0.0, 0.5), Row(rng.integers(3, vocabulary, size).astype(np.int32), ())
            for rollout in range(group * MEMBERS, (group + 1) * MEMBERS):
                length = int(np.clip(self.response * np.exp(common + rng.normal(0.0, 0.62)), 4, longest - size))
                advantage, ids = rng.normal(), rng.integers(3, vocabulary, length).tolist()
                out.append(sequence(group, rollout, row, ids, [-math.log(vocabulary)] * length, advantage, 0))
        return out


def make_checkpoint(directory: Path, size: str, device: str) -> None:
    """A Qwen3 of random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    quiet()
    fields = {name: value for name, value in model_config(size).items() if name != "model_type"}
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3ForCausalLM(Qwen3Config(**fields))
    model.to(torch.bfloat16 if device == "cuda" else torch.float32).save_pretrained(directory)


def importable(module: str) -> bool:
    """Whether it is installed; it is not imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


# ---------------------------------------------------------------------- in the processes


def quiet() -> None:
    """No progress bars of loading."""
    from transformers.utils import logging

    logging.disable_progress_bar()
