"""Several processes with a share of the micro-batches each make the update of one process alone."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sharded_trainer import CASES, run, train

from models.train import dp_group
from models.train.dp_group import DistributedDpGroup, DpGroup
from tests.models.train.rank_processes import run_ranks

# What depends on how the shares were packed; and a threshold at 0 of a margin that is 0 but for rounding.
LAYOUT = {"train/micro_batches", "train/padding_frac", "train/shared_prompt_frac", "custom/accuracy"}
DEADLINE_S = 150


def start(checkpoint: Path, out: Path, world: int) -> None:
    imports = ["sharded_trainer", "transformers.models.qwen3.modeling_qwen3"]
    run_ranks(run, (checkpoint, out), world, out / "rendezvous", imports=imports, deadline_s=DEADLINE_S)


@pytest.mark.slow
def test_shares_make_the_update_of_the_whole(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))  # for the process that forks
    alone = tmp_path / "alone"
    alone.mkdir()
    train(tiny, alone, 0, None)
    for world in (2, 4):
        out = tmp_path / str(world)
        out.mkdir()
        start(tiny, out, world)
        for name in CASES:
            expected, wanted = (
                load_file(alone / f"{name}-0.safetensors"),
                json.loads((alone / f"{name}-0.json").read_text()),
            )
            for rank in range(world):
                found, metrics = (
                    load_file(out / f"{name}-{rank}.safetensors"),
                    json.loads((out / f"{name}-{rank}.json").read_text()),
                )
                assert found.keys() == expected.keys(), name
                for key, value in expected.items():
                    torch.testing.assert_close(
                        found[key], value, atol=1e-6, rtol=1e-5, msg=lambda text, k=key, n=name: f"{n} {k}: {text}"
                    )
                for step, (have, want) in enumerate(zip(metrics, wanted, strict=True)):
                    assert have.keys() == want.keys(), (name, step)
                    for key in want.keys() - LAYOUT:
                        assert have[key] == pytest.approx(want[key], rel=1e-5, abs=1e-6), (name, world, step, key)
            if name == "all_rejected":
                assert wanted[0]["correction/all_rejected"] == 1.0
                assert not any(key.startswith("gradient/") for key in expected)
            else:
                assert any(value.abs().max() > 1e-4 for key, value in expected.items() if key.startswith("gradient/"))


def test_one_process_alone_is_its_own_sum() -> None:
    group = DpGroup()
    assert [part.tolist() for part in group.gather_by_dp_rank(np.array([1, 2], dtype=np.float32))] == [[1, 2]]
    assert group.merge({"a": 1.0}) == {"a": 1.0}
    layer = torch.nn.Linear(2, 1)
    group.all_reduce_gradients(list(layer.parameters()))
    assert layer.weight.grad is None


Trio = Callable[[bytes, bytes], DistributedDpGroup]


@pytest.fixture
def trio(monkeypatch: pytest.MonkeyPatch) -> Trio:
    """The second of three processes; the first two are one data-parallel rank, whose results the first hands in."""

    def made(first: bytes, third: bytes) -> DistributedDpGroup:
        def gathered(data: bytes, _group: object) -> list[bytes]:
            assert data == b""  # only source ranks send anything
            return [first, data, third]

        monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 3)
        monkeypatch.setattr(dp_group, "_all_gather", lambda own, group: [torch.tensor([n]) for n in (0, -1, 1)])
        monkeypatch.setattr(dp_group, "gather_bytes", gathered)
        return DistributedDpGroup(dp_rank=0, dp_size=2, is_mp_src_rank=False)

    return made


def test_names_that_a_share_lacks_are_merged_all_the_same(trio: Trio) -> None:
    group = trio(b'{"a": 2.0, "b": 5.0}', b'{"a": 1.0}')
    assert group.merge({"a": 100.0}) == {"a": 3.0, "b": 5.0}
    assert group.merge({"a": 100.0}, largest=True) == {"a": 2.0, "b": 5.0}


def test_what_a_process_does_not_speak_for_is_left_out(trio: Trio) -> None:
    one, two = np.array([1.5], dtype=np.float32), np.array([2.5, 3.5], dtype=np.float32)
    found = trio(one.tobytes(), two.tobytes()).gather_by_dp_rank(np.array([9.0], dtype=np.float32))
    assert [part.tolist() for part in found] == [[1.5], [2.5, 3.5]]
