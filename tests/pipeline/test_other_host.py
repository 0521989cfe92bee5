"""Engines, generation and rewards on another host: nothing is shared with it but the network."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import SMALL, made_model
from namespace_launcher import NamespaceLauncher, NamespacesRefused, OtherHost, hidden

import launch as program
import pipeline.run
from pipeline.record.journal import Audit, audit

pytestmark = pytest.mark.slow


@pytest.fixture
def host(tmp_path: Path) -> Iterator[OtherHost]:
    try:
        with OtherHost(*hidden(tmp_path / "run")) as made:
            yield made
    except NamespacesRefused as refused:
        pytest.skip(f"this machine has no namespaces for a second host: {refused}")


def run_over(host: OtherHost, monkeypatch: pytest.MonkeyPatch, run_dir: Path, *flags: str) -> Audit:
    launchers = functools.partial(NamespaceLauncher, host)
    monkeypatch.setattr(pipeline.run, "run", functools.partial(pipeline.run.run, launchers=launchers))
    assert program.main(["--run-dir", str(run_dir), *flags]) == 0
    books = audit(run_dir / "ledger.jsonl")
    assert books.open == 0
    assert books.twice == ()
    return books


def test_weights_arrive_where_no_file_of_the_trainer_is_seen(
    host: OtherHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    books = run_over(host, monkeypatch, tmp_path / "run", *SMALL, *made_model(), "--num-rollout", "6")
    assert books.outcomes["trained"] == 24
    log = (tmp_path / "run" / "logs" / "generate-0.log").read_text()
    assert "version 0: fetched" in log
