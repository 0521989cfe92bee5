"""Two runs that trained otherwise are told apart, by their batches and by their weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos.oracle import Expected
from tests.chaos.trained import OTHERWISE, Trained, judge_same, trained_by

ALONE = Trained(("a", "b", "c"), (("hf/model.safetensors", "1"), ("trainer/optimizer.safetensors", "2")))


def test_a_run_that_trained_the_same_has_no_fault() -> None:
    assert judge_same(replace(ALONE), ALONE) == []


@pytest.mark.parametrize(
    ("batches", "step"), [(("a", "x", "c"), 2), (("b", "a", "c"), 1), (("a", "b"), 3), (("a", "b", "c", "d"), 4)]
)
def test_the_first_other_batch_is_named(batches: tuple[str, ...], step: int) -> None:
    (fault,) = judge_same(replace(ALONE, batches=batches), ALONE)
    assert fault.kind == OTHERWISE
    assert f"step {step} " in fault.text


def test_other_weights_are_a_fault_though_the_batches_are_the_same() -> None:
    (fault,) = judge_same(replace(ALONE, weights=(ALONE.weights[0], ("trainer/optimizer.safetensors", "3"))), ALONE)
    assert (fault.kind, "weights" in fault.text) == (OTHERWISE, True)


def test_a_run_without_a_step_is_nothing_to_compare_with(tmp_path: Path) -> None:
    (tmp_path / "ledger.jsonl").write_bytes(b"")
    directory = tmp_path / "checkpoints" / "step-00000001"
    directory.mkdir(parents=True)
    (directory / "manifest.json").write_text('{"manifest":{"files":{}}}')
    with pytest.raises(ValueError, match="0 steps and 0 files"):
        trained_by(tmp_path, Expected(1, 4, 0))
