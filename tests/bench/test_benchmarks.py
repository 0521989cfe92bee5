"""The short form of every benchmark runs to its end and writes what it measured; no figure is judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHARED = "arguments(__doc__, "  # the options that every benchmark has
BENCHMARKS = sorted(path.stem for path in (ROOT / "bench").glob("*.py") if SHARED in path.read_text())


def test_the_benchmarks_are_those_of_make_bench() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert len(BENCHMARKS) >= 6
    assert [name for name in BENCHMARKS if f"-m bench.{name} --quick" not in makefile] == []


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_short_form_runs(name: str, tmp_path: Path) -> None:
    output = tmp_path / "document.json"
    command = [sys.executable, "-m", f"bench.{name}", "--quick", "--output", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    document = json.loads(output.read_text())
    assert document["series"], "a benchmark has measured something"
