"""Statistics of one optimizer step, written into its examples. Nothing here runs a model.

Invariant: every process computes the statistics of all sequences of the step, from the same numbers in the same
order, so that no decision differs between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from configs.schema.algorithm import AlgorithmConfig
from models.algorithms.aggregation import Aggregation
from models.algorithms.modes import Correction
from models.algorithms.step_statistics import kept_scale, rejected_siblings, step_statistics
from models.algorithms.tokens import PolicyTokens, StepStatistics
from models.train.step.columns import token_counts
from models.train.step.examples import Example


def write_step_statistics(
    examples: Sequence[Example],
    algorithm: AlgorithmConfig,
    correction: Correction,
    aggregation: Aggregation,
) -> StepStatistics:
    """Facts of the step that `examples` are; sets `rejected` and `kept_scale` of each.

    The examples hold `current_log_probs` (under the weights of the step's start) and, unless the mode has no such
    `old_log_probs`.
    """
    tokens, rollout = _tokens_of_step(examples, correction)
    if correction.rejects and correction.rs_unit == "rollout":
        rejected = rejected_siblings(tokens, rollout, correction)
        tokens = replace(tokens, rejected=rejected)
        for example, value in zip(examples, rejected.tolist(), strict=True):
            example.rejected = value
    if correction.rejects and correction.renormalize_after_rejection:
        scale = kept_scale(tokens, rollout, aggregation, correction)
        for example, factor in zip(examples, scale.tolist(), strict=True):
            example.kept_scale = factor
    return step_statistics(tokens, algorithm, correction)


def _tokens_of_step(examples: Sequence[Example], correction: Correction) -> tuple[PolicyTokens, torch.Tensor]:
    """All tokens, and the rollout [S] of each sequence."""
    sampler = [example.rollout_log_probs for example in examples]
    current = [e.rollout_log_probs if e.current_log_probs is None else e.current_log_probs for e in examples]
    old = [c if e.old_log_probs is None else e.old_log_probs for e, c in zip(examples, current, strict=True)]
    used = sampler if correction.policy_mode == "bypass" else old
    stale = [np.zeros(len(e.chosen), np.int64) if e.staleness is None else e.staleness for e in examples]
    counts = token_counts(examples)
    keys = np.array([e.key for e in examples], dtype=np.int64).reshape(-1, 2)
    _, rollout = np.unique(keys, axis=0, return_inverse=True)
    mu = _column(sampler, np.float32)
    tokens = PolicyTokens(
        log_probs=_column(current, np.float32),
        old_log_probs=_column(used, np.float32),
        rollout_log_probs=mu,
        advantages=_column([example.advantages for example in examples], np.float32),
        mask=torch.ones(len(mu), dtype=torch.bool),
        sequence=torch.from_numpy(np.repeat(np.arange(len(counts)), counts)),
        n_sequences=len(counts),
        staleness=_column(stale, np.int64),
    )
    return tokens, torch.from_numpy(rollout.reshape(-1).astype(np.int64))


def _column(parts: Sequence[npt.NDArray[np.generic]], dtype: type[np.generic]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype, copy=False))
