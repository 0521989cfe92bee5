"""What a line of samples.jsonl says of each token: the sampler's log-probs, and the advantages that were trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from stages.messages import RolloutSlice
from stages.sample_log import SAMPLES_FILE, SampleLog
from stages.train.batch import Batch, BatchLog, for_trainer
from tests.stages.stage_rig import make_config, make_sample, make_slice


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / SAMPLES_FILE).read_text().splitlines()]


def groups() -> list[RolloutSlice]:
    """One whose first rollout has two sequences, and one that is equal but for its reward."""
    parts = [make_sample(0, reward=1.0, mask=[1, 0, 1, 1], sequence=k, sequences=2) for k in range(2)]
    return [
        make_slice(5, *parts, make_sample(1, reward=0.0, log_probs=[-0.123456, -1e-9, -2.0, -3.0]), n_samples=2),
        make_slice(3, make_sample(0, reward=0.0), make_sample(1, reward=4.0, remove_sample=True)),
    ]


async def trained(path: Path, **sections: Any) -> list[dict[str, Any]]:
    """The lines of a batch of both groups, as the train stage writes them."""
    config = make_config(**sections)
    batch = Batch(config, 0)
    for slice_ in groups():
        batch.add(*for_trainer(config, slice_))
    batch.log_probs[5] = [np.full(4, -0.3, np.float32), np.full(4, -1.25, np.float32), np.zeros(4, np.float32)]
    await BatchLog(config, path, Mock()).trained(1, batch, {"perf/step_time": 1.0})
    return lines(path)


async def test_each_trained_token_has_its_log_probs_and_its_advantage(tmp_path: Path) -> None:
    *fanned, kept, removed = await trained(tmp_path)
    assert [row["group"] for row in (*fanned, kept, removed)] == [5, 5, 5, 3, 3], "first what the trainer scored"
    assert [row["train_log_probs"] for row in fanned] == [
        [None, None, None, -0.3, None, -0.3, -0.3],
        [None, None, None, -1.25, None, -1.25, -1.25],
        [None, None, None, 0.0, 0.0, 0.0, 0.0],
    ]
    assert not {"train_log_probs"} & (kept.keys() | removed.keys())
    assert fanned[2]["log_probs"] == [None, None, None, -0.1235, 0.0, -2.0, -3.0], "four decimals, none of the prompt"
    assert [row["log_probs"][4] for row in fanned[:2]] == [None, None], "what is masked"
    assert [row["advantages"] for row in fanned] == [
        *[[[None, 3], [0.7071, 1], [None, 1], [0.7071, 2]]] * 2,
        [[None, 3], [-0.7071, 4]],
    ]
    assert kept["advantages"] == [[None, 3], [-0.7071, 4]]
    assert removed["advantages"] == [[None, 7]], "it counts in the baseline, and no token of it is trained"


@pytest.mark.parametrize(
    "sections",
    [
        {"algorithm": {"advantage_estimator": "reinforce_plus_plus"}},
        {"algorithm": {"advantage_estimator": "ppo"}},
        {"algorithm": {"normalize_advantages": True}},
        {"algorithm": {"advantage_estimator": "reinforce_plus_plus_baseline", "kl_coef": 0.1}},
        {"algorithm": {"custom_advantage_function_path": "a.b:c"}},
        {"algorithm": {"rollout_data_postprocess_path": "a.b:c"}},
        {"distill": {"use_opd": True}},
    ],
)
async def test_advantages_that_the_trainer_makes_are_not_guessed(sections: dict[str, Any], tmp_path: Path) -> None:
    rows = await trained(tmp_path, **sections)
    assert len(rows) == 5
    assert not any("advantages" in row for row in rows)
    assert all("log_probs" in row for row in rows)


async def test_a_group_that_was_not_trained_has_log_probs_and_no_advantages(tmp_path: Path) -> None:
    log = SampleLog(make_config(), tmp_path)
    await log.ended(0, make_slice(1), "filtered", "zero_std_0.0")
    assert [row["log_probs"] for row in lines(tmp_path)] == [[None] * 3 + [-0.5] * 4] * 2
    assert not any("advantages" in row for row in lines(tmp_path))
