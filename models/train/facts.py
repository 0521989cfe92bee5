"""Facts of one optimizer step over all processes, written into its examples.

Invariants: every process computes the facts of all sequences of the step, from the same numbers in the same order, so
that no decision differs between them; nothing here runs a model.
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
from models.algorithms.step_facts import kept_scale, rejected_siblings, step_facts
from models.algorithms.tokens import PolicyTokens, StepFacts
from models.train.batch import Example
from models.train.columns import token_counts
from models.train.reduce import Reducer, gathered


def write_facts(
    examples: Sequence[Example],
    algorithm: AlgorithmConfig,
    correction: Correction,
    aggregation: Aggregation,
    reducer: Reducer,
) -> StepFacts:
    """Facts of the step of which `examples` lie in this process; sets `rejected` and `kept_scale` of each.

    The examples hold `current_log_probs` (under the weights of the step's start) and, unless the mode has no such
    anchor, `old_log_probs`.
    """
    tokens, rollout, first = _tokens_of_step(examples, correction, reducer)
    own = slice(first, first + len(examples))
    if correction.rejects and correction.rs_unit == "rollout":
        rejected = rejected_siblings(tokens, rollout, correction)
        tokens = replace(tokens, rejected=rejected)
        for example, value in zip(examples, rejected[own].tolist(), strict=True):
            example.rejected = value
    if correction.rejects and correction.renormalize:
        scale = kept_scale(tokens, rollout, aggregation, correction)
        for example, factor in zip(examples, scale[own].tolist(), strict=True):
            example.kept_scale = factor
    return step_facts(tokens, algorithm, correction)


def _tokens_of_step(
    examples: Sequence[Example], correction: Correction, reducer: Reducer
) -> tuple[PolicyTokens, torch.Tensor, int]:
    """Tokens of all processes, the rollout [S] of each sequence, and the index of the first sequence of this one."""
    sampler = [example.rollout_log_probs for example in examples]
    current = [e.rollout_log_probs if e.current_log_probs is None else e.current_log_probs for e in examples]
    old = [c if e.old_log_probs is None else e.old_log_probs for e, c in zip(examples, current, strict=True)]
    anchor = sampler if correction.mode == "bypass" else old
    stale = [np.zeros(len(e.chosen), np.int64) if e.staleness is None else e.staleness for e in examples]
    counts = token_counts(examples)
    per_process = reducer.gather(counts)
    first = sum(len(part) for part in per_process[: reducer.rank])
    all_counts = np.concatenate(per_process).astype(np.int64)
    keys = gathered(reducer, np.array([e.key for e in examples], dtype=np.int64).reshape(-1)).reshape(-1, 2)
    _, rollout = np.unique(keys, axis=0, return_inverse=True)
    mu = _column(sampler, np.float32, reducer)
    tokens = PolicyTokens(
        log_probs=_column(current, np.float32, reducer),
        old_log_probs=_column(anchor, np.float32, reducer),
        rollout_log_probs=mu,
        advantages=_column([example.advantages for example in examples], np.float32, reducer),
        mask=torch.ones(len(mu), dtype=torch.bool),
        sequence=torch.from_numpy(np.repeat(np.arange(len(all_counts)), all_counts)),
        n_sequences=len(all_counts),
        staleness=_column(stale, np.int64, reducer),
    )
    return tokens, torch.from_numpy(rollout.reshape(-1).astype(np.int64)), first


def _column(parts: Sequence[npt.NDArray[np.generic]], dtype: type[np.generic], reducer: Reducer) -> torch.Tensor:
    own = np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype, copy=False)
    return torch.from_numpy(np.array(gathered(reducer, own)))
