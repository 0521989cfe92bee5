"""Sequences for trainers, written down as a prompt and what comes after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from models.train.interface import TrainBackend, TrainSequence


def sequence(
    *,
    group: int = 0,
    rollout: int = 0,
    tokens: Any,
    mask: Any,
    rollout_log_probs: Any = None,
    advantage: float = 1.0,
    version: int = 0,
    **fields: Any,
) -> TrainSequence:
    """`mask` and `rollout_log_probs` are of the tokens behind the prompt, which is what `tokens` has before them."""
    prompt, n = len(tokens) - len(mask), len(mask)
    return TrainSequence(
        group_id=group,
        rollout_id=rollout,
        tokens=np.asarray(tokens, dtype=np.int32),
        prompt_length=prompt,
        loss_mask=behind(prompt, mask).astype(np.uint8),
        rollout_log_probs=behind(prompt, np.zeros(n) if rollout_log_probs is None else rollout_log_probs),
        advantages=behind(prompt, np.full(n, advantage)),
        versions=np.repeat([-1, version], [prompt, n]).astype(np.int32),
        **fields,
    )


def behind(prompt: int, values: Any) -> npt.NDArray[np.float32]:
    """[prompt + n] float32: the values, and 0 for the prompt before them."""
    return np.concatenate([np.zeros(prompt), np.asarray(values)]).astype(np.float32)


def scored(backend: TrainBackend, sequences: Sequence[TrainSequence]) -> list[npt.NDArray[np.float32]]:
    """[T] for each sequence: its log-probs under the current weights, and 0 for the prompt."""
    return [behind(s.prompt_length, found) for s, found in zip(sequences, backend.logprobs(sequences), strict=True)]
