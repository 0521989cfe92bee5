"""The command as a user starts it: what it prints, its exit codes, and what it does not import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import configs.cli.help as manual
import launch
from configs.cli.command_line import parse
from configs.cli.flags import SECTIONS, flags
from configs.load import load, load_arguments, recipe_names, with_work
from configs.rules.validate import checked

ROOT = Path(launch.__file__).resolve().parent
HEAVY = ("torch", "zmq", "ray", "numpy", "transformers", "rich", "asyncio")


def python(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *argv], cwd=cwd, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def start(*argv: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return python(str(ROOT / "launch.py"), *argv, cwd=cwd)


@pytest.mark.parametrize("argv", [["--help"], ["--dry-run"], ["--version"], ["--mdoe", "sync"]])
def test_nothing_heavy_is_imported(argv: list[str], tmp_path: Path) -> None:
    report = f"print('imported:', *[name for name in {HEAVY!r} if name in sys.modules])"
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


def test_a_refused_configuration_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["--no-use-tis", "--scale", "train=2"]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 2


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


class Trouble(Exception):
    exit_code = 3


@pytest.mark.parametrize("error", [Trouble("the disk is full; free some space")])
def test_errors_of_the_run_that_name_an_exit_code(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(argv: object) -> int:
        raise error

    monkeypatch.setattr(launch, "_main", fail)
    assert launch.main([]) == 3
    assert capsys.readouterr().err == "error: the disk is full; free some space\n"


def test_a_defect_shows_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(argv: object) -> int:
        raise RuntimeError("a defect")

    monkeypatch.setattr(launch, "_main", fail)
    with pytest.raises(RuntimeError, match="a defect"):
        launch.main([])


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


def test_the_recipes_there_are() -> None:
    assert recipe_names() == (
        "async_tis", "cispo", "dapo", "dr_grpo", "grpo", "grpo_sync", "gsm8k", "gspo", "opd", "ppo", "quickstart",
        "reinforce_pp", "rloo", "tools", "toy",
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["sync", "one_step", "async"])
def test_the_quickstart_runs_in_every_mode(mode: str) -> None:
    loaded = load(["--config", "quickstart", "--mode", mode])
    config, warnings = checked(loaded.config, loaded.given)
    assert warnings == ()
    assert config.asynchrony.max_staleness == {"sync": 0, "one_step": 1, "async": 1}[mode]


def test_the_documentation_is_up_to_date() -> None:
    page = manual.PAGE.read_text(encoding="utf-8")
    assert manual.render_page(page) == page, "run: python -m configs.cli.help"


def test_the_documentation_names_every_recipe_and_mode() -> None:
    page = manual.PAGE.read_text(encoding="utf-8")
    for name in (*recipe_names(), "async", "one_step", "sync"):
        assert f"`{name}`" in page
