"""What is reported of a rollout batch: rewards, lengths, staleness and pass rates of the groups that were trained.

Invariants: the unit of `rollout/*`, `reward/*` and `passrate/*` is the rollout, with all its sequences together; the
unit of `staleness/*` is the trained token; names are those of docs/metrics.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from configs.schema import Config
from stages.evaluate import estimates
from stages.group.filters import zero_std
from stages.messages import RolloutSlice, Sample
from stages.rollouts import closing, oldest_version, raw_reward, raw_rewards, rollout_return, rollouts, trained_masks
from stages.sampling.requests import PREFILL

Rollout = tuple[Sample, ...]
Masks = list[npt.NDArray[np.bool_]]  # of a rollout: of each sequence, [T]
Metrics = dict[str, float]  # by name
MASKED: Final = "rollout/masked_stale_tokens"  # of groups that were trained without them


def batch_metrics(config: Config, step: int, slices: Sequence[RolloutSlice], staleness: Mapping[int, int]) -> Metrics:
    """All of them. `step` is the version of the weights that were trained, `staleness` the trained tokens by age."""
    members = [parts for slice_ in slices for parts in rollouts(slice_.samples)]
    masks = [trained_masks(parts) for parts in members]
    metrics = {
        **_reward_metrics(members),
        **_length_metrics(members, masks),
        **_staleness_metrics(step, members, staleness, config.train.num_steps_per_rollout or 1),
        "rollout/truncated_ratio": _share(parts[-1].status == "truncated" for parts in members),
        "rollout/turns/mean": float(np.mean([parts[-1].turns for parts in members])),
        "rollout/mixed_version_ratio": _share(any(len(set(s.model_versions)) > 1 for s in parts) for parts in members),
        "rollout/segments/mean": float(np.mean([len(parts) for parts in members])),
        "rollout/reused_tokens": float(sum(s.reused_tokens for parts in members for s in parts)),
        "rollout/replaced_ratio": _share(any(s.replaced for s in parts) for parts in members),
        "train/rollouts": float(len(members)),
    }
    proposed = sum(s.spec_proposed for parts in members for s in parts)
    if proposed:
        metrics["rollout/spec_accept_rate"] = sum(s.spec_accepted for parts in members for s in parts) / proposed
    if config.train.loss_type != "sft_loss":
        metrics |= _group_metrics(slices) | _engine_metrics(members, masks)
    return metrics


def _share(found: Iterable[bool]) -> float:
    return float(np.mean(list(found)))


def _reward_metrics(members: Sequence[Rollout]) -> Metrics:
    rewards = np.array([rollout_return(parts) for parts in members])
    raw = np.array([raw_reward(parts[-1]) for parts in members])
    metrics = {
        "train/reward_mean": float(rewards.mean()),
        "train/reward_std": float(rewards.std()),
        "rollout/raw_reward": float(raw.mean()),
    }
    values_of: dict[str, list[float]] = {}
    for parts in members:
        named = {f"reward/{name}": value for name, value in parts[-1].reward_parts.items()}
        for name, value in (*named.items(), *parts[-1].metrics.items()):
            values_of.setdefault(name, []).append(value)
    return metrics | {name: float(np.mean(values)) for name, values in values_of.items()}


def _length_metrics(members: Sequence[Rollout], masks: Sequence[Masks]) -> Metrics:
    lengths = np.array([sum(s.new_tokens for s in parts) for parts in members])
    trained = np.array([sum(map(np.count_nonzero, parts)) for parts in masks])
    found = {"response_len": lengths, "effective_response_len": trained}
    spread: dict[str, Callable[..., Any]] = {"mean": np.mean, "median": np.median, "max": np.max, "min": np.min}
    return {f"rollout/{name}/{key}": float(of(n)) for name, n in found.items() for key, of in spread.items()}


def _engine_metrics(members: Sequence[Rollout], masks: Sequence[Masks]) -> Metrics:
    samples, flat = list(chain.from_iterable(members)), list(chain.from_iterable(masks))
    trained = int(sum(map(np.count_nonzero, flat)))
    read = sum(sample.metrics.get(PREFILL, 0.0) for sample in samples)
    cached = sum(sample.cached_tokens for sample in samples if PREFILL in sample.metrics)
    total = sum(float(sample.log_probs @ mask) for sample, mask in zip(samples, flat, strict=True))
    metrics = {"rollout/prefix_cache_hit_rate": cached / read} if read else {}
    return metrics | ({"rollout/rollout_log_probs": total / trained} if trained else {})


def _staleness_metrics(step: int, members: Sequence[Rollout], staleness: Mapping[int, int], updates: int) -> Metrics:
    """`updates`: optimizer steps of a batch; versions count batches and do not see those inside."""
    starts = [step - made[0] for parts in members if (made := parts[0].model_versions)]
    oldest = [step - version for parts in members if (version := oldest_version(parts)) is not None]
    total = sum(staleness.values())
    mean = sum(lag * n for lag, n in staleness.items()) / total if total else 0.0
    metrics = {
        "staleness/mean": mean,
        "staleness/p99": float(quantile(staleness, 0.99)),
        "staleness/max": float(max(staleness, default=0)),
        "staleness/start_mean": float(np.mean(starts)) if starts else 0.0,
        "staleness/sample_max": float(np.mean(oldest)) if oldest else 0.0,
        "staleness/opt_steps": mean * updates + (updates - 1) / 2,
    }
    return metrics | {f"staleness/token_hist/{lag}": float(n) for lag, n in sorted(staleness.items())}


def quantile(histogram: Mapping[int, int], share: float) -> int:
    """Smallest value that covers this share of the counts; 0 of an empty histogram."""
    values = sorted(histogram)
    covered = accumulate(histogram[value] for value in values)
    wanted = share * sum(histogram.values())
    return next((value for value, count in zip(values, covered, strict=True) if count >= wanted), 0)


def _group_metrics(slices: Sequence[RolloutSlice]) -> Metrics:
    wanted = sum(slice_.group.n_samples for slice_ in slices)
    counted = sum(len(closing(slice_.samples)) for slice_ in slices)
    metrics = {
        "rollout/zero_std_frac": _share(zero_std(slice_) is not None for slice_ in slices),
        "rollout/failed_ratio": 1.0 - counted / wanted if wanted else 0.0,
    }
    for estimate, value in estimates([slice_.samples for slice_ in slices]).items():
        metrics[f"passrate/{estimate}"] = value
    sources: dict[str, list[float]] = {}
    for slice_ in slices:
        bucket = length_bucket(slice_.n_tokens / max(len(closing(slice_.samples)), 1))
        metrics[f"rollout/group_len/{bucket}"] = metrics.get(f"rollout/group_len/{bucket}", 0.0) + 1.0
        if (
            '"source_name"' in slice_.group.metadata
            and (name := slice_.group.row_metadata.get("source_name")) is not None
        ):
            sources.setdefault(str(name), []).append(float(raw_rewards(slice_.samples).mean()))
    return metrics | {f"reward/by_source/{name}": float(np.mean(rewards)) for name, rewards in sources.items()}


def length_bucket(tokens: float) -> int:
    """Upper bound of the bucket of a mean response length: the next power of two."""
    return 1 << max(int(np.ceil(tokens)) - 1, 0).bit_length()
