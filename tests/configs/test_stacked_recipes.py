"""Recipes laid over each other: an algorithm changes nothing of a model, its data and its lengths."""

from __future__ import annotations

from pathlib import Path

import pytest

import launch
from configs.command_line import parse
from configs.layers import ConfigError, value_at
from configs.load import load, load_arguments, read_recipe, recipe_names, with_work
from configs.rules.validate import checked
from configs.schema import Config

ENVIRONMENTS = ("guess_number", "maze", "multi_agent", "python_tool", "reasoning_gym", "search")
PROBLEMS = ("agent_openai", "gsm8k", "quickstart", "tools", "toy", *ENVIRONMENTS)
ALGORITHMS = tuple(name for name in recipe_names() if name not in PROBLEMS)
# What a recipe of an algorithm never says: it belongs to a model, its data, or the length of a run.
FOREIGN = ("data.", "warm_start.", "eval.", "checkpoint.", "observe.", "model.", "parallel.", "train.hf_checkpoint",
           "train.lr", "train.min_lr", "critic.critic_lr", "reward.rm_type", "rollout.num_rollout", "rollout.num_epoch",
           "rollout.rollout_batch_size", "rollout.n_samples_per_prompt", "rollout.rollout_max_response_len",
           "rollout.rollout_max_context_len", "run.run_dir")  # fmt: skip
OWN = {"critic.critic_lr_warmup_iters"}
REAL = ("--hf-checkpoint", "Qwen/Qwen3-0.6B", "--prompt-data", "train.jsonl", "--label-key", "answer",
        "--num-rollout", "9")  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the files that are named."""
    (tmp_path / "data" / "gsm8k").mkdir(parents=True)
    for file in ("data/gsm8k/train.jsonl", "data/gsm8k/test.jsonl"):
        (tmp_path / file).write_text('{"question": "1+1?", "answer": "#### 2"}\n', encoding="utf-8")
    (tmp_path / "train.jsonl").write_text('{"input": "1+1?", "answer": "2"}\n', encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def settled(*argv: str) -> tuple[Config, tuple[str, ...]]:
    loaded = load_arguments(with_work(parse(argv))[0])
    return checked(loaded.config, loaded.given)


def teacher(name: str) -> tuple[str, ...]:
    return ("--frozen-engine", "teacher=tiny-arithmetic") if name == "opd" else ()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_recipe_of_an_algorithm_holds_the_algorithm_only(name: str) -> None:
    keys = set(read_recipe(name).values) - OWN
    assert not [key for key in keys if key.startswith(FOREIGN)]


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("order", [1, -1], ids=["over", "under"])
def test_an_algorithm_on_a_real_model(name: str, order: int) -> None:
    """Over and under a recipe of a model, and beside flags: sane values, no fault, no warning."""
    config, warnings = settled("--config", *("gsm8k", name)[::order], *teacher(name))
    assert warnings == ()
    assert (config.train.lr, config.train.lr_warmup_iters) == (1e-6, 0)
    assert config.warm_start.warm_start_steps == 0
    assert config.reward.rm_type == "gsm8k_flex"
    assert config.train.hf_checkpoint == "Qwen/Qwen3-0.6B"
    assert (config.rollout.rollout_max_response_len, config.rollout.rollout_max_context_len) == (1024, 2048)
    assert config.eval.eval_prompt_data == ("gsm8k=data/gsm8k/test.jsonl@[0:256]",)
    assert config.critic.critic_lr == (pytest.approx(1e-5) if name == "ppo" else None)
    assert config.reward.overlong_buffer_len == (205 if name == "dapo" else 0)
    alone = read_recipe(name).values
    for key, value in alone.items():
        if key != "reward.overlong_buffer_len":
            assert value_at(config, key) == value, key


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_beside_flags(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["--config", name, *REAL, *teacher(name), "--dry-run"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    lines = said.out.splitlines()
    critic = " critic 1e-05;" if name == "ppo" else ""
    assert any(line.startswith(f"  lr 1e-06, constant;{critic} ") for line in lines)
    for line in ("  no warm start", "  grader: chosen by the first labels"):
        assert line in lines
    assert "  context: what the model has positions for, responses up to 512 tokens" in lines


@pytest.mark.parametrize("name", ALGORITHMS)
def test_alone_it_runs_on_the_toy_problem(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["--config", name, *teacher(name), "--dry-run"]) == 0
    said = capsys.readouterr()
    assert f"no --prompt-data, --model or --hf-checkpoint: {name} on the toy problem" in said.err
    assert "  warm start: 700 supervised steps at lr 0.0005" in said.out
    assert "  grader: exact" in said.out
    assert "  context: what the model has positions for, responses up to 8 tokens" in said.out


def test_what_needs_more_says_what() -> None:
    with pytest.raises(ConfigError, match=r"--use-opd has no teacher; add --frozen-engine teacher=PATH"):
        settled("--config", "opd")
    with pytest.raises(ConfigError, match=r"no file or directory 'data/gsm8k/train.jsonl'; correct the path"):
        settled("--config", "gsm8k")


def test_later_recipes_and_flags_outrank_earlier_ones(tmp_path: Path) -> None:
    for name, rate in (("a", "1e-3"), ("b", "2e-3")):
        (tmp_path / f"{name}.toml").write_text(f"[train]\nlr = {rate}\nmin_lr = {rate}\n", encoding="utf-8")
    a, b = str(tmp_path / "a.toml"), str(tmp_path / "b.toml")
    assert load(["--config", a, b]).config.train.lr == 2e-3
    assert load(["--config", b, "--config", a]).config.train.lr == 1e-3
    stacked = load(["--config", a, b, "--lr", "5e-3"])
    assert (stacked.config.train.lr, stacked.config.train.min_lr) == (5e-3, 2e-3)
    assert stacked.given["train.min_lr"] == "train.min_lr in b.toml"


@pytest.mark.usefixtures("place")
def test_the_model_of_the_command_line_outranks_the_checkpoint_of_a_recipe() -> None:
    config, _ = settled("--config", "gsm8k", "dapo", "--model", "qwen3-4b")
    assert config.train.hf_checkpoint == config.train.ref_load == "Qwen/Qwen3-4B"
    own, _ = settled("--config", "gsm8k", "--model", "qwen3-4b", "--hf-checkpoint", "me/my-qwen3-4b")
    assert own.train.hf_checkpoint == "me/my-qwen3-4b", "beside --model it says where that model lies"
