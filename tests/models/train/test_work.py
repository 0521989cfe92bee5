"""Operations of a batch, counted token by token, and the figures of a trainer's speed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from configs.schema.model_shapes import read_shape
from models.train.interface import TrainSequence
from models.train.work import Work, checkpoint_shape, published_tflops, speed, step_flops, work_of
from tests.models.train import rig

# Two layers: q 8x8, k and v 8x4, o 8x8, gate, up and down 8x16; a head of 8x32.
MODEL = {
    "model_type": "qwen3", "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 32,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "tie_word_embeddings": True,
}  # fmt: skip


def sequence(prompt: list[int], response: int, prefix: tuple[int, int] | None = None) -> TrainSequence:
    return rig.sequence(tokens=[*prompt, *range(100, 100 + response)], mask=[1] * response, prefix=prefix)


def test_a_beginning_that_sequences_share_is_worked_on_once() -> None:
    """The last token of each is no input. Inputs see themselves and all before: 1, 2, 3, ..."""
    one, again, other = sequence([1, 2, 3], 2), sequence([1, 2, 3], 3), sequence([9], 1)
    branch = sequence([1, 2, 3], 4, prefix=(1, 5))
    assert work_of([one]) == Work(tokens=4, pairs=1 + 2 + 3 + 4, chosen=2, sequence_tokens=5)
    assert work_of([one, again]) == Work(tokens=4 + 2, pairs=10 + 4 + 5, chosen=5, sequence_tokens=11)
    assert work_of([one, other]) == Work(tokens=4 + 1, pairs=10 + 1, chosen=3, sequence_tokens=7)
    assert work_of([one, again, branch]).pairs == 19 + 6, "its first five tokens are those of the second one"
    assert work_of([sequence([1, 2], 0), sequence([1, 2], 0)]).tokens >= 0, "an empty response is no work"


def test_operations_of_an_update_are_those_of_its_matrices() -> None:
    weights = 2 * (64 + 32 + 32 + 64 + 3 * 128)
    attention = 2 * 6 * 2 * 8  # scores and values, 2 heads of 4
    assert step_flops(read_shape(MODEL), Work(5, 11, 3, 7)) == 6 * weights * 5 + attention * 11 + 6 * 8 * 32 * 3


def test_figures_of_a_batch(tmp_path: Path) -> None:
    groups, shape = [Work(5, 11, 3, 7), Work(5, 11, 3, 13)], read_shape(MODEL)
    flops = 2 * step_flops(shape, groups[0])
    assert speed(shape, groups, 4.0, None) == {
        "perf/train_tokens_per_gpu_per_s": 5.0,
        "perf/train_tflops_per_gpu": pytest.approx(flops / 4e12),
    }
    assert speed(shape, groups, 4.0, flops / 1e12)["perf/mfu"] == pytest.approx(0.25)
    assert speed(None, groups, 4.0, 989.0).keys() == {"perf/train_tokens_per_gpu_per_s"}
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    assert checkpoint_shape(str(tmp_path)) == shape
    assert checkpoint_shape(str(tmp_path / "none")) is None


def test_peaks_go_by_the_name_of_the_gpu() -> None:
    names = ("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 3060")
    assert [published_tflops(name) for name in names] == [989, 756, 312, None]
