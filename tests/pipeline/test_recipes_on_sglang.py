"""A recipe with an environment on a real SGLang server: turns of the model, and between them what the world says."""

from __future__ import annotations

import json
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

import pytest
import torch
from launching import succeed

from models.engines.protocol import EXPECTED_SGLANG
from pipeline.observe.metrics import read_metrics
from stages.chat.tokenizer import load_tokenizer
from tests.models.engines.forward_reference import by_one
from tests.sglang_server import RealServer

TAP = """
import json
from stages.base import MapStage


class Tap(MapStage):
    async def process(self, message):
        with open(self.context.run_dir / "tap.jsonl", "a") as file:
            for s in message.samples:
                row = {"ids": s.token_ids.tolist(), "prompt": s.prompt_length, "mask": s.loss_mask.tolist(),
                       "log_probs": s.log_probs.tolist(), "versions": s.versions.tolist(), "turns": s.turns}
                file.write(json.dumps(row) + "\\n")
        return message
"""
TAP_RECIPE = '[[stage]]\nname = "tap"\npath = "world_tap:Tap"\nafter = "reward"\nreplicas = 1\nconcurrency = 4\n'
SMALL = [
    "--warm-start-steps", "0", "--num-rollout", "3", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4",
    "--eval-interval", "none", "eval.eval_prompt_data=[]", "filter.dynamic_sampling_filter=[]",
    "--rollout-max-response-len", "200", "--rollout-max-context-len", "512",
    "--no-live", "--no-use-tensorboard", "--no-use-plot", "--log-interval", "1",
    "--rollout-stop-token-ids", "31",  # what an untrained model writes now and then
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.xdist_group("sglang")
def test_turns_in_an_environment_have_exact_tokens(tmp_path: Path, sglang: RealServer) -> None:
    (tmp_path / "world_tap.py").write_text(TAP)
    (tmp_path / "tap.toml").write_text(TAP_RECIPE)
    done = succeed(
        tmp_path / "run", "--config", "multi_agent", str(tmp_path / "tap.toml"), *SMALL, "--engine", "sglang",
        "--train-backend", "simulated", "--simulated-step-s", "0.05",
        "--hf-checkpoint", str(sglang.model), "--rollout-external-engine-addrs", sglang.url, cwd=tmp_path,
    )  # fmt: skip
    assert done.summary["engine"]["version"] == EXPECTED_SGLANG
    assert done.summary["groups"]["trained"] == 12
    assert any("env/multi_agent/answers" in row for row in read_metrics(done.run_dir / "metrics.jsonl"))
    rows = [json.loads(line) for line in (tmp_path / "run" / "tap.jsonl").read_text().splitlines()]
    tokenizer, checked = load_tokenizer(str(sglang.model)), 0
    for row in rows:
        ids, mask, begin = row["ids"], row["mask"], row["prompt"]
        between = [tokenizer.decode(ids[start:end]) for start, end in _observations(mask, begin)]
        assert between in ([], ["user\n:assistant\n"]), "the verifier is asked behind the answer, and nothing else is"
        log_probs, own = torch.tensor(row["log_probs"]), torch.tensor(mask) == 1
        assert not log_probs[~own].any()
        if max(row["versions"]) == 0:  # of the weights that the test has
            expected = by_one(sglang.model, ids[:begin], ids[begin:])
            assert (expected - log_probs[begin:])[own[begin:]].abs().max() < 1e-5
            checked += bool(between)
    assert checked, "no episode of the first version had a second turn"


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.xdist_group("sglang")
@pytest.mark.parametrize("recipe", ["guess_number", "maze", "python_tool", "reasoning_gym", "search"])
def test_other_recipes_run_too(recipe: str, tmp_path: Path, sglang: RealServer) -> None:
    needs = {"reasoning_gym": "reasoning_gym", "search": "bm25s"}.get(recipe)
    if needs is not None and find_spec(needs) is None:
        pytest.skip(f"the recipe needs the package {needs}, which is not installed")
    done = succeed(
        tmp_path / "run", "--config", recipe, *SMALL, "--rm-type", "random:0.5", "--engine", "sglang",
        "--hf-checkpoint", str(sglang.model), "--rollout-external-engine-addrs", sglang.url, cwd=tmp_path,
    )  # fmt: skip
    assert done.summary["engine"]["version"] == EXPECTED_SGLANG
    assert done.summary["groups"]["trained"] == 12
    assert done.summary["groups"]["failed"] == 0
    assert any(f"env/{recipe}/turns" in row for row in read_metrics(done.run_dir / "metrics.jsonl"))


def _observations(mask: list[int], begin: int) -> list[tuple[int, int]]:
    """[start, end) of what was put between two turns of the model."""
    spans, at = [], begin
    for own, run in groupby(mask[begin:]):
        end = at + len(list(run))
        if not own and end < len(mask):
            spans.append((at, end))
        at = end
    return spans
