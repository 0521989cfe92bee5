"""The command as a user starts it: what it prints, its exit codes, and what it does not import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import configs.help as manual
import launch
from configs.command_line import parse
from configs.flags import SECTIONS, flags
from configs.load import load_arguments, recipe_names, with_work
from configs.rules.validate import checked

ROOT = Path(launch.__file__).resolve().parent
HEAVY = ("torch", "zmq", "ray", "numpy", "transformers", "rich", "asyncio")
FRAMEWORKS = ("torch", "ray", "transformers", "rich")


def python(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *argv], cwd=cwd, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def start(*argv: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return python(str(ROOT / "launch.py"), *argv, cwd=cwd)


@pytest.mark.parametrize(
    ("argv", "heavy"),
    [(["--help"], HEAVY), (["--version"], HEAVY), (["--mdoe", "sync"], FRAMEWORKS), (["--dry-run"], FRAMEWORKS)],
)
def test_nothing_heavy_is_imported(argv: list[str], heavy: tuple[str, ...], tmp_path: Path) -> None:
    report = f"print('imported:', *[name for name in {heavy!r} if name in sys.modules])"
    done = python("-c", f"import sys, launch\nlaunch.main({argv!r})\n{report}", cwd=tmp_path)
    assert done.stdout.splitlines()[-1].split() == ["imported:"], done.stderr


def test_help_names_every_flag_and_section() -> None:
    text = manual.render_help(100)
    words = set(text.replace(",", " ").split())
    for flag in flags():
        assert (f"--{flag.name}" if flag.name else f"{flag.key}=") in text
        assert not flag.negatable or f"--no-{flag.name}" in words
    assert all(f"[{section}]" in text for section in SECTIONS)
    assert "(default: 16384)" in text
    assert max(map(len, text.splitlines())) <= 110


def test_help_by_the_command() -> None:
    done = start("--help")
    assert done.returncode == 0
    assert done.stdout.startswith("usage: python launch.py")
    assert done.stderr == ""


def test_version() -> None:
    assert start("--version").stdout.startswith("sluice ")


def test_a_dry_run_of_the_quickstart(tmp_path: Path) -> None:
    done = start("--dry-run", "--scale", "reward=2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "running the recipe quickstart" in done.stderr
    assert "prompts -> generate -> reward x2 -> group -> train" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_mistakes_are_one_line_each_without_traceback(tmp_path: Path) -> None:
    done = start("--mdoe", "sync", "--lr", "-1", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "error: --mdoe is no flag; did you mean --mode?",
        "error: --lr is '-1', but must be a number >= 0; give for example 1e-06",
    ]


@pytest.mark.parametrize("plan", [["--dry-run"], []])
def test_flags_that_cannot_be_read_are_told_with_all_else_that_is_wrong(
    plan: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What rests on such a flag is not judged: with the right spelling it may be right."""
    monkeypatch.chdir(tmp_path)
    argv = ["--hf-checkpiont", "tiny", "--prompt-data", "nowhere.jsonl", "--num-rollout", "x", "--scale", "train=2"]
    assert launch.main([*argv, "--rm-type", "remote_rm", *plan]) == 2
    lines = capsys.readouterr().err.splitlines()
    words = [
        "--hf-checkpiont is no flag; did you mean --hf-checkpoint?",
        "--num-rollout is 'x', but must be",
        "nowhere.jsonl",
        "--scale train=2",
        "rm_type 'remote_rm' is no grader",
    ]
    for word in words:
        assert sum(word in line for line in lines) == 1, (word, lines)
    assert len(lines) == len(words), lines


def test_faults_of_recipes_are_told_with_those_of_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in (("one", "[train]\nlrr = 1"), ("two", "[rollout]\nnum_rollout = 'x'")):
        (tmp_path / f"{name}.toml").write_text(text, encoding="utf-8")
    assert launch.main(["--config", *map(str, tmp_path.glob("*.toml")), "ppoo", "--lrr", "1", "--dry-run"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4, lines
    for word in ("--lrr is no flag", "train.lrr in one.toml", "rollout.num_rollout in two.toml", "--config is 'ppoo'"):
        assert sum(word in line for line in lines) == 1, (word, lines)


def test_a_refused_configuration_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["--no-use-tis", "--scale", "train=2"]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 2


def test_everything_that_a_run_refuses_is_told_together_and_by_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"input": "1+1=", "label": "2"}\n{broken\n', encoding="utf-8")
    model = ["--hf-checkpoint", "tiny-arithmetic", "--prompt-data", "rows.jsonl", "--label-key", "label"]
    wrong = ["--strict-data", "--rm-type", "remote_rm", "--dynamic-sampling-filter", "nonzero_sd"]
    words = ("rows.jsonl:2: ", "rm_type 'remote_rm' is no grader", "--dynamic-sampling-filter 'nonzero_sd' is unknown")

    def said(*argv: str) -> list[str]:
        assert launch.main([*model, *wrong, *argv]) == 2
        return [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]

    for argv in (["--dry-run", "--num-rollout", "2"], ["--num-rollout", "2", "--runner", "inprocess"]):
        lines = said(*argv)
        assert len(lines) == 3, lines
        assert all(any(word in line for line in lines) for word in words)
    assert not list(tmp_path.glob("runs/*/logs/*")), "nothing was started"
    for argv in (["--dry-run"], []):
        lines = said(*argv)
        assert len(lines) == 4, lines
        assert "--num-rollout is not set" in lines[0]


def test_rows_name_graders_and_held_out_files_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    row = '{"input": "1+1=", "label": "2", "metadata": {"rm_type": "mathh"}}'
    (tmp_path / "rows.jsonl").write_text(row, encoding="utf-8")
    (tmp_path / "held.jsonl").write_text('{"question": "1+1="}', encoding="utf-8")
    argv = ["--hf-checkpoint", "tiny", "--prompt-data", "rows.jsonl", "--num-rollout", "2", "--dry-run"]
    assert launch.main(argv) == 2
    assert "rm_type 'mathh' is no grader; did you mean 'math'?" in capsys.readouterr().err
    (tmp_path / "rows.jsonl").write_text('{"input": "1+1=", "label": "2"}', encoding="utf-8")
    assert launch.main(argv) == 0
    capsys.readouterr()
    assert launch.main([*argv, "--eval-interval", "1", "--eval-prompt-data", "h=held.jsonl@[0:1]"]) == 2
    assert "no usable prompt in held.jsonl@[0:1]" in capsys.readouterr().err


def test_warnings_do_not_stop(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["--dry-run", "--eps-clip-high", "0.1"]) == 0
    assert "warning: --eps-clip-high 0.1 is below --eps-clip 0.2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "quickstart"),
    [
        ([], True),
        (["--lr", "1"], True),
        (["--config", "grpo_sync"], False),
        (["--prompt-data", "arithmetic"], False),
        (["data.prompt_data=arithmetic"], False),
        (["--hf-checkpoint", "tiny"], False),
        (["--model", "qwen3-0.6b"], False),
    ],
)
def test_when_the_quickstart_runs(argv: list[str], quickstart: bool, capsys: pytest.CaptureFixture[str]) -> None:
    launch.main([*argv, "--dry-run"])
    assert ("quickstart" in capsys.readouterr().err) is quickstart


@pytest.mark.parametrize("name", recipe_names())
def test_each_recipe_is_right(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "data" / "gsm8k"
    data.mkdir(parents=True)
    for file in ("train.jsonl", "test.jsonl"):
        (data / file).write_text('{"question": "1+1?", "answer": "#### 2"}\n', encoding="utf-8")
    own = ["--frozen-engine", "teacher=tiny-arithmetic"] if name == "opd" else []
    loaded = load_arguments(with_work(parse(["--config", name, *own]))[0])
    config, warnings = checked(loaded.config, loaded.given)
    assert warnings == ()
    assert config.rollout.num_rollout is not None or config.rollout.num_epoch is not None
    assert config.rollout.rollout_batch_size * config.rollout.n_samples_per_prompt == (
        config.train.global_batch_size * (config.train.num_steps_per_rollout or 1)
    )


@pytest.mark.parametrize("name", manual.PAGES)
def test_the_documentation_is_up_to_date(name: str) -> None:
    page = (manual.DOCS / name).read_text(encoding="utf-8")
    assert manual.render_page(page, manual.PAGES[name]()) == page, "run: python -m configs.help"
    with pytest.raises(ValueError, match="lacks the marks"):
        manual.render_page("no marks", "")
