"""`--save-hf`: a copy of each checkpoint's policy."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import SMALL, here, made_model

from models.disk import CheckpointError
from pipeline.record.save_hf import save_hf


def checkpoint(path: Path, text: str) -> Path:
    (path / "hf").mkdir(parents=True)
    (path / "hf" / "config.json").write_text("{}")
    (path / "hf" / "model.safetensors").write_text(text)
    return path


def test_each_step_has_its_place_or_replaces_the_one_before(tmp_path: Path) -> None:
    first, second = checkpoint(tmp_path / "a", "one"), checkpoint(tmp_path / "b", "two")
    assert save_hf(first, str(tmp_path / "out" / "step-{step}"), 7) == tmp_path / "out" / "step-7"
    for made in (first, second):
        save_hf(made, str(tmp_path / "newest"), 8)
    assert (tmp_path / "newest" / "model.safetensors").read_text() == "two"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a", "b", "newest", "out"]  # no drafts are left
    assert (tmp_path / "out" / "step-7" / "model.safetensors").read_text() == "one"


def test_what_is_no_model_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.tex").write_text("years")
    with pytest.raises(CheckpointError, match=r"--save-hf .*work exists and is no model .*choose another place"):
        save_hf(checkpoint(tmp_path / "a", "one"), str(tmp_path / "work"), 1)
    assert (tmp_path / "work" / "thesis.tex").read_text() == "years"


@pytest.mark.slow
def test_a_run_leaves_the_weights_of_its_checkpoints_there(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    flags = ["--save-interval", "2", "--save-hf", str(tmp_path / "out" / "{step}")]
    done = here(tmp_path / "run", *SMALL, *made_model(), *flags)
    assert done.code == 0, done.err
    assert sorted(one.name for one in (tmp_path / "out").iterdir()) == ["2", "4"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "4")
    assert model.num_parameters() > 1000
    kept = (tmp_path / "run" / "checkpoints" / "step-00000004" / "hf" / "model.safetensors").read_bytes()
    assert (tmp_path / "out" / "4" / "model.safetensors").read_bytes() == kept
