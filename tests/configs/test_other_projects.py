"""Configurations of verl, TRL and prime-rl: each key has an answer, batches are counted, and the command is taken.

The inputs, in other_projects/, have the keys of configurations that these projects publish (named in each), with values
of our own.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

import launch
from configs.command_line import read as read_flags
from configs.flags import flags
from configs.layers import ConfigError
from configs.migrate.convert import main as convert
from configs.migrate.convert import shell_command
from configs.migrate.other_projects import converted, flat, projects
from configs.migrate.other_rules import RULES
from configs.translate import grouped
from tests.configs.config_rig import BASE, faults_of, resolved

PAGE = Path(__file__).parents[2] / "docs" / "migration.md"

TEXTS = {path.name: path.read_text() for path in sorted((Path(__file__).parent / "other_projects").iterdir())}
VERL_MATH, VERL_PPO, VERL_DAPO = (TEXTS[f"verl-{name}.sh"] for name in ("math", "ppo", "dapo"))
TRL_DEMO, TRL_SIMPLE, TRL_SMALL = (TEXTS[f"trl-{name}.yaml"] for name in ("demo", "simple", "small"))
PRIME_EARLIER, PRIME_MATH, PRIME_SEARCH, PRIME_TEXT = (text for name, text in TEXTS.items() if "prime" in name)
PRIME_OLD = "[orchestrator]\nbatch_size = 64\n"
KINDS = {"verl": "verl", "trl": "TRL", "prime": "prime-rl"}


@pytest.fixture(params=TEXTS)
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / str(request.param)
    path.write_text(TEXTS[path.name])
    return path


Output = tuple[list[str], str]  # the words of the command, and the report


def result(path: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> Output:
    assert convert([str(path), *flags]) == 0
    out, report = capsys.readouterr()
    return shlex.split(out.replace("\\\n", " "))[2:], report


def of_text(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str) -> Output:
    (tmp_path / name).write_text(text)
    return result(tmp_path / name, capsys)


def values(words: list[str], flag: str) -> list[str] | None:
    """Of the last giving of a flag; None without it."""
    return {name: list(given) for name, given, _ in grouped(words)}.get(flag)


def test_no_key_is_unknown_and_the_command_is_taken(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, report = result(file, capsys)
    kind = KINDS[file.name.partition("-")[0]]
    assert report.splitlines()[0].startswith(f"{file}: {kind}, ")
    assert "left out, unknown" not in report
    assert "rows and rewards: " in report
    # What is wrong with it is that its data is not on this machine, its critic, or a tracker's package.
    files = r"--(eval-)?prompt-data is '[^']+', but there is no file|--report-to wandb needs a package|"
    files += r"--critic-load is '/models/critic', but there is no such directory"
    assert [fault for fault in faults_of(shlex.join(words)) if not re.match(files, fault)] == []


def test_a_command_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = TRL_SMALL.replace("someone/questions", "arithmetic").replace("use_peft: true\n", "")
    words, _ = of_text(tmp_path, capsys, "grpo.yaml", text)
    assert launch.main([*words, "--input-key", "input", "--label-key", "label", "--dry-run"]) == 0
    assert "rollout" in capsys.readouterr().out


@pytest.mark.parametrize("name", KINDS.values())
def test_every_flag_of_the_tables_is_one(name: str) -> None:
    project = projects()[name]
    known = {flag.name: flag for flag in flags() if flag.name}
    named = [flag.removesuffix("?") for text in project.flags.values() for flag in text.split()]
    assert [flag for flag in named if flag not in known and not flag.startswith("sglang-")] == []
    chosen = [text for table in project.choices.values() for text in table.values()]
    given = [*map(list, project.added), *(list(guard.flags) for guard in project.only_if)]
    for words in (*map(str.split, chosen), *given):
        assert not read_flags(words).faults, words
    sentences = [*project.not_here.values(), project.rewards]
    for flag in re.findall(r"--(?:no-)?([a-z][a-z0-9-]*)", " ".join(sentences)):
        assert flag in known or flag.startswith(("sglang-", "megatron-")), flag
    for page in re.findall(r"docs/[\w/]+\.md", " ".join(sentences)):
        assert (PAGE.parents[1] / page).is_file(), page


@pytest.mark.parametrize("name", KINDS.values())
def test_a_key_has_one_answer_and_a_default_is_of_a_key(name: str) -> None:
    project = projects()[name]
    ruled = [key for keys in RULES[name] for key in keys if keys.count(key) == 1]
    tables = [*project.flags, *project.choices, *ruled]
    assert len(tables) == len(set(tables)), sorted(key for key in set(tables) if tables.count(key) > 1)
    assert set(project.defaults) <= {*tables, *project.taken}
    assert set(project.renamed.values()) <= {*tables, *project.not_here, "orchestrator.train.env"}
    for guard in project.only_if:
        plain = {key for key in guard.keys if "*" not in key}
        assert plain <= {*tables, *project.taken, *project.not_here}, guard


@pytest.mark.parametrize(("name", "text", "wanted"), [
    # 64 prompts, 16 in each step; prompts and not rollouts are counted
    ("a.sh", VERL_MATH, {"rollout-batch-size": ["64"], "num-steps-per-rollout": ["4"], "n-samples-per-prompt": ["4"]}),
    # 2 x 4 x 8 = 64 completions of 4 for each prompt, in one step
    ("a.yaml", TRL_DEMO, {"rollout-batch-size": ["16"], "num-steps-per-rollout": ["1"]}),
    # 2 x 8 completions are generated, 2 x 4 are in a step: two steps on four groups; 100 steps are 50 batches
    ("a.yaml", TRL_SIMPLE, {"rollout-batch-size": ["4"], "num-steps-per-rollout": ["2"], "num-rollout": ["50"],
                            "save-interval": ["10"]}),
    ("a.yaml", TRL_SIMPLE + "generation_batch_size: 32\n", {"rollout-batch-size": ["8"], "num-rollout": ["25"]}),
    # 64 rollouts of 16 for each prompt; as many in flight as in a batch are one batch ahead
    ("a.toml", PRIME_TEXT, {"rollout-batch-size": ["4"], "n-samples-per-prompt": ["16"], "async-buffer-size": ["1"]}),
    # 2 x 64 in flight are two batches, within 4 versions
    ("a.toml", PRIME_SEARCH, {"rollout-batch-size": ["8"], "async-buffer-size": ["2"]}),
    ("a.toml", PRIME_SEARCH.replace("= 4\n[orch", "= 1\n[orch"), {"async-buffer-size": ["1"]}),
    ("a.toml", PRIME_MATH, {"rollout-max-context-len": ["800"], "max-tokens-per-gpu": ["1600"],
                            "rollout-max-response-len": ["799"]}),
    ("a.toml", PRIME_EARLIER, {"async-buffer-size": ["1"], "rollout-max-response-len": ["768"], "lora-alpha": ["64"]}),
    # KL in the loss, or in the reward; a critic for gae alone; clip ranges; devices that are shared on one machine
    ("a.sh", VERL_MATH, {"use-kl-loss": [], "kl-loss-coef": ["0.002"], "kl-coef": None, "critic-lr": None,
                         "colocate": [], "rollout-num-gpus": ["4"], "lora-rank": ["8"], "report-to": ["wandb"]}),
    ("a.sh", VERL_PPO, {"use-kl-loss": None, "kl-coef": ["0.003"], "critic-lr": ["2e-5"], "report-to": None,
                        "max-tokens-per-gpu": ["9000"], "no-use-dynamic-batch-size": None, "save-interval": None}),
    ("a.sh", VERL_DAPO, {"eps-clip": ["0.2"], "eps-clip-high": ["0.28"], "colocate": None, "rollout-num-gpus": ["16"],
                         "rollout-max-response-len": ["1024"], "eval-temperature": ["0.7"], "rollout-top-k": None}),
    ("a.yaml", TRL_SMALL, {"loss-aggregation": ["constant"], "disable-grpo-std-normalization": [], "engine": None,
                           "use-tis": None, "kl-loss-coef": None, "num-epoch": ["3"]}),
    ("a.yaml", TRL_SMALL + "save_strategy: 'no'\n", {"save-interval": None}),
    ("a.yaml", TRL_SMALL, {"save-interval": ["500"], "rm-type": None, "label-key": ["solution"]}),
    ("a.sh", VERL_MATH.replace("main_ppo ", "main_ppo --config-name ppo_megatron_trainer.yaml "),
     {"train-backend": ["megatron"]}),
    ("a.yaml", TRL_SIMPLE, {"kl-loss-coef": ["0.01"], "num-epoch": None, "use-tis": [], "project": None}),
], ids=lambda value: value if isinstance(value, str) and len(value) < 12 else "")  # fmt: skip
def test_what_the_settings_become(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, wanted: dict[str, list[str] | None]
) -> None:
    words, _ = of_text(tmp_path, capsys, name, text)
    assert {flag: values(words, flag) for flag in wanted} == wanted


@pytest.mark.parametrize(("name", "text", "line"), [
    ("a.sh", VERL_MATH.replace("adv_estimator", "adv_estimater"),
     "left out, unknown: algorithm.adv_estimater; did you mean 'algorithm.adv_estimator'?"),
    ("a.yaml", TRL_SMALL + "epsilon_hihg: 1\n", "left out, unknown: epsilon_hihg; did you mean 'epsilon_high'?"),
    ("a.toml", f"colour = 1\n{PRIME_TEXT}", "left out, unknown: colour"),
    ("a.sh", VERL_MATH.replace("size=16", "size=24"),
     "left out, not here: data.train_batch_size=64, actor_rollout_ref.actor.ppo_mini_batch_size=24: optimizer steps of "
     "a batch would be 64 / 24, but must be a whole number; change one of them"),
    ("a.sh", VERL_MATH.replace("train_batch_size=64", "train_batch_size=$SIZE"), "_size is $SIZE, but must"),
    ("a.sh", VERL_MATH.replace("=low_var_kl", "=abs"), "left out, not here: actor_rollout_ref.actor.kl_loss_type=abs"),
    ("a.sh", VERL_MATH.replace("$@", "custom_reward_function.path=mine.py"),
     "left out, not here: custom_reward_function.path=mine.py: a grader here takes (response, label, metadata); wrap"),
    ("a.sh", VERL_MATH.replace("$@", "actor_rollout_ref.actor.ppo_epochs=2"), "ppo_epochs=2: it can only be 1 here"),
    ("a.sh", VERL_PPO, "check raw: set under a condition"),
    ("a.yaml", TRL_SMALL.replace("accuracy_reward", "mine.brevity"), "not here: reward_funcs=mine.brevity: such"),
    ("a.yaml", TRL_SMALL + "reward_weights: [1, 2]\n", "reward_weights=1 2: 2 weights for 1 functions; give one for"),
    ("a.yaml", TRL_SMALL.replace("processes: 1", "processes: 3"),
     "changed: num_processes=3 -> --rollout-batch-size 3 --num-steps-per-rollout 1 --actor-num-gpus-per-node 3"),
    ("a.yaml", TRL_SMALL + "num_generations_eval: 4\n",
     "no --eval-prompt-data: --eval-temperature 0.9 --n-samples-per-eval-prompt 4"),
    ("a.toml", PRIME_TEXT, "left out, not here: orchestrator.train.env="),
    # under the names of the file, which may be earlier ones, and each key once
    ("a.toml", f"{PRIME_OLD}rollouts_per_example = 8", "_size=64 orchestrator.rollouts_per_example=8 ->"),
    ("a.toml", f"{PRIME_OLD}rollouts_per_example = 7.5", "orchestrator.rollouts_per_example is 7.5, but must"),
    ("a.toml", f"{PRIME_OLD}[[orchestrator.env]]\nid = 'x'", "not here: orchestrator.env={'id': 'x'}: the pack"),
    ("a.toml", f"{PRIME_OLD}[orchestrator.eval]\nnum_examples = 5\ninterval = 2",
     "changed: orchestrator.eval.interval=2 -> --eval-prompt-data verifiers\n"),
    ("a.toml", PRIME_TEXT, "note: tokens are at most 1 versions old; with --max-staleness 8"),
    ("a.toml", PRIME_TEXT, "left out, for it is so anyway: "),
    ("a.yaml", TRL_DEMO, "save_strategy=epoch: it is counted in batches; write --save-interval N"),
    ("a.yaml", TRL_DEMO.replace("generations: 4", "generations: 4.5"), "num_generations is 4.5, but must"),
    ("a.yaml", TRL_SMALL + "save_strategy: 'no'\n", "left out, for it is so anyway: save_strategy"),
], ids=lambda value: value if len(value) < 12 else "")  # fmt: skip
def test_what_the_report_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, line: str
) -> None:
    assert line in of_text(tmp_path, capsys, name, text)[1]


def test_a_weight_stands_behind_its_grader(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = TRL_SMALL.replace("[accuracy_reward]", "[format, accuracy]") + "reward_weights: [0.2, 1.0]\n"
    (tmp_path / "a.yaml").write_text(text)
    assert convert([str(tmp_path / "a.yaml"), "--json"]) == 0
    given = [tokens for name, _, tokens in grouped(json.loads(capsys.readouterr().out)["flags"]) if "reward" in name]
    assert [one[1].rpartition("=")[2] for one in given] == ["format:<think>.*</think>.*@0.2", "math@1"]


def test_paths_below_the_home_directory_stay_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a shell, and where the program reads them itself, as from a recipe."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "v.yaml").write_text(
        "actor_rollout_ref: {}\ndata: {train_files: ~/my rows.jsonl}\ntrainer: {default_local_dir: ~/run}"
    )
    text = shell_command(converted(tmp_path / "v.yaml", None)[0])
    printed = subprocess.run(["sh", "-c", f"printf '%s\n' {text}"], capture_output=True, text=True, check=True).stdout
    assert {f"{tmp_path}/my rows.jsonl", f"{tmp_path}/run"} <= set(printed.splitlines())
    assert resolved(f"{BASE} --run-dir", "'~/run'").run.run_dir == f"{tmp_path}/run"


def test_a_file_of_nested_keys_says_the_same_as_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    yaml = """
data: {train_batch_size: 64, max_prompt_length: 99, max_response_length: 50}
actor_rollout_ref:
  actor: {ppo_mini_batch_size: 32}
  rollout: {max_model_len: "${data.max_prompt_length}", top_k: null}
"""
    words, _ = of_text(tmp_path, capsys, "verl.yaml", yaml)
    assert values(words, "num-steps-per-rollout") == ["2"]
    assert values(words, "rollout-max-context-len") == ["99"], "what the file refers to"
    assert values(words, "rollout-top-k") is None
    found = {"data": {"train_batch_size": 64}, "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 32}}}
    assert values(of_text(tmp_path, capsys, "verl.json", json.dumps(found))[0], "num-steps-per-rollout") == ["2"]
    assert flat({"a": {"b": {"c": 1}, "d": {}}, "e": [1]}) == {"a.b.c": 1, "a.d": {}, "e": [1]}


@pytest.mark.parametrize(("name", "text", "fault"), [
    ("rl.toml", "[model\n", "rl.toml cannot be read as TOML ("),
    ("grpo.yaml", "a: [1\n", "grpo.yaml cannot be read as YAML ("),
    ("grpo.json", "{", "grpo.json cannot be read as JSON ("),
    ("grpo.yaml", "colour: 1\n", "grpo.yaml has no key by which a configuration is known (of prime-rl orchestrator"),
    ("grpo.yaml", "- 1\n", "grpo.yaml has no key by which a configuration is known"),
    ("run.sh", "echo 1\n", "run.sh starts no train.py or train_async.py and no verl.trainer.main_ppo"),
    ("run.sh", "trl grpo --config a.yaml\n", "for TRL the arguments of GRPOConfig and of the trainer as a .yaml file"),
    ("grpo.py", "GRPOConfig(beta=1)\n", "give the shell script that trains, for"),
])  # fmt: skip
def test_a_damaged_file_is_named(tmp_path: Path, name: str, text: str, fault: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=re.escape(fault)):
        convert([str(tmp_path / name)])


# ---------------------------------------------------------------------- the page


def rows(name: str) -> dict[str, str]:
    """Key -> flags, as the page has them."""
    section = PAGE.read_text().partition(f"\n## From {name}\n")[2].partition("\n## ")[0]
    return {key: flags for key, flags in re.findall(r"^\| `([^`|]+)` \| (.*?) \|$", section, re.MULTILINE)}


def wanted_rows(name: str) -> dict[str, str]:
    project = projects()[name]
    plain = {key: text.replace("?", "").split() for key, text in project.flags.items()}
    flags = {key: [word for text in table.values() for word in text.split() if word.startswith("--")]
             for key, table in project.choices.items()}  # fmt: skip
    named = {key: [f"--{flag}" for flag in found] for key, found in plain.items()} | flags
    return {key: " ".join(f"`{flag}`" for flag in dict.fromkeys(found)) for key, found in named.items()}


@pytest.mark.parametrize("name", KINDS.values())
def test_the_page_has_each_key_with_its_flags(name: str) -> None:
    wanted = wanted_rows(name)
    assert rows(name) == wanted, "\n".join(f"| `{key}` | {flags} |" for key, flags in wanted.items())


def test_the_example_of_the_page_prints_what_it_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = re.search(r"```yaml\n(# grpo.yaml\n.*?)```", PAGE.read_text(), re.DOTALL)
    assert text is not None
    Path("grpo.yaml").write_text(text[1])
    assert convert(["grpo.yaml"]) == 0
    out, report = capsys.readouterr()
    assert f"```text\n{report}{out}```" in PAGE.read_text()
