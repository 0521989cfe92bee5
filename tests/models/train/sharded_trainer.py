"""One process of several that train one policy together.

Run as a program with spawn; the results are written as JSON and safetensors, since nothing here is pickled.
"""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from small_trainer import make_backend, make_sequences, state_of, train_step

from models.train.dp_group import DistributedDpGroup, DpGroup
from models.train.interface import TrainSequence

# name -> (number of optimizer steps, how many sequences, options)
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "rollout_mean": (1, "all", {}),
    "token_mean": (2, "all", {"loss_aggregation": "token_mean", "entropy_coef": 0.01}),
    "seq_mean": (1, "all", {"loss_aggregation": "seq_mean", "staleness_lr_decay": 0.5}),
    "constant": (1, "few", {"loss_aggregation": "constant", "use_kl_loss": True, "kl_loss_coef": 0.1}),
    "whitening": (
        2,
        "all",
        {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True, "kl_coef": 0.1},
    ),
    "critic": (
        2,
        "all",
        {
            "advantage_estimator": "ppo",
            "normalize_advantages": True,
            "bootstrap_truncated": True,
            "critic_lr": 1e-3,
            "gamma": 0.97,
            "lambd": 0.9,
        },
    ),
    "distillation": (1, "all", {"use_opd": True, "opd_kl_coef": 0.3, "normalize_advantages": True}),
    "m2po": (2, "all", {"policy_loss": "m2po", "m2po_threshold": 0.1}),
    "normalised_weights": (1, "all", {"tis_batch_normalize": True, "tis_level": "sequence"}),
    "rejected_rollouts": (
        1,
        "all",
        {"rollout_rs": ("seq_mean_k2=0.09",), "rs_unit": "rollout", "renormalize_after_rejection": True},
    ),
    "all_rejected": (1, "all", {"rollout_rs": ("token_k2=1e-12",)}),
    "nothing_here": (1, "one", {}),
    "preferences": (
        2,
        "all",
        {
            "loss_type": "custom_loss",
            "custom_loss_function_path": "models.algorithms.dpo:dpo",
            "use_kl_loss": True,
            "kl_loss_coef": 0.5,
        },
    ),
}


def sequences_of(how: str) -> list[TrainSequence]:
    sequences = make_sequences(3, rewards=True)
    """`few`: fewer than there are processes; then some of them have nothing to do."""
    return sequences[: {"few": 3, "one": 1, "all": len(sequences)}[how]]


def train(checkpoint: Path, out: Path, rank: int, dp_group: DpGroup | None) -> None:
    """Train every case, and write what came of it."""
    for name, (steps, how, fields) in CASES.items():
        backend = make_backend(checkpoint, dp_group=dp_group, max_tokens_per_gpu=48, **fields)
        metrics, tensors = [], {}
        backend.begin_batch(rollouts=12, steps=steps, version=2)
        calls: list[list[TrainSequence]] = [sequences_of(how)]
        for step in range(steps):
            found, gradient, weights = train_step(backend, calls if step == 0 else [])
            metrics.append(found)
            tensors |= {f"gradient/{step}/{key}": value for key, value in gradient.items()}
        tensors |= {f"weights/{key}": value for key, value in weights.items()}
        if backend._models.critic is not None:
            tensors |= state_of(backend, "critic")
        save_file({key: value.contiguous() for key, value in tensors.items()}, out / f"{name}-{rank}.safetensors")
        (out / f"{name}-{rank}.json").write_text(json.dumps(metrics))


def run(checkpoint: str, out: str, rank: int, world: int, rendezvous: str) -> None:
    """Entry point of a spawned process."""
    torch.set_num_threads(1)
    np.random.seed(rank)  # processes must agree without a common random stream
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    try:
        train(Path(checkpoint), Path(out), rank, DistributedDpGroup(dp_rank=rank, dp_size=world, is_mp_src_rank=True))
    finally:
        torch.distributed.destroy_process_group()
