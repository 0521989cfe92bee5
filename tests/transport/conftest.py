"""Fixtures of the tests of links."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """pytest's own directories are too deep for a socket path."""
    with tempfile.TemporaryDirectory(prefix="t") as directory:
        yield Path(directory)
