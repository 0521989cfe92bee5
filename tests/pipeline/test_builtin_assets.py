"""The tiny models that a run makes for itself."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from configs.schema import Config
from configs.schema.train import TrainConfig
from pipeline.errors import UsageError
from pipeline.preflight.data import prepare


def test_the_model_of_a_run_that_another_version_began_is_refused_with_the_cure(tmp_path: Path) -> None:
    config = msgspec.structs.replace(Config(), train=TrainConfig(hf_checkpoint="tiny-arithmetic"))
    model = Path(prepare(config, tmp_path).train.hf_checkpoint)
    assert json.loads((model / "config.json").read_text())["initializer_range"] == 0.06
    assert prepare(config, tmp_path).train.hf_checkpoint == str(model), "the same again is reused"
    (model / "tiny.json").write_text('{"architecture": "qwen3", "format_version": 1}')
    with pytest.raises(UsageError, match=r"--hf-checkpoint tiny-arithmetic: .* another version .* or start a new run"):
        prepare(config, tmp_path)
