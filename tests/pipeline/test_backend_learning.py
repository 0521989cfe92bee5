"""The same run learns the same on every training backend: one process, FSDP2 on two, tensor parallel on two."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import SMALL, made_model, succeed

pytestmark = [pytest.mark.slow, pytest.mark.full]

SEVENS = '''
def sevens(response, label, metadata):
    """The share of sevens: dense, and learned within 40 batches by a random model."""
    return response.count("7") / max(len(response), 1)
'''
BACKENDS = {
    "torch": [],
    "fsdp": ["--actor-num-gpus-per-node", "2"],
    "megatron": ["--actor-num-gpus-per-node", "2", "--tensor-model-parallel-size", "2"],
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_learns_the_same(backend: str, tmp_path: Path) -> None:
    """Seeds move the reward of the last tenth of this run between 0.92 and 0.96; at the start it is 0.05."""
    (tmp_path / "sevens.py").write_text(SEVENS)
    done = succeed(
        tmp_path / "run", *SMALL, *made_model(), "--train-backend", backend, *BACKENDS[backend],
        "--custom-rm-path", "sevens:sevens", "--rm-type", "auto", "--num-rollout", "40", "--rollout-batch-size", "8",
        "--n-samples-per-prompt", "8", "--rollout-max-response-len", "8", "--lr", "1e-3", "--log-interval", "10",
        cwd=tmp_path,
    )  # fmt: skip
    reward = done.summary["reward"]
    assert reward["first"] < 0.15, reward
    assert reward["last"] == pytest.approx(0.94, abs=0.06), reward
    assert done.summary["groups"]["trained"] == 40 * 8
    assert done.summary["restarts"] == {}
