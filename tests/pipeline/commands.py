"""Commands to a run in another process, and waiting for what its status tells."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from pipeline.control.client import NotRunning, ask
from pipeline.control.endpoint import Command, Reply, RunStatus, Status

PATIENCE_S = 180.0


def done(run_dir: Path, command: Command) -> Reply:
    reply = ask(run_dir, command)
    assert reply.ok, reply.lines
    return reply


def until(process: subprocess.Popen[str], run_dir: Path, holds: Callable[[RunStatus], bool]) -> RunStatus:
    """The first status of which it holds."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        try:
            status = ask(run_dir, Status()).status
        except NotRunning:  # it starts
            status = None
        if status is not None and holds(status):
            return status
        time.sleep(0.1)
    raise AssertionError("it never came to that")
