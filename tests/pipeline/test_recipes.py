"""Every recipe runs for real, as its user would start it: the tiny model, few batches, everything in one process."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from launching import succeed_here

from configs.command_line import parse
from configs.load import load_arguments, recipe_names, with_work
from models.tiny import make_tiny_checkpoint

ARITHMETIC = sorted(
    name
    for name in recipe_names()
    if load_arguments(with_work(parse(["--config", name]))[0]).config.train.hf_checkpoint[:4] == "tiny"
)
BATCHES = 3
SMALL = [
    "--no-live", "--no-use-tensorboard", "--no-use-plot", "--num-rollout", str(BATCHES),
    "--warm-start-steps", "3",
    "--warm-start-batch-size", "16", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4",
    "--rm-type", "random:0.5", "--reward-workers", "0", "--eval-interval", "none", "eval.eval_prompt_data=[]",
]  # fmt: skip
# An environment that rewards by itself rewards nothing of what an untrained model does, so every group has to count.
PACKS = ("maze", "multi_agent", "python_tool", "reasoning_gym", "search")
NEEDS = {"agent_openai": "openai", "reasoning_gym": "reasoning_gym", "search": "bm25s"}


def test_all_recipes_but_those_that_need_a_download_are_run_here() -> None:
    assert set(ARITHMETIC) == set(recipe_names()) - {"gsm8k"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=pytest.mark.full if name in (*PACKS, *NEEDS) else []) for name in ARITHMETIC]
)
def test_recipe(recipe: str, tmp_path: Path) -> None:
    if recipe in NEEDS and find_spec(NEEDS[recipe]) is None:
        pytest.skip(f"the recipe needs the package {NEEDS[recipe]}, which is not installed")
    flags = ["--config", recipe, *SMALL, *(["filter.dynamic_sampling_filter=[]"] if recipe in PACKS else [])]
    if recipe == "opd":
        teacher = make_tiny_checkpoint(tmp_path / "teacher", tokenizer="arithmetic", seed=7)
        flags += ["--frozen-engine", f"teacher={teacher}"]
    if recipe == "ppo":
        flags += ["--num-critic-only-steps", "1"]
    done = succeed_here(tmp_path / "run", *flags)
    run_dir = done.run_dir
    assert done.summary["steps"] == BATCHES
    assert len(done.audit.batches) == BATCHES
    if recipe == "opd":
        assert (run_dir / "metrics.jsonl").read_text().count("opd_reverse_kl") == BATCHES
    if recipe == "ppo":
        assert (run_dir / "metrics.jsonl").read_text().count("value_loss") >= BATCHES
