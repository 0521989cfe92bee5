"""A whole run whose rollouts are made by a function in slime's style, in processes of their own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launching import NO_DATA, ROOT, succeed_here

from stages.train.saved_groups import load_batch

pytestmark = pytest.mark.slow

PAGE = ROOT / "docs" / "custom_generate.md"


def test_the_example_of_the_documentation_trains_exactly_what_the_engine_made(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    [code] = re.findall(r"```python\n(# my_project/calculator\.py\n.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "my_project").mkdir()
    (tmp_path / "my_project" / "calculator.py").write_text(code)
    done = succeed_here(
        tmp_path / "run", *NO_DATA, "--prompt-data", "arithmetic", "--rollout-max-response-len", "24",
        "--custom-generate-function-path", "my_project.calculator.generate",
        "--save-debug-rollout-data", str(tmp_path / "{rollout_id}"), cwd=tmp_path,
    )  # fmt: skip
    assert done.summary["groups"]["failed"] == 0
    model = AutoModelForCausalLM.from_pretrained(done.run_dir / "assets" / "tiny-arithmetic").eval()
    checked = observed = 0
    for sample in (sample for group in load_batch(str(tmp_path / "{rollout_id}"), 0) for sample in group.samples):
        assert sample.model_versions
        assert set(sample.model_versions) == {0}, "the first batch is of the weights of the start"
        ids = torch.tensor(sample.token_ids[None].astype("int64"))
        with torch.no_grad():
            own = model(ids).logits.float().log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0].numpy()
        made = sample.versions[1:] >= 0
        assert abs(own[made] - sample.log_probs[1:][made]).max() < 1e-4
        assert (sample.loss_mask[1:] == made).all()
        checked += 1
        observed += sample.turns > 1
    assert checked == 16
    assert observed, "some rollouts went on behind an answer of the calculator"
