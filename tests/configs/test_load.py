"""Layers and their precedence: recipes, stacked recipes, presets of models; the way to TOML and JSON and back."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import launch
from configs.command_line import parse
from configs.layers import ConfigError, build, supervised, value_at
from configs.load import (
    dump_toml,
    load,
    load_arguments,
    preset_names,
    read_preset,
    read_recipe,
    recipe_names,
    with_work,
)
from configs.plan.run_estimate import estimate_run
from configs.rules.validate import checked
from configs.schema import Config, StageConfig
from tests.configs.config_rig import NAMED, NESTED, WORK, faults_of, one_says, read, recipe, resolved, settled, values


def test_a_recipe_by_name_path_and_typo(tmp_path: Path) -> None:
    assert load(["--config", "grpo_sync"]).config.run.mode == "sync"
    assert load(["--config", "grpo_sync.toml"]).config.run.mode == "sync"
    assert load(["--config", recipe(tmp_path, "[train]\nlr = 1\n")]).config.train.lr == 1.0
    assert faults_of("--config", "grpo_snyc") == (
        "--config is 'grpo_snyc', but there is no such file or recipe; did you mean --config grpo_sync?",
    )
    assert "quickstart" in faults_of("--config", "elsewhere/none.toml")[0]


@pytest.mark.parametrize(("text", "words"), [
    ("[train]\nlrr = 1\n", "train.lrr in mine.toml is no key of the configuration; did you mean train.lr?"),
    ("[run]\nlr = 1\n", "run.lr in mine.toml is no key, but train.lr is; put lr under [train]"),
    ("lr = 1\n", "lr in mine.toml is no key, but train.lr is; put lr under [train]"),
    ("[trian]\nlr = 1\n", "[trian] in mine.toml is no section; did you mean [train]?"),
    ("train = 1\n", "train in mine.toml is 1, but must be a table; write [train]"),
    ("[engine]\nsimulated = 3\n", "engine.simulated in mine.toml is 3, but must be a table"),
    ("[engine.simulated]\nlength_men = 1\n", "did you mean engine.simulated.length_mean?"),
    ("[train]\nlr = -1\n", "train.lr in mine.toml is -1, but must be a number >= 0; give for example 1e-06"),
    ('[train]\nlr = "1"\n', "train.lr in mine.toml is '1', but must be a number >= 0"),
    ("[run]\ntrace = true\n", "put trace under [observe]"),
    ("[observe]\ntrace = 1\n", "observe.trace in mine.toml is 1, but must be true or false"),
    ("[rollout]\nrollout_batch_size = true\n", "is true, but must be a whole number >= 1"),
    ("[rollout]\nrollout_batch_size = 2.5\n", "is 2.5, but must be a whole number >= 1"),
    ('[data]\nprompt_data = "a"\n', "but must be a list of texts"),
    ("[run]\nscale = { reward = 1.5 }\n", "but must be name=whole number pairs"),
    ("[[stage]]\nname = 'a'\n", "must be tables with name, path and one of after or loop"),
    ("[[stage]]\nnmae = 'a'\n", "did you mean name?"),
    ("[train\n", "mine.toml is not valid TOML"),
])  # fmt: skip
def test_faults_of_a_recipe(tmp_path: Path, text: str, words: str) -> None:
    one_says(words, faults_of("--config", recipe(tmp_path, text)))


@st.composite
def configs(draw: st.DrawFn) -> Config:
    chosen = draw(st.lists(st.sampled_from([*NAMED, *NESTED]), max_size=12, unique_by=lambda flag: flag.key))
    config = build({flag.key: draw(values(flag)) for flag in chosen})
    stage = StageConfig(name="judge", path="a.b:C", after="reward", options={"depth": [1, 2], "odd key": {"x": "y"}})
    return msgspec.structs.replace(config, stage=(stage,)) if draw(st.booleans()) else config


@settings(max_examples=25)
@given(config=configs())
def test_toml_and_json_round_trip(tmp_path_factory: pytest.TempPathFactory, config: Config) -> None:
    assert msgspec.json.decode(msgspec.json.encode(config), type=Config) == config
    assert load(["--config", recipe(tmp_path_factory.mktemp("recipe"), dump_toml(config))]).config == config


@settings(max_examples=25)
@example(text='\x7f\\"\n\x00')
@given(text=st.text(st.characters(codec="utf-8"), max_size=30))
def test_any_text_survives_toml(text: str) -> None:
    config = build({"tools.tool_call_open": text, "data.apply_chat_template_kwargs": {text: text}})
    tables = tomllib.loads(dump_toml(config))
    assert tables["tools"]["tool_call_open"] == text
    assert tables["data"]["apply_chat_template_kwargs"] == {text: text}


def test_resume_reads_the_configuration_of_the_run(tmp_path: Path) -> None:
    assert "config.toml" in faults_of("--resume", str(tmp_path))[0]
    recipe(tmp_path, dump_toml(resolved(f"{WORK} --lr 0.5 --run-dir {tmp_path}")), "config.toml")
    config = resolved(f"--resume {tmp_path} --num-rollout 9")
    assert (config.train.lr, config.rollout.num_rollout) == (0.5, 9)
    assert config.run.run_dir == config.run.resume == str(tmp_path)


def checkpoint(folder: Path, name: str, **changes: Any) -> str:
    """A directory with the config.json of a preset, changed."""
    model = {**read_preset(name).values["model.architecture"], **changes}
    present = {key: value for key, value in model.items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(present), encoding="utf-8")
    return str(folder)


def test_precedence(tmp_path: Path) -> None:
    mine = recipe(tmp_path, '[model]\nmodel = "qwen3-8b"\n[megatron]\ntensor_model_parallel_size = 2\n')
    loaded = read(WORK, f"--config {mine} --actor-num-gpus-per-node 8")
    config = loaded.config
    assert config.parallel.actor_num_gpus_per_node == 8  # command line
    assert config.megatron.tensor_model_parallel_size == 2  # recipe
    assert config.train.hf_checkpoint == "Qwen/Qwen3-8B"  # preset
    assert config.train.lr == 1e-6  # default
    assert config.model.architecture["hidden_size"] == 4096
    assert loaded.given["train.hf_checkpoint"] == "train.hf_checkpoint in --model qwen3-8b"
    assert loaded.given["megatron.tensor_model_parallel_size"] == "megatron.tensor_model_parallel_size in mine.toml"
    assert read(WORK, f"--config {mine} --model qwen3-0.6b").config.model.architecture["hidden_size"] == 1024
    none = read(WORK, f"--config {mine} --model none").config
    assert (none.model.architecture, none.train.hf_checkpoint) == ({}, "tiny")


@pytest.mark.parametrize(("name", "words"), [
    ("qwen3-8B", "did you mean --model qwen3-8b?"),
    ("GLM4-9B", "did you mean --model glm4-9b?"),
    ("moonlight", "did you mean --model moonlight-16b-a3b?"),
    ("xyz", "choose one of deepseek-r1, deepseek-v3"),
])  # fmt: skip
def test_a_wrong_name(name: str, words: str) -> None:
    (fault,) = faults_of(WORK, "--model", name)
    assert fault.startswith(f"--model is {name!r}, but there is no such preset")
    assert words in fault


@pytest.mark.parametrize("name", preset_names())
def test_each_preset_is_right_and_fits(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for module in ("configs.load", "configs.rules.parallel"):
        monkeypatch.setattr(f"{module}.has_transformer_engine", lambda: True)
    config, warnings = settled(WORK, "--model", name)
    several = config.parallel.actor_num_nodes > 1
    assert [warning for warning in warnings if "--actor-num-nodes" not in warning] == []
    assert bool(warnings) is several, "no runner starts processes on several machines yet"
    found: Any = estimate_run(config, config.model.architecture)
    assert found.trainer.fits
    assert found.engine.kv_tokens > 200_000
    # One node's host holds what its eight processes offload.
    assert found.trainer.host * 8 < 1000 * 2**30


def test_what_falls_away(tmp_path: Path) -> None:
    def config(argv: str, model: str = "qwen3-8b") -> Config:
        return settled(WORK, "--model", model, argv)[0]

    torch, default = config("--train-backend torch"), Config()
    assert (torch.parallel, torch.megatron) == (default.parallel, default.megatron)
    assert config("--engine embedded").sglang == default.sglang
    assert not config("--tensor-model-parallel-size 1").megatron.sequence_parallel
    assert config("--pipeline-model-parallel-size 1", "deepseek-v3").megatron.decoder_last_pipeline_num_layers is None
    megatron = config("--recompute-activations").megatron
    assert (megatron.recompute_granularity, megatron.recompute_method) == ("selective", None)
    for argv in ("--scale engine=3", "--rollout-external-engine-addrs http://127.0.0.1:30000"):
        assert config(argv).sglang.rollout_num_gpus is None
    less = config("--rollout-num-gpus none --scale engine=1", "qwen3-30b-a3b")
    assert load(["--config", recipe(tmp_path, dump_toml(less))]).config == less, "it is read back as it was"


def test_a_hook_of_the_steps_of_rollouts_is_not_called_in_the_warm_start() -> None:
    """What the trainer does with the other functions for rollouts is in tests/pipeline/test_runs.py."""
    argv = "--train-backend megatron --warm-start-steps 3 --custom-megatron-before-train-step-hook-path json:loads"
    config = settled(WORK, "--model", "qwen3-8b", argv)[0]
    assert config.megatron.custom_megatron_before_train_step_hook_path == "json:loads"
    assert supervised(config).megatron.custom_megatron_before_train_step_hook_path is None


def test_a_checkpoint_that_is_another_model_is_refused(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path, "qwen3-8b", hidden_size=2560, intermediate_size=9728)
    (fault,) = faults_of(WORK, "--model", "qwen3-8b", "--hf-checkpoint", directory)
    assert "whose config.json differs from --model qwen3-8b in" in fault
    assert "hidden_size (2560, not 4096), intermediate_size (9728, not 12288)" in fault
    assert "correct the directory, or leave --model qwen3-8b out" in fault


@pytest.mark.parametrize(("name", "changes", "words"), [
    ("qwen3-8b", {"max_position_embeddings": 262144, "rope_theta": 5e6}, None),
    ("qwen3-8b", {"head_dim": "absent"}, None),  # 4096 / 32 is 128 anyway
    ("qwen3-4b", {"head_dim": "absent"}, "head (80, not 128)"),
    ("qwen3-30b-a3b", {"num_experts": "absent", "num_local_experts": 128}, None),
    ("qwen3-30b-a3b", {"num_experts": "absent", "num_local_experts": 64}, "num_experts (64, not 128)"),
    ("moonlight-16b-a3b", {"q_lora_rank": None, "head_dim": 64}, None),
    ("moonlight-16b-a3b", {"q_lora_rank": 1536}, "latent"),
    ("kimi-k2", {"model_type": "deepseek_v3"}, None),
    ("glm4-9b", {"model_type": "glm"}, "model_type (glm, not glm4)"),
])  # fmt: skip
def test_which_keys_may_differ(tmp_path: Path, name: str, changes: dict[str, Any], words: str | None) -> None:
    argv = ("--model", name, "--hf-checkpoint", checkpoint(tmp_path, name, **changes))
    if words is None:
        settled(WORK, *argv)
    else:
        one_says(words, faults_of(WORK, *argv))


def test_a_small_built_in_model_is_no_published_one() -> None:
    (fault,) = faults_of(WORK, "--model qwen3-0.6b --hf-checkpoint tiny")
    assert "--hf-checkpoint is 'tiny', a small built-in one; leave one of them out" in fault


ENVIRONMENTS = ("guess_number", "maze", "multi_agent", "python_tool", "reasoning_gym", "search")
PROBLEMS = ("agent_openai", "gsm8k", "quickstart", "sft", "tools", "toy", *ENVIRONMENTS)
ALGORITHMS = tuple(name for name in recipe_names() if name not in PROBLEMS)
REAL = "--hf-checkpoint Qwen/Qwen3-0.6B --prompt-data train.jsonl --label-key answer --num-rollout 9"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the files that are named."""
    (tmp_path / "data" / "gsm8k").mkdir(parents=True)
    for file in ("data/gsm8k/train.jsonl", "data/gsm8k/test.jsonl"):
        (tmp_path / file).write_text('{"question": "1+1?", "answer": "#### 2"}\n', encoding="utf-8")
    (tmp_path / "train.jsonl").write_text('{"input": "1+1?", "answer": "2"}\n', encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def stacked(*argv: str) -> tuple[Config, tuple[str, ...]]:
    loaded = load_arguments(with_work(parse(argv))[0])
    return checked(loaded.config, loaded.given)


def teacher(name: str) -> tuple[str, ...]:
    return ("--frozen-engine", "teacher=tiny-arithmetic") if name == "opd" else ()


@pytest.mark.parametrize("name", recipe_names())
def test_each_recipe_is_right(name: str, place: Path) -> None:
    config, warnings = stacked("--config", name, *teacher(name))
    assert warnings == ()
    assert config.rollout.num_rollout is not None or config.rollout.num_epoch is not None
    whole = recipe(place, dump_toml(config))
    assert settled("--config", whole) == (config, ()), "also where all derived values are spelled out"
    steps = config.train.num_steps_per_rollout or 1
    rollouts = config.rollout.rollout_batch_size * config.rollout.n_samples_per_prompt
    assert rollouts == config.train.global_batch_size * steps


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("order", [1, -1], ids=["over", "under"])
def test_an_algorithm_on_a_real_model(name: str, order: int) -> None:
    """Over and under a recipe of a model, and beside flags: sane values, no fault, no warning."""
    config, warnings = stacked("--config", *("gsm8k", name)[::order], *teacher(name))
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
def test_conversations_need_no_label_in_supervised_training_alone() -> None:
    own = f"--config sft {REAL} --label-key none --input-key messages --lr 1e-5 --min-lr 1e-6"
    assert settled(own)[0].train.lr_decay_style == "cosine"
    one_says("--rm-type is exact, but it compares with a reference answer", faults_of(own, "--loss-type policy_loss"))


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_beside_flags_and_alone(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Alone it runs on the toy problem."""
    assert launch.main(["--config", name, *REAL.split(), *teacher(name), "--dry-run"]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    lines = output.out.splitlines()
    critic = " critic 1e-05;" if name == "ppo" else ""
    assert any(line.startswith(f"  lr 1e-06, constant;{critic} ") for line in lines)
    context = "  context: what the model has positions for, responses up to"
    assert {"  no warm start", "  grader: chosen by the first labels", f"{context} 512 tokens"} <= set(lines)
    assert launch.main(["--config", name, *teacher(name), "--dry-run"]) == 0
    output = capsys.readouterr()
    assert f"no --prompt-data, --model or --hf-checkpoint: {name} on the toy problem" in output.err
    for line in ("  warm start: 700 supervised steps at lr 0.0005", "  grader: exact", f"{context} 8 tokens"):
        assert line in output.out


def test_what_needs_more_says_what() -> None:
    with pytest.raises(ConfigError, match=r"--use-opd has no teacher; add --frozen-engine teacher=PATH"):
        stacked("--config", "opd")
    with pytest.raises(ConfigError, match=r"no file or directory 'data/gsm8k/train.jsonl'; correct the path"):
        stacked("--config", "gsm8k")


@pytest.mark.usefixtures("place")
def test_the_model_of_the_command_line_outranks_the_checkpoint_of_a_recipe() -> None:
    config, _ = stacked("--config", "gsm8k", "dapo", "--model", "qwen3-4b")
    assert config.train.hf_checkpoint == config.train.ref_load == "Qwen/Qwen3-4B"
    own, _ = stacked("--config", "gsm8k", "--model", "qwen3-4b", "--hf-checkpoint", "me/my-qwen3-4b")
    assert own.train.hf_checkpoint == "me/my-qwen3-4b", "beside --model it says where that model lies"


def test_a_preset_of_a_model_with_experts_runs_without_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--model", "qwen3-30b-a3b", "--prompt-data", "arithmetic", "--num-rollout", "1"]
    for present in (False, True):
        for module in ("configs.load", "configs.rules.parallel"):
            monkeypatch.setattr(f"{module}.has_transformer_engine", lambda present=present: present)
        loaded = load(flags)
        config, warnings = checked(loaded.config, loaded.given)
        assert config.megatron.moe_grouped_gemm is present
        assert any("experts are computed one after the other" in line for line in warnings) is not present
    monkeypatch.setattr("configs.load.has_transformer_engine", lambda: False)
    assert load([*flags, "--moe-grouped-gemm"]).config.megatron.moe_grouped_gemm, "what the user writes stays"
