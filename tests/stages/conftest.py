"""Fixtures of the stages' tests."""

from __future__ import annotations

import pytest

from tests.stages.engine_rig import Log, record_exchanges


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    """All generate requests of the test."""
    return record_exchanges(monkeypatch)
