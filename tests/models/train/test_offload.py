"""What leaves the device and comes back trains on as if it had stayed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_trainer import make_backend, make_sequences, train_step, weights_of

from models.train.huggingface.updates import move

PPO = {"advantage_estimator": "ppo", "kl_coef": 0.1, "critic_lr": 1e-3}


def test_training_goes_on_as_if_nothing_had_moved(tiny: Path, tmp_path: Path) -> None:
    """Also with a reference and a critic; saved and exported from the host."""
    stayed, moved = make_backend(tiny, **PPO), make_backend(tiny, **PPO)
    batch = make_sequences(4, rewards=True)
    for backend in (stayed, moved):
        backend.begin_batch(rollouts=12, steps=1, version=2)
        train_step(backend, [batch])
    held = list(moved._models.model.parameters())
    moved.offload()
    moved.save(tmp_path / "state")
    for name, tensor in weights_of(moved).items():
        assert torch.equal(tensor, weights_of(stayed)[name])
    moved.onload()
    assert all(one is other for one, other in zip(held, moved._models.model.parameters(), strict=True))
    results = []
    for backend in (stayed, moved):
        backend.begin_batch(rollouts=12, steps=1, version=2)
        results.append(train_step(backend, [batch]))
    assert results[0][0] == pytest.approx(results[1][0])
    for name, tensor in results[0][2].items():
        assert torch.equal(tensor, results[1][2][name])


def test_everything_that_takes_memory_moves() -> None:
    """To a device without memory: whatever stayed would show."""
    layer = torch.nn.Linear(3, 2)
    layer.register_buffer("scale", torch.ones(2))
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    move([layer], [optimizer], torch.device("meta"))
    held = [*layer.parameters(), *layer.buffers(), *(v for s in optimizer.state.values() for v in s.values())]
    assert {tensor.device.type for tensor in held} == {"meta"}
    assert len(held) == 2 + 1 + 2 * 3
