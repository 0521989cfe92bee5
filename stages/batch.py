"""One rollout batch in training: which groups it holds and what is reported of it.

Invariant: `staleness` counts exactly the tokens that were trained on, by (batch number - version of the token).
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import xxhash

from configs.schema import Config
from models.algorithms.advantages import advantages
from models.train.interface import TrainSequence
from stages.messages import RolloutSlice, Sample
from stages.ports import Lease


def token_versions(sample: Sample) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Version of each response token [R]."""
    runs = sample.version_runs
    return np.repeat([r.version for r in runs], [r.n_tokens for r in runs]).astype(np.int32)


def slice_sequences(config: Config, slice_: RolloutSlice) -> list[TrainSequence]:
    """The rollouts of one complete group with their advantages, as the trainer takes them."""
    algorithm = config.algorithm
    rewards = [s.reward if s.reward is not None else 0.0 for s in slice_.samples]
    if config.train.loss_type == "sft_loss":
        values = np.ones(len(rewards))
    else:
        values = advantages(
            algorithm.advantage_estimator,
            rewards,
            list(range(len(rewards))),
            normalize_std=not algorithm.disable_grpo_std_normalization,
        )
    group = slice_.group
    prompt_ids = np.asarray(group.prompt_ids)
    sequences = []
    for sample, value in zip(slice_.samples, values, strict=True):
        mask = np.array(sample.loss_mask, dtype=np.uint8)
        sequences.append(
            TrainSequence(
                group_id=group.group_id,
                rollout_id=group.group_id * group.n_samples + sample.index,
                tokens=np.concatenate([prompt_ids, np.asarray(sample.response_ids)]).astype(np.int32),
                response_length=sample.n_tokens,
                loss_mask=mask,
                rollout_log_probs=np.array(sample.rollout_log_probs, dtype=np.float32),
                advantages=(float(value) * mask).astype(np.float32),
                versions=token_versions(sample),
            )
        )
    return sequences


class Batch:
    """Groups of rollout batch `step` (0 = the first)."""

    def __init__(self, config: Config, step: int) -> None:
        self.step = step
        self.leases: list[Lease[RolloutSlice]] = []
        self.staleness: dict[int, int] = {}
        self.trained_tokens = 0
        self.compute_s = 0.0
        self.pending = 0  # groups handed to the backend since it last ran them through
        members = 1 if config.train.loss_type == "sft_loss" else config.rollout.n_samples_per_prompt
        self.expected_rollouts = config.rollout.rollout_batch_size * members

    def add(self, lease: Lease[RolloutSlice]) -> None:
        self.leases.append(lease)
        self.pending += 1
        counts: Counter[int] = Counter(self.staleness)
        for sample in lease.message.samples:
            trained = token_versions(sample)[np.asarray(sample.loss_mask) > 0]
            self.trained_tokens += len(trained)
            versions, n = np.unique(self.step - trained, return_counts=True)
            counts.update(dict(zip(versions.tolist(), n.tolist(), strict=True)))
        self.staleness = dict(counts)

    @property
    def group_ids(self) -> tuple[int, ...]:
        return tuple(lease.message.group.group_id for lease in self.leases)

    def token_hash(self) -> str:
        """xxh3 of the trained ids and masks in group order: equal batches have equal hashes."""
        digest = xxhash.xxh3_128()
        for lease in sorted(self.leases, key=lambda one: one.message.group.group_id):
            group = lease.message.group
            digest.update(f"{group.group_id}:{group.prompt_index}".encode())
            for sample in lease.message.samples:
                digest.update(np.ascontiguousarray(sample.response_ids).tobytes())
                digest.update(np.ascontiguousarray(sample.loss_mask).tobytes())
        return digest.hexdigest()

    def metrics(self) -> dict[str, float]:
        """Rollout-side metrics, under the names of docs/metrics.md."""
        samples = [s for lease in self.leases for s in lease.message.samples]
        rewards = np.array([s.reward if s.reward is not None else 0.0 for s in samples])
        lengths = np.array([s.n_tokens for s in samples])
        total = sum(self.staleness.values())
        mean = sum(k * n for k, n in self.staleness.items()) / total if total else 0.0
        metrics = {
            "train/reward_mean": float(rewards.mean()),
            "train/reward_std": float(rewards.std()),
            "rollout/response_len/mean": float(lengths.mean()),
            "rollout/response_len/max": float(lengths.max()),
            "rollout/truncated_ratio": sum(s.status == "truncated" for s in samples) / len(samples),
            "rollout/turns/mean": sum(s.turns for s in samples) / len(samples),
            "rollout/mixed_version_ratio": sum(len(s.version_runs) > 1 for s in samples) / len(samples),
            "staleness/mean": mean,
            "staleness/start_mean": float(
                np.mean([self.step - s.version_runs[0].version for s in samples if s.version_runs])
            ),
            "staleness/max": float(max(self.staleness, default=0)),
            "train/rollouts": float(len(samples)),
        }
        parts: dict[str, list[float]] = {}
        for sample in samples:
            for name, value in sample.reward_parts.items():
                parts.setdefault(name, []).append(value)
        return metrics | {f"reward/{name}": float(np.mean(values)) for name, values in parts.items()}
