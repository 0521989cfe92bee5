"""Every shell command of the documentation is executed, planned with `--dry-run`, or parsed; few are neither."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
from ray.scripts.scripts import cli as ray

import launch
from tests.docs.pages import FENCE, PAGES, ROOT, commands, page_id, write_file, write_gsm8k

# Neither executed nor parsed. The first words of a command, and why.
NOT_TRIED: Final = {
    "pip install": "packages from an index",
    ".venv/bin/python -m pip install": "packages from an index",
    "python -m venv": "an environment, and packages from an index",
    "hf download": "a model from the network",
    "tensorboard": "a server that does not end",
    ".venv/bin/mkdocs serve": "a server that does not end",
    "ssh": "another machine",
    "curl": "asks a run, or an engine, that has to be there",
    "git clone": "a repository from the network",
    "python -m nltk.downloader": "data from the network",
    "python -I -S -c CODE": "a measure of Python itself",
    "bash run.sh": "the reader's own script",
    "(umask": "openssl writes a secret",
    "file=$(jq": "asks a run that has to be there",
    "cd": "the reader's own folder",
    "export": "the reader's own shell",
}
# What the reader brings: data, a model, an earlier run, code, GPUs, a cluster.
READERS_OWN: Final = re.compile(
    r"there is no (such )?(file or )?directory|a run to resume holds config\.toml|no package '(my_\w+|mine)' is found|"
    r"sees no GPU|no checkpoint|has no config\.json|No module named '(my_\w+|mine)'|but there is no kept/|"
    r"'[\w.-]+\.(toml|yaml|sh|token)', but there is no such file|pip install (bm25s|reasoning-gym|wandb)|"
    r"engines\.token cannot be read|cannot be reached: |refused the call with "
)
NO_SUCH_RUN: Final = re.compile(
    r"(RUN|[\w/]*runs/[\w/-]+) (is no directory|holds no run)|no evaluated version is saved|"
    r"(FILE|[\w.-]+\.(sh|yaml)) cannot be read"  # of convert: the reader's own
)
# The module of the reader's that pages name; what its functions do does not matter here.
MY_CODE: Final = """
def score(response, label, metadata):
    return 0.0

def keep_mixed(group):
    return True

async def lookup(word: str) -> str:
    return word
"""
# What `...` stands for in a command: everything else that a run needs.
LEFT_OUT: Final = ["--prompt-data", "arithmetic", "--hf-checkpoint", "tiny-arithmetic", "--num-rollout", "1"]


class Parsed(Exception):
    """A command line was taken."""


def planned(words: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What `--dry-run` refuses of a command, but for what the reader brings."""
    if "..." in words:
        at = words.index("...")
        given = " ".join(words)
        rest = [LEFT_OUT[k : k + 2] for k in range(0, len(LEFT_OUT), 2) if LEFT_OUT[k] not in given]
        words = [*words[:at], *(word for pair in rest for word in pair), *words[at + 1 :]]
    if words[:1] == ["eval"] and words[1].startswith("runs/"):  # a run of the reader's, which names its sets
        sets = [] if "--eval-prompt-data" in words else ["--eval-prompt-data", "sums=arithmetic"]
        words = ["eval", "tiny-arithmetic", *words[2:], *sets]
    code = launch.main([*words, "--dry-run"])
    faults = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert (code == 0) == (faults == [])
    return [fault for fault in faults if not READERS_OWN.search(fault)]


def command_to_a_run(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """`status`, `samples`, ...: the words are known; there is no such run."""
    try:
        code = launch.main(words)
    except SystemExit as end:  # argparse: 2 for words that it does not know
        code = 0 if end.code == 0 else 99
    printed = capsys.readouterr()
    assert code == 0 or (code in (2, 3) and NO_SUCH_RUN.search(printed.out + printed.err)), printed


def parsed(module: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m MODULE ...`, up to the moment when its arguments are read."""
    if not arguments:
        assert importlib.util.find_spec(module) is not None, module
        return
    real = argparse.ArgumentParser.parse_args

    def read(parser: argparse.ArgumentParser, *args: Any) -> None:
        real(parser, *args)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", read)
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    with pytest.raises(Parsed if "--help" not in arguments else SystemExit):
        runpy.run_module(module, run_name="__main__", alter_sys=True)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=page_id)
def test_commands_of_the_pages_are_taken(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))
    (tmp_path / "my_code.py").write_text(MY_CODE)
    write_gsm8k(tmp_path)
    for _, block in FENCE.findall(page.read_text()):
        write_file(block, tmp_path)
    for words in commands(page):
        line = " ".join(words)
        if any(line == known or line.startswith(f"{known} ") for known in NOT_TRIED):
            continue
        if words[0] == "make":
            arguments = ["make", "-n", "-C", str(ROOT), *words[1:]]
            subprocess.run(arguments, check=True, capture_output=True, env={**os.environ, "MAKEFLAGS": ""})
            continue
        if words[1:3] == ["-m", "pytest"]:
            assert [word for word in words if word.startswith("tests/") and not (ROOT / word).exists()] == []
            continue
        if words[:2] in (["python", "-m"], [".venv/bin/python", "-m"]):
            with monkeypatch.context() as patches:
                parsed(words[2], words[3:], patches)
            continue
        if words[:3] == ["ray", "job", "submit"]:
            words = words[words.index("--") + 1 :]
        if words[0] == "ray":
            ray.commands[words[1]].make_context(words[1], words[2:])  # read, not started
            continue
        ours = words[0] == "python" and words[1].endswith("launch.py")
        words = words[1:] if words[0] == "sluice" else words[2:] if ours else [line]
        if words[:1] == ["compare"] and words[1:] and words[1].startswith("--"):  # flags of a run
            words = words[1:]
        if not words or words[0].startswith("-") or words[0] in ("...", "eval"):
            assert planned(words, capsys) == [], line
        elif words[0] in {*launch.CONTROL, *launch.COMMANDS} and words[1:] not in ([], ["FLAGS"]):
            command_to_a_run(words, capsys)
        else:
            assert words[0] in launch.COMMANDS, f"{line}: try it here, or name it in NOT_TRIED"
