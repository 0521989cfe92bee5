"""The work of one training step: models, a batch with the spread of lengths that rollouts have, and its FLOPs.

FLOPs of a step are those that the mathematics needs, forward and backward:

    6 * (weights of all matrices of the layers) * (tokens)                         a prompt common to several
    + 12 * layers * heads * head_dim * (pairs of tokens that see each other)       responses is counted once
    + 6 * hidden * vocabulary * (tokens whose log-prob is wanted)

Padding, recomputation and masked pairs are no work: they lower the share of the peak. Of experts, those that a token
goes to. The embedding is a look-up and costs nothing.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch

from bench.rigs.sums import MEMBERS, Row, sequence
from configs.help import preset_config
from configs.schema.model_shapes import ModelShape, matrices
from models.train.interface import TrainSequence


def step_flops(shape: ModelShape, sequences: Sequence[TrainSequence]) -> float:
    """Of one update on sequences by group, as responses after one prompt."""
    tokens = pairs = 0  # model inputs, prompts once for each group; and pairs of them that see each other
    seen: set[int] = set()
    for one in sequences:
        prompt, response = one.prompt_length, one.response_length - 1
        if one.group_id not in seen:
            seen.add(one.group_id)
            tokens += prompt
            pairs += prompt * (prompt + 1) // 2
        tokens += response
        pairs += response * prompt + response * (response + 1) // 2
    chosen = sum(int(one.loss_mask.sum()) for one in sequences)  # tokens whose log-prob is wanted
    layers = [matrix for layer in range(shape.layers) for matrix in matrices(shape, layer)]
    return float(
        6.0 * sum(matrix.active * matrix.inputs * matrix.outputs for matrix in layers) * tokens
        + 6.0 * shape.layers * (shape.query_width + shape.value_width) * pairs
        + 6.0 * shape.hidden * shape.vocabulary * chosen
    )


# Dense bfloat16 FLOP/s by the makers' data sheets, without sparsity.
PUBLISHED: Final = {
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
}
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
