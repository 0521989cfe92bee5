"""The command as a user starts it: what it prints, its exit codes, and what it does not import."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import configs.help as manual
import launch
from configs.command_line import RETIRED, parse
from configs.flags import SECTIONS, Flag, flags, flags_by_key
from configs.graph import autoscale_limits, chains, replicas
from configs.help import description, section_title
from configs.layers import ConfigError, merge, value_at
from configs.load import load, with_work
from configs.schema import Config, StageConfig
from tests.configs.config_rig import NAMED, NESTED, faults_of, one_says, read, recipe, values

ROOT = Path(launch.__file__).resolve().parent
HEAVY = ("torch", "zmq", "ray", "numpy", "transformers", "rich", "asyncio")
FRAMEWORKS = ("torch", "ray", "transformers", "rich")


def python(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    options: dict[str, Any] = {"env": {**os.environ, "PYTHONPATH": str(ROOT)}, "capture_output": True, "text": True}
    return subprocess.run([sys.executable, *argv], cwd=cwd, timeout=60, check=False, **options)


@pytest.mark.parametrize(("commands", "heavy", "printed", "errors"), [
    (["--help", "--version"], HEAVY, "usage: python launch.py.*\nsluice .*codes: 0 0", ""),
    (["--mdoe sync --lr -1", "--dry-run"], FRAMEWORKS, "mode async.*codes: 2 0",
     "error: --mdoe is no flag; did you mean --mode?\n"
     "error: --lr is '-1', but must be a number >= 0; give for example 1e-06\n"),
])  # fmt: skip
def test_nothing_heavy_is_imported(
    commands: list[str], heavy: tuple[str, ...], printed: str, errors: str, tmp_path: Path
) -> None:
    """And mistakes are a line each, without a traceback."""
    lines = ["import sys, launch", f"codes = [launch.main(argv.split()) for argv in {commands!r}]"]
    lines += ["print('codes:', *codes)", f"print('imported:', *[name for name in {heavy!r} if name in sys.modules])"]
    done = python("-c", "\n".join(lines), cwd=tmp_path)
    assert done.stdout.splitlines()[-1].split() == ["imported:"], done.stderr
    assert re.match(printed, done.stdout, re.DOTALL)
    assert done.stderr.startswith(errors)


def test_help_names_every_flag_and_section() -> None:
    text = manual.render_help(100)
    words = set(text.replace(",", " ").split())
    for flag in flags():
        assert (f"--{flag.name}" if flag.name else f"{flag.key}=") in text
        assert not flag.negatable or f"--no-{flag.name}" in words
    assert all(f"[{section}]" in text for section in SECTIONS)
    assert "(default: 16384)" in text
    assert max(map(len, text.splitlines())) <= 110


def test_every_command_is_in_the_help_and_a_slip_of_one_is_named(errors: Errors) -> None:
    named = ("eval", *launch.COMMANDS, *launch.CONTROL)
    usage = manual.render_help(100).partition("\n\n")[0]
    assert [name for name in named if not re.search(rf"\b{name}\b", usage)] == []
    (slip,) = errors("statsu runs/a")
    assert slip.startswith("error: 'statsu' is no command; did you mean 'status'?; the commands are eval, samples, ")
    (word,) = errors("zzzz --lr")
    assert word.startswith("error: 'zzzz' is no command; the commands are eval, samples, view, ")


def test_a_dry_run_of_the_quickstart(tmp_path: Path) -> None:
    done = python(str(ROOT / "launch.py"), "--dry-run", "--scale", "reward=2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "running the recipe quickstart" in done.stderr
    assert "prompts -> generate -> reward x2 -> group -> train" in done.stdout
    assert list(tmp_path.iterdir()) == []


Errors = Callable[[str], list[str]]


@pytest.fixture
def errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Errors:
    """What the command refuses, line by line, in a directory of its own."""
    monkeypatch.chdir(tmp_path)

    def refused(argv: str) -> list[str]:
        capsys.readouterr()
        assert launch.main(argv.split()) == 2
        return [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]

    return refused


def each_once(lines: list[str], *words: str) -> None:
    for word in words:
        assert sum(word in line for line in lines) == 1, (word, lines)
    assert len(lines) == len(words), lines


@pytest.mark.parametrize("plan", ["--dry-run", ""])
def test_flags_that_cannot_be_read_are_reported_with_all_other_faults(plan: str, errors: Errors) -> None:
    """What rests on such a flag is not judged: with the right spelling it may be right."""
    argv = "--hf-checkpiont tiny --prompt-data nowhere.jsonl --num-rollout x --scale train=2 --rm-type remoted"
    unread = ("--hf-checkpiont is no flag; did you mean --hf-checkpoint?", "--num-rollout is 'x', but must be")
    others = ("train.x is no key", "nowhere.jsonl", "--scale train=2", "rm_type 'remoted' is no grader")
    each_once(errors(f"{argv} train.x=1 {plan}"), *unread, *others)


def test_faults_of_recipes_are_reported_with_those_of_the_command_line(tmp_path: Path, errors: Errors) -> None:
    recipe(tmp_path, "[train]\nlrr = 1\n[nowhere]\n", "one.toml")
    recipe(tmp_path, "[rollout]\nnum_rollout = 'x'\n", "two.toml")
    words = ("--lrr is no flag", "train.lrr in one.toml", "[nowhere] in one.toml", "rollout.num_rollout in two.toml")
    each_once(errors("--config one.toml two.toml ppoo --lrr 1 --dry-run"), *words, "--config is 'ppoo'")


def test_everything_that_a_run_refuses_is_reported_together_and_by_a_plan(tmp_path: Path, errors: Errors) -> None:
    (tmp_path / "rows.jsonl").write_text('{"input": "1+1=", "label": "2"}\n{broken\n', encoding="utf-8")
    wrong = "--hf-checkpoint tiny-arithmetic --prompt-data rows.jsonl --label-key label --strict-data "
    wrong += "--rm-type remoted --dynamic-sampling-filter nonzero_sd"
    words = ("rows.jsonl:2: ", "rm_type 'remoted' is no grader", "--dynamic-sampling-filter 'nonzero_sd' is unknown")
    for more in ("--dry-run --num-rollout 2", "--num-rollout 2 --runner inprocess"):
        each_once(errors(f"{wrong} {more}"), *words)
    assert not list(tmp_path.glob("runs/*/logs/*")), "nothing was started"
    for more in ("--dry-run", ""):
        each_once(errors(f"{wrong} {more}"), "--num-rollout is not set", *words)


def test_a_function_that_cannot_be_imported_is_one_fault(errors: Errors) -> None:
    argv = "--hf-checkpoint tiny --prompt-data arithmetic --num-rollout 2 --custom-rm-path no_such_pkg:f"
    each_once(errors(f"{argv} --rm-type auto"), "no package 'no_such_pkg' is found")
    argv = f"{argv} --rm-type auto --dynamic-sampling-filter nonzero_sd"
    each_once(errors(argv), "no package 'no_such_pkg' is found", "'nonzero_sd' is unknown")


def test_rows_name_graders_and_held_out_files_are_read(tmp_path: Path, errors: Errors) -> None:
    row = '{"input": "1+1=", "label": "2", "metadata": {"rm_type": "mathh"}}'
    (tmp_path / "rows.jsonl").write_text(row, encoding="utf-8")
    (tmp_path / "held.jsonl").write_text('{"question": "1+1="}', encoding="utf-8")
    argv = "--hf-checkpoint tiny --prompt-data rows.jsonl --num-rollout 2 --dry-run"
    assert "rm_type 'mathh' is no grader; did you mean 'math'?" in errors(argv)[0]
    (tmp_path / "rows.jsonl").write_text('{"input": "1+1=", "label": "2"}', encoding="utf-8")
    assert launch.main(argv.split()) == 0
    lines = errors(f"{argv} --eval-interval 1 --eval-prompt-data h=held.jsonl@[0:1]")
    assert "no usable prompt in held.jsonl@[0:1]" in lines[0]


def test_warnings_do_not_stop(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["--dry-run", "--eps-clip-high", "0.1"]) == 0
    assert "warning: --eps-clip-high 0.1 is below --eps-clip 0.2" in capsys.readouterr().err


@pytest.mark.parametrize(("argv", "quickstart"), [
    ("", True), ("--lr 1", True), ("--config grpo_sync", False), ("--prompt-data arithmetic", False),
    ("data.prompt_data=arithmetic", False), ("--hf-checkpoint tiny", False), ("--model qwen3-0.6b", False),
])  # fmt: skip
def test_when_the_quickstart_runs(argv: str, quickstart: bool) -> None:
    assert ("quickstart" in with_work(parse(argv.split()))[1]) is quickstart


@pytest.mark.parametrize("name", manual.PAGES)
def test_the_documentation_is_up_to_date(name: str) -> None:
    page = (manual.DOCS / name).read_text(encoding="utf-8")
    assert manual.render_page(page, manual.PAGES[name]()) == page, "run: python -m configs.help"
    with pytest.raises(ValueError, match="lacks the marks"):
        manual.render_page("no marks", "")


# Every flag of the schema arrives where it belongs; every mistake is named.


def arrived(flag: Flag, *argv: str) -> Any:
    return value_at(merge([parse(argv).layer]).config, flag.key)


def as_text(flag: Flag, value: Any) -> list[str]:
    if isinstance(value, tuple):
        return [str(item) for item in value]
    if flag.kind == "map":
        return [f"{name}={count}" for name, count in value.items()]
    if flag.kind == "json":
        return [msgspec.json.encode(value).decode()]
    if flag.kind == "bool":
        return [str(value).lower()]
    return [repr(value) if isinstance(value, float) else str(value)]


def test_every_section_has_a_title_and_every_flag_a_description() -> None:
    assert list(SECTIONS) == [section.name for section in msgspec.structs.fields(Config)]
    assert [section for section in SECTIONS if section_title(section) == section] == []
    assert [flag.key for flag in flags() if not description(flag)] == []


def test_nested_fields_have_no_flag_of_their_own() -> None:
    assert {flag.key for flag in NESTED} == {
        f"engine.simulated.{name}" for name in type(Config().engine.simulated).__struct_fields__
    }
    assert "--a-ms is no flag" in faults_of("--a-ms", "3")[0]


@pytest.mark.parametrize("flag", [*NAMED, *NESTED], ids=lambda flag: flag.key)
@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_a_value_given_by_flag_or_by_its_place_arrives(flag: Flag, data: st.DataObject) -> None:
    value = data.draw(values(flag))
    texts = as_text(flag, value)
    if flag.name:
        words = [f"--{flag.name}", *texts]
        if flag.kind == "bool":
            words = [f"--{flag.name}" if value else f"--no-{flag.name}"]
        pairs = flag.name == "eval-prompt-data" and any(set("/.") & set(text) for text in texts)  # slime's NAME PATH
        if not pairs:
            assert arrived(flag, *words) == value
        assert arrived(flag, *[f"--{flag.name}={text}" for text in texts]) == value
    if flag.kind == "list":
        texts = [msgspec.json.encode(value).decode()]
    for place in (flag.key, f"--{flag.key}"):
        assert arrived(flag, *[f"{place}={text}" for text in texts]) == value
    assert arrived(flag, *[word for text in texts for word in (f"--{flag.key}", text)]) == value


def test_strict_data_is_another_name_and_its_old_key_is_explained(tmp_path: Path) -> None:
    assert read("--strict-data --lr 1").config.data.max_bad_rows == 0
    recipe(tmp_path, "[data]\nstrict_data = false\n", "old.toml")
    assert read(f"--config {tmp_path / 'old.toml'}").config.data.max_bad_rows is None
    recipe(tmp_path, "[data]\nstrict_data = true\n", "old.toml")
    with pytest.raises(ConfigError, match="strict_data was removed: --max-bad-rows 0 says the same"):
        read(f"--config {tmp_path / 'old.toml'}")


def test_limits_of_stages() -> None:
    config = read("--autoscale reward=1..8 engine=1..4").config
    assert autoscale_limits(config) == {"reward": (1, 8), "engine": (1, 4)}
    assert autoscale_limits(read().config) == {}
    config = read("--scale reward=4 tools=2 --scale generate=3 run.scale.reward=5").config
    assert config.run.scale == {"reward": 5, "tools": 2, "generate": 3}


@pytest.mark.parametrize(("argv", "wanted"), [
    ("", "generate+reward+group"), ("--chain none", ""), ("--chain reward+group", "reward+group"),
    ("--scale generate=2", "reward+group"), ("--scale reward=2", ""),
    ("--use-opd --scale teacher=2", "generate+reward"),
    ("--chain generate+reward+group --scale generate=2", "reward+group"), ("--loss-type sft_loss", ""),
])  # fmt: skip
def test_neighbours_with_one_replica_each_share_a_process(argv: str, wanted: str) -> None:
    config = read(argv).config
    assert ["+".join(stages) for stages in chains(config, replicas(config))] == list(filter(None, [wanted]))


def test_objects_take_json_and_dotted_entries() -> None:
    argv = ["--apply-chat-template-kwargs", '{"a": 1}', "data.apply_chat_template_kwargs.enable_thinking=false"]
    assert load(argv).config.data.apply_chat_template_kwargs == {"a": 1, "enable_thinking": False}
    table = '[{"name": "judge", "path": "a.b:C", "after": "reward", "options": {"x": 1}}]'
    config = load([f"stage={table}", "stage.judge.replicas=3", 'stage.judge.options={"x": 2}']).config
    assert config.stage == (StageConfig(name="judge", path="a.b:C", after="reward", replicas=3, options={"x": 2}),)


@pytest.mark.parametrize(("argv", "words"), [
    ("--rollout-batch 3", "--rollout-batch is no flag; did you mean --rollout-batch-size?"),
    ("--learning-rate 3", "--learning-rate is no flag"),
    ("--max-stalenes 3", "did you mean --max-staleness?"),
    ("--rolloutbatchsize 3", "did you mean --rollout-batch-size?"),
    ("--use-neptune", "--use-neptune resembles no known name; see --help"),
    ("--start-rollout-id 3", "--resume goes on after the run's last checkpoint"),
    ("--start-rollout-id", "--resume goes on after the run's last checkpoint"),
    ("--no-save-optim", "each checkpoint has the optimizer's state, for a lost trainer goes on from it"),
    ("--rollout_batch_size 3", "did you mean --rollout-batch-size?"),
    ("--no-lr", "--no-lr is no flag"),
    ("--no-use-tsi", "did you mean --no-use-tis?"),
    ("-lr 3", "flags begin with two dashes; did you mean --lr?"),
    ("train.lrr=3", "train.lrr is no key of the configuration; did you mean train.lr?"),
    ("--run.lr 3", "run.lr is no key, but train.lr is; write train.lr or --lr"),
    ("trian.lr=3", "trian.lr is no key of the configuration; did you mean train.lr?"),
    ("engine.simulated.length_men=3", "did you mean engine.simulated.length_mean?"),
    ("quickstart", "'quickstart' follows no flag that takes it"),
    ("--lr 1 2", "'2' follows no flag that takes it"),
    ("--lr", "--lr has no value, but must be a number >= 0; give for example --lr 1e-06"),
    ("--lr fast", "--lr is 'fast', but must be a number >= 0"),
    ("--lr nan", "--lr is 'nan', but must be a number >= 0"),
    ("--lr inf", "--lr is 'inf', but must be a number >= 0, and finite"),
    ("--num-rollout 1.5", "--num-rollout is '1.5', but must be a whole number >= 0 or none"),
    ("--mode asink", "--mode is 'asink', but must be one of async, sync, one_step; did you mean async?"),
    ("--mode zzz", "choose for example async"),
    ("--trace maybe", "'maybe' follows no flag that takes it"),
    ("--trace=maybe", "--trace is 'maybe', but must be true or false; write --trace or --no-trace"),
    ("--no-trace=x", "--no-trace takes no value, but got 'x'"),
    ("--scale reward", "--scale is 'reward', but must be name=whole number pairs; give for example reward=2"),
    ("--scale reward=two", "must be name=whole number pairs"),
    ("--rollout-stop-token-ids 1 x", "--rollout-stop-token-ids is '1 x', but must be a list of whole numbers"),
    ("--apply-chat-template-kwargs {", "but must be a JSON object, and this is not JSON"),
    ("--apply-chat-template-kwargs '{\"a\": null}'", "must be a JSON object without null"),
    ("--dry-run=yes", "--dry-run takes no value"),
    ("--config", "--config needs a value"),
    ("stage=[{}]", "must be tables with name, path and one of after or loop"),
    ('stage=[{\\"name\\":\\"a\\",\\"paht\\":\\"b\\"}]', "did you mean path?"),
    ("stage.judge.replicas=2", "stage.judge.replicas names no custom stage"),
    ("stage.judge.replica=2", "did you mean stage.judge.replicas?"),
    ("stage.judge=2", "stage.judge is incomplete"),
])  # fmt: skip
def test_mistakes_are_named(argv: str, words: str) -> None:
    one_says(words, faults_of(argv))


def test_no_mistake_hides_help() -> None:
    assert parse(["--nonsense", "--help"]).help
    assert parse(["-h"]).help


def test_every_rule_is_enforced_where_it_is_stated() -> None:
    """Just outside each bound a value is refused, with the same words that the documentation shows."""
    for flag in flags():
        for sign, bound in re.findall(r"(>=|>|<=|<) (-?[\d.]+)", flag.rule):
            step = 1 if "whole" in flag.rule else 1e-6
            edge = float(bound) if sign in (">", "<") else float(bound) + (step if sign == "<=" else -step)
            text = str(int(edge)) if "whole" in flag.rule else repr(edge)
            (fault,) = faults_of(f"{flag.key}={text}")
            assert fault.startswith(f"{flag.key} is {text!r}, but {flag.rule}")


@pytest.mark.parametrize(("key", "default", "instead"), [
    ("run.hub_processes", "0", "all streams run in the controller's process"),
    ("run.hub_shards", "1", "all streams run in the controller's process"),
    ("run.train_standby", "false", "a killed trainer starts again from its last checkpoint; see --save-interval"),
])  # fmt: skip
def test_a_setting_of_an_earlier_version_gets_one_sentence(
    key: str, default: str, instead: str, tmp_path: Path
) -> None:
    section, _, name = key.partition(".")
    flag, sentence = f"--{name.replace('_', '-')}", f"was removed: {instead}; leave it out"
    assert faults_of(flag, "3") == (f"{flag} {sentence}",)
    assert faults_of(f"{key}=3") == (f"{key} {sentence}",)
    old = recipe(tmp_path, f"[{section}]\n{name} = 3\n", "old.toml")
    assert faults_of("--config", old) == (f"old.toml: {key} {sentence}",)
    recipe(tmp_path, f"[{section}]\n{name} = {default}\n", "old.toml")
    assert load(["--config", old]).config == Config(), "the config.toml of an older run"


def test_every_setting_of_an_earlier_version_is_gone() -> None:
    assert not RETIRED.keys() & flags_by_key().keys()
    assert faults_of("--no-train-standby")[0].startswith("--no-train-standby was removed")
