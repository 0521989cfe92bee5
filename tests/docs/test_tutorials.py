"""The tutorials, done as a reader does them: files are written, `bash` blocks run and print what stands behind them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.docs.pages import FENCE, ROOT, TUTORIALS, blocks, page_id, write_file, write_gsm8k
from tests.sglang_server import needs_sglang

NUMBER: Final = re.compile(r"\d[\d.,:e-]*")
HOME: Final = "/home/me/sums"  # what the pages call the folder in which their reader works


def assert_printed(shown: str, printed: str, figures: bool = True) -> None:
    """Every line of the page but `...` was printed, in this order; `figures`: with the same numbers."""

    def shape(text: str) -> list[str]:
        lines = [" ".join(line.split()) for line in text.splitlines()]
        return lines if figures else [NUMBER.sub("#", line) for line in lines]

    lines = iter(shape(printed))
    for line in shape(shown):
        assert not line or line == "..." or line in lines, f"not printed: {line}\n\nprinted was:\n{printed}"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with `sluice` and `python` on the path, and GSM8K in miniature."""
    for name, words in (("sluice", f'"{ROOT}/launch.py" "$@"'), ("python", '"$@"')):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" {words}\n')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    home = tmp_path / "home"
    write_gsm8k(home)
    return home


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in TUTORIALS if "```bash" in page.read_text()], ids=page_id)
def test_a_tutorial_does_what_it_shows(page: Path, project: Path) -> None:
    if "sglang" in "".join(blocks(page, "bash")):
        needs_sglang()
    printed, figures = None, True
    for language, block in FENCE.findall(page.read_text()):
        if language == "bash":
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", block],
                cwd=project, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, check=False,
            )  # fmt: skip
            printed, figures = done.stdout, "--run-dir" not in block and "samples" not in block
            assert done.returncode == 0, f"{block}\n{printed}"
            continue
        if language == "text" and printed is not None:
            assert_printed(block, printed.replace(str(project), HOME), figures)
        else:
            write_file(block, project)
        printed = None


def test_a_line_that_is_not_printed_is_seen() -> None:
    printed = "zero\none 2\ntwo\nthree  4.25\n"
    assert_printed("one 1\n...\nthree 3.5\n", printed, figures=False)
    assert_printed("one 2\n...\nthree 4.25\n", printed)
    for shown, figures in (("two\none 1\n", False), ("one\n", False), ("four\n", False), ("one 1\n", True)):
        with pytest.raises(AssertionError, match="not printed"):
            assert_printed(shown, printed, figures)
