"""The work of a batch in floating point operations, and how fast a trainer does it. No torch.

Operations are those that the mathematics of an update needs, forward and backward:

    6 * (weights of all matrices of the layers) * (tokens)                         a beginning common to several
    + 12 * layers * heads * head_dim * (pairs of tokens that see each other)       sequences is counted once
    + 6 * hidden * vocabulary * (tokens whose log-prob is wanted)

Padding, recomputation, masked pairs and passes for log-probs alone are no work: they lower the share of the peak. Of
experts, those that a token goes to. The embedding is a look-up and costs nothing.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from configs.schema.model_shapes import ModelShape, known_shape, matrices
from models.train.interface import TrainSequence

# Dense bfloat16 FLOP/s by the makers' data sheets, without sparsity.
PUBLISHED: Final = {
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
}
PEAK: Final = "perf/peak_tflops"  # what a backend reports of its GPU, and the batch's figures repeat


class Work(NamedTuple):
    """The tokens of a batch, whatever the model."""

    tokens: int  # model inputs, a common beginning once
    pairs: int  # of tokens that see each other
    chosen: int  # tokens whose log-prob is wanted
    sequence_tokens: int  # as rollouts are counted: prompts once for each response


def work_of(sequences: Sequence[TrainSequence]) -> Work:
    """Of the sequences of whole groups. The last token of a sequence is no input."""
    tokens = pairs = 0
    seen: set[bytes] = set()
    for one in sequences:
        prompt = one.tokens[: one.prompt_length].tobytes()
        shared = one.prefix[1] if one.prefix is not None else one.prompt_length if prompt in seen else 0
        seen.add(prompt)
        inputs = max(len(one.tokens) - 1, shared)
        tokens += inputs - shared
        pairs += (inputs * (inputs + 1) - shared * (shared + 1)) // 2
    return Work(
        tokens=tokens,
        pairs=pairs,
        chosen=sum(int(one.loss_mask.sum()) for one in sequences),
        sequence_tokens=sum(len(one.tokens) for one in sequences),
    )


def step_flops(shape: ModelShape, work: Work) -> float:
    """Of one update."""
    layers = [matrix for layer in range(shape.layers) for matrix in matrices(shape, layer)]
    return float(
        6.0 * sum(matrix.active * matrix.inputs * matrix.outputs for matrix in layers) * work.tokens
        + 6.0 * shape.layers * (shape.query_width + shape.value_width) * work.pairs
        + 6.0 * shape.hidden * shape.vocabulary * work.chosen
    )


def published_tflops(device: str) -> float | None:
    """Peak of a GPU by its name; None if it is not in the table."""
    return next((peak / 1e12 for name, peak in PUBLISHED.items() if name in device), None)


@functools.cache
def checkpoint_shape(directory: str) -> ModelShape | None:
    """The shape of a checkpoint's model; None if it is not known."""
    try:
        return known_shape(json.loads(Path(directory, "config.json").read_bytes()))
    except (OSError, ValueError):
        return None


def speed(shape: ModelShape | None, groups: Sequence[Work], gpu_s: float, peak: float | None) -> dict[str, float]:
    """Metrics of a batch that took all GPUs of the trainer together `gpu_s`. `peak`: TFLOP/s of one."""
    work = Work(*map(sum, zip(*groups, strict=True)))
    found = {"perf/train_tokens_per_gpu_per_s": work.sequence_tokens / gpu_s}
    if shape is None:
        return found
    found["perf/train_tflops_per_gpu"] = step_flops(shape, work) / gpu_s / 1e12
    if peak is not None:
        found |= {PEAK: peak, "perf/mfu": found["perf/train_tflops_per_gpu"] / peak}
    return found
