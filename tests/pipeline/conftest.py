"""Fixtures of the tests of whole runs and of what a controller starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_servers import FAKE

from pipeline.facts.run_directory import RunDir
from pipeline.hosts.machine import held_port


@pytest.fixture
def rundir(tmp_path: Path) -> Iterator[RunDir]:
    with RunDir(tmp_path / "run").open(resume=False) as opened:
        yield opened


@pytest.fixture
def port() -> Iterator[int]:
    """A port that nobody else takes meanwhile."""
    with held_port() as held:
        yield held


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    """The program of a fake SGLang server."""
    path = tmp_path / "fake.py"
    path.write_text(FAKE)
    return path
