"""A tiny checkpoint, sequences of uneven lengths with tool tokens, and a look at a backend's gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings

from configs.schema.algorithm import AlgorithmConfig
from configs.schema.correction import CorrectionConfig
from configs.schema.train import TrainConfig
from models.algorithms.modes import Correction, resolve_correction
from models.tiny import make_tiny_checkpoint
from models.train.interface import TrainSequence
from models.train.torch_backend import TorchBackend

# Examples are judged by their result, never by the time that a busy machine takes.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

VOCABULARY = 32


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(
        tmp_path_factory.mktemp("checkpoints") / "tiny",
        tokenizer="arithmetic",
        hidden_size=32,
        num_layers=2,
        intermediate_size=64,
        max_position_embeddings=128,
    )


def make_sequences(
    seed: int = 0, *, groups: int = 4, per_group: int = 3, fan_out: bool = True, dark: bool = True
) -> list[TrainSequence]:
    """Uneven lengths; some tokens masked; the first rollout of each group fans out; some sequences fully masked."""
    rng = np.random.default_rng(seed)
    out = []
    for group in range(groups):
        prompt = rng.integers(1, VOCABULARY, int(rng.integers(1, 9)))
        for index in range(per_group):
            for part in range(2 if fan_out and index == 0 else 1):
                response = int(rng.integers(1, 14))
                mask = (rng.random(response) > 0.25).astype(np.uint8)
                if dark and index == 1 and group == 0:
                    mask[:] = 0
                out.append(
                    sequence(
                        group=seed * 1000 + group,
                        rollout=(seed * 1000 + group) * 10 + index,
                        tokens=np.concatenate([prompt, rng.integers(1, VOCABULARY, response)]),
                        mask=mask,
                        rollout_log_probs=np.where(mask, rng.normal(-3.4, 0.4, response), 0.0),
                        advantage=rng.normal(),
                        version=part,
                    )
                )
    return out


def sequence(
    *,
    group: int = 0,
    rollout: int = 0,
    tokens: Any,
    mask: Any,
    rollout_log_probs: Any = None,
    advantage: float = 1.0,
    version: int = 0,
) -> TrainSequence:
    n = len(mask)
    return TrainSequence(
        group_id=group,
        rollout_id=rollout,
        tokens=np.asarray(tokens, dtype=np.int32),
        response_length=n,
        loss_mask=np.asarray(mask, dtype=np.uint8),
        rollout_log_probs=np.asarray(np.zeros(n) if rollout_log_probs is None else rollout_log_probs, np.float32),
        advantages=np.full(n, advantage, dtype=np.float32),
        versions=np.full(n, version, dtype=np.int32),
    )


@pytest.fixture
def sequences() -> Callable[..., list[TrainSequence]]:
    return make_sequences


@pytest.fixture
def one() -> Callable[..., TrainSequence]:
    return sequence


@pytest.fixture
def backend(tiny: Path) -> Callable[..., TorchBackend]:
    """Makes a backend that is set up; keyword arguments are fields of either configuration."""

    def make(
        *,
        staleness: int = 1,
        temperature: float = 0.9,
        total_steps: int | None = None,
        correction: Correction | None = None,
        **fields: Any,
    ) -> TorchBackend:
        train = {name: fields.pop(name) for name in list(fields) if name in TrainConfig.__struct_fields__}
        defaults = {"hf_checkpoint": str(tiny), "lr": 1e-3, "adam_eps": 1e-4, "train_device": "cpu"}
        algorithm = AlgorithmConfig(**fields)
        made = TorchBackend(
            TrainConfig(**{**defaults, **train}),
            algorithm,
            temperature=temperature,
            max_response_len=16,
            seed=0,
            total_steps=total_steps,
            correction=correction or resolve_correction(CorrectionConfig(), max_staleness=staleness),
        )
        made.setup()
        return made

    return make


@pytest.fixture
def run_step() -> Callable[..., tuple[dict[str, float], dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    """Trains one batch; returns metrics, gradient (divided by the denominator) and the weights afterwards."""

    def run(
        backend: TorchBackend, calls: Sequence[Sequence[TrainSequence]], *, flush: bool = False
    ) -> tuple[dict[str, float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        gradient: dict[str, torch.Tensor] = {}
        updater = backend._updater
        apply = updater.apply

        def spy(denominator: float) -> Any:
            for name, parameter in updater.named_parameters:
                if parameter.grad is not None:
                    gradient[name] = parameter.grad.clone() / denominator
            return apply(denominator)

        updater.apply = spy  # type: ignore[method-assign]
        for call in calls:
            backend.accumulate(call)
            if flush:
                backend.flush()
        metrics = backend.step()
        updater.apply = apply  # type: ignore[method-assign]
        return metrics, gradient, weights_of(backend)

    return run


def weights_of(backend: TorchBackend) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in backend.export_weights()}


@pytest.fixture
def weights() -> Callable[[TorchBackend], dict[str, torch.Tensor]]:
    return weights_of
