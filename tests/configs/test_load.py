"""Layers and their precedence; recipes; the way to TOML and JSON and back."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec
import pytest
from config_values import NAMED, NESTED, values
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.layers import ConfigError, build
from configs.load import config_hash, dump_toml, load
from configs.resolve import resolve
from configs.schema import Config, StageConfig


def recipe(tmp_path: Path, text: str, name: str = "mine.toml") -> str:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def faults_of(*argv: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load(argv)
    return caught.value.faults


def test_precedence_command_line_recipe_preset_default(tmp_path: Path) -> None:
    file = recipe(tmp_path, '[run]\nmode = "one_step"\n[train]\nlr = 2e-4\nmin_lr = 1e-5\n')
    loaded = load(["--config", file, "--lr", "3e-4"])
    config = resolve(loaded.config, loaded.given)
    assert config.train.lr == 3e-4  # command line
    assert config.train.min_lr == 1e-5  # recipe
    assert config.asynchrony.async_buffer_size == 1  # preset
    assert config.train.clip_grad == 1.0  # default
    assert loaded.given["train.lr"] == "--lr"
    assert loaded.given["train.min_lr"] == "train.min_lr in mine.toml"
    assert "train.clip_grad" not in loaded.given


def test_objects_merge_and_lists_are_replaced(tmp_path: Path) -> None:
    file = recipe(tmp_path, '[run.scale]\nreward = 2\ntools = 3\n[data]\nprompt_data = ["a", "b"]\n')
    config = load(["--config", file, "--scale", "reward=4", "--prompt-data", "c"]).config
    assert config.run.scale == {"reward": 4, "tools": 3}
    assert config.data.prompt_data == ("c",)


def test_the_higher_layer_chooses_between_rollouts_and_epochs(tmp_path: Path) -> None:
    file = recipe(tmp_path, "[rollout]\nnum_rollout = 400\n")
    config = load(["--config", file, "--num-epoch", "2"]).config
    assert (config.rollout.num_rollout, config.rollout.num_epoch) == (None, 2)


def test_a_mode_on_the_command_line_puts_the_recipes_gate_aside(tmp_path: Path) -> None:
    file = recipe(tmp_path, "[asynchrony]\nasync_buffer_size = 4\nupdate_weights_interval = 2\n")
    same = load(["--config", file, "--mode", "async"]).config
    assert (same.asynchrony.async_buffer_size, same.asynchrony.update_weights_interval) == (4, 2)
    loaded = load(["--config", file, "--mode", "sync"])
    gate = resolve(loaded.config, loaded.given).asynchrony
    assert (gate.async_buffer_size, gate.update_weights_interval, gate.max_staleness) == (0, 1, 0)


def test_a_recipe_by_name_path_and_typo(tmp_path: Path) -> None:
    assert load(["--config", "grpo_sync"]).config.run.mode == "sync"
    assert load(["--config", "grpo_sync.toml"]).config.run.mode == "sync"
    assert load(["--config", recipe(tmp_path, "[train]\nlr = 1\n")]).config.train.lr == 1.0
    assert faults_of("--config", "grpo_snyc") == (
        "--config is 'grpo_snyc', but there is no such file or recipe; did you mean --config grpo_sync?",
    )
    assert "quickstart" in faults_of("--config", "elsewhere/none.toml")[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
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
    ],
)
def test_faults_of_a_recipe(tmp_path: Path, text: str, words: str) -> None:
    faults = faults_of("--config", recipe(tmp_path, text))
    assert any(words in fault for fault in faults), faults


def test_all_faults_of_a_recipe_at_once(tmp_path: Path) -> None:
    assert len(faults_of("--config", recipe(tmp_path, "[train]\nlr = -1\nx = 1\n[nowhere]\n"))) == 3


@st.composite
def configs(draw: st.DrawFn) -> Config:
    chosen = draw(st.lists(st.sampled_from([*NAMED, *NESTED]), max_size=12, unique_by=lambda flag: flag.key))
    config = build({flag.key: draw(values(flag)) for flag in chosen})
    stage = StageConfig(name="judge", path="a.b:C", after="reward", options={"depth": [1, 2], "odd key": {"x": "y"}})
    return msgspec.structs.replace(config, stage=(stage,)) if draw(st.booleans()) else config


@settings(max_examples=60, deadline=None)
@given(config=configs())
def test_toml_and_json_round_trip(tmp_path_factory: pytest.TempPathFactory, config: Config) -> None:
    assert msgspec.json.decode(msgspec.json.encode(config), type=Config) == config
    file = tmp_path_factory.mktemp("recipe") / "dumped.toml"
    file.write_bytes(dump_toml(config).encode())
    assert load(["--config", str(file)]).config == config


@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(codec="utf-8"), max_size=30))
def test_any_text_survives_toml(text: str) -> None:
    config = build({"tools.tool_call_open": text, "data.apply_chat_template_kwargs": {text: text}})
    tables = tomllib.loads(dump_toml(config))
    assert tables["tools"]["tool_call_open"] == text
    assert tables["data"]["apply_chat_template_kwargs"] == {text: text}


def test_a_resolved_configuration_is_a_recipe_that_resolves_to_itself(tmp_path: Path) -> None:
    for mode in ("sync", "one_step", "async"):
        loaded = load(["--mode", mode, "--num-rollout", "3", "--prompt-data", "arithmetic"])
        config = resolve(loaded.config, loaded.given)
        again = load(["--config", recipe(tmp_path, dump_toml(config))])
        assert resolve(again.config, again.given) == config


def test_the_hash_knows_the_experiment_and_not_its_place() -> None:
    base = load(["--num-rollout", "3"]).config
    assert config_hash(base) == config_hash(load(["--num-rollout", "3", "--run-dir", "x", "--no-trace"]).config)
    assert config_hash(base) != config_hash(load(["--num-rollout", "4"]).config)
    assert config_hash(base) != config_hash(load(["--num-rollout", "3", "engine.simulated.a_ms=9"]).config)
    assert len(config_hash(base)) == 16


def test_resume_reads_the_configuration_of_the_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    assert "config.toml" in faults_of("--resume", str(run))[0]
    first = load(["--num-rollout", "3", "--prompt-data", "arithmetic", "--lr", "0.5", "--run-dir", str(run)])
    (run / "config.toml").write_text(dump_toml(resolve(first.config, first.given)), encoding="utf-8")
    again = load(["--resume", str(run), "--num-rollout", "9"])
    config = resolve(again.config, again.given)
    assert (config.train.lr, config.rollout.num_rollout) == (0.5, 9)
    assert config.run.run_dir == config.run.resume == str(run)


def test_a_finished_run_is_a_recipe_for_another_place(tmp_path: Path) -> None:
    first = resolve(load(["--num-rollout", "3", "--run-dir", str(tmp_path / "old")]).config)
    file = recipe(tmp_path, dump_toml(first), "config.toml")
    again = load(["--config", file]).config
    assert again.run.run_dir is None
    moved = resolve(load(["--resume", str(tmp_path)]).config)  # the directory has another name by now
    assert moved.run.run_dir == str(tmp_path)
