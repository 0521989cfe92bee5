"""Engines and routers that die, hang or go away in mid-run: it goes on, the books balance, the ends are counted."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT, SIMULATED, SMALL, alive, environment, finish, made_model, start
from test_kill import kill, steps_done, wait_for_steps, wait_until

from pipeline.facts.servers import ServerInfo
from pipeline.hosts.machine import living
from tests.sglang_server import needs_sglang

pytestmark = pytest.mark.slow

QUICK_LOOKS = [
    "--rollout-health-check-interval", "0.3", "--rollout-health-check-timeout", "1.5", "--max-restarts", "20",
]  # fmt: skip


def fleet(run_dir: Path) -> dict[str, ServerInfo]:
    content = json.loads((run_dir / "replicas" / "fleet.json").read_text())
    return {name: ServerInfo(**facts) for name, facts in content.items()}


def started_again(run_dir: Path, name: str, incarnation: int) -> Callable[[], bool]:
    return lambda: fleet(run_dir)[name].incarnation >= incarnation


def nothing_left(run_dir: Path, patience_s: float = 10) -> None:
    """Every process of the run has ended, with all that it started."""
    pids = {file.stem: int(file.read_text()) for file in (run_dir / "replicas").glob("*.pid")}
    deadline = time.monotonic() + patience_s  # who dies with the controller needs a moment
    while time.monotonic() < deadline and any(alive(pid) or living(pid) for pid in pids.values()):
        time.sleep(0.05)
    assert [name for name, pid in pids.items() if alive(pid) or living(pid)] == []


@pytest.mark.parametrize(
    "backends", [pytest.param([], id="embedded", marks=pytest.mark.full), pytest.param(SIMULATED, id="simulated")]
)
def test_engines_that_die_and_hang_are_started_again(tmp_path: Path, backends: list[str]) -> None:
    run_dir = tmp_path / "run"
    flags = [*SMALL, *made_model(), *QUICK_LOOKS, *backends, "--num-rollout", "400", "--scale", "engine=2"]
    process = start(run_dir, *flags)
    wait_for_steps(process, run_dir, 2)
    hung = int((run_dir / "replicas" / "engine-1.pid").read_text())
    kill(run_dir, "engine-0", signal.SIGKILL)
    kill(run_dir, "engine-1", signal.SIGSTOP)  # for a while there is no engine at all
    for name in ("engine-0", "engine-1"):
        wait_until(process, started_again(run_dir, name, 1), f"{name} serves again")
    assert not alive(hung), "what hung is ended before its successor is announced"
    again = sum(json.loads(line).get("step", 0) > 0 for line in (run_dir / "metrics.jsonl").read_text().splitlines())
    wait_for_steps(process, run_dir, again + 2)
    process.send_signal(signal.SIGINT)
    done = finish(process, run_dir).check(130)
    summary = done.summary
    assert summary["engine"]["restarts"] == 2
    assert summary["engine"]["count"] == 2
    assert {name: summary["restarts"][name] for name in ("engine-0", "engine-1")} == {"engine-0": 1, "engine-1": 1}
    assert summary["groups"]["failed"] == 0
    assert "engine-0 ended with signal SIGKILL" in done.out
    assert "engine-1 ended with 3 failed health checks in a row (/health gave no answer within 1.5 s)" in done.out
    nothing_left(run_dir)


@pytest.mark.full
def test_a_router_that_dies_and_hangs_is_started_again(tmp_path: Path) -> None:
    """The real sglang-router before simulated engines."""
    python, run_dir = needs_sglang(), tmp_path / "run"
    router = ["--sglang-python", str(python), "--router", "sglang", "--scale", "engine=2"]
    process = start(run_dir, *SMALL, *made_model(), *QUICK_LOOKS, *SIMULATED, *router, "--num-rollout", "2000")
    wait_for_steps(process, run_dir, 2)
    assert fleet(run_dir)["router"].kind == "sglang"
    for incarnation, number in enumerate((signal.SIGKILL, signal.SIGSTOP), 1):
        kill(run_dir, "router", number)
        wait_until(process, started_again(run_dir, "router", incarnation), "the router serves again")
        wait_for_more_steps(process, run_dir)
    process.send_signal(signal.SIGINT)
    done = finish(process, run_dir).check(130)
    assert done.summary["router"]["kind"] == "sglang"
    assert done.summary["router"]["version"].count(".") == 2
    assert done.summary["restarts"]["router"] == 2
    assert done.summary["groups"]["failed"] == 0
    assert (run_dir / "logs" / "router.log").exists()
    nothing_left(run_dir)


def wait_for_more_steps(process: subprocess.Popen[str], run_dir: Path) -> None:
    wait_for_steps(process, run_dir, steps_done(run_dir) + 5)


def test_a_killed_controller_takes_the_router_with_it(tmp_path: Path) -> None:
    python, run_dir = needs_sglang(), tmp_path / "run"
    router = ["--sglang-python", str(python), "--router", "sglang"]
    process = start(run_dir, *SMALL, *made_model(), *SIMULATED, *router, "--num-rollout", "2000")
    wait_for_steps(process, run_dir, 1)
    process.kill()
    process.communicate()
    nothing_left(run_dir)


# ------------------------------------------------------------------ engines of somebody else


class Outside:
    """An engine that does not belong to the run, always at the same address."""

    def __init__(self, directory: Path, name: str) -> None:
        self.directory, self.name = directory, name
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, model: str) -> None:
        ready = self.directory / f"{self.name}.json"
        ready.unlink(missing_ok=True)
        command = [sys.executable, "-m", "models.engines.serve", "--model-path", model, "--port", str(self.port)]
        command += ["--ready-file", str(ready)]
        with (self.directory / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=environment())
        deadline = time.monotonic() + 60
        while not ready.exists():
            assert time.monotonic() < deadline, "the engine does not start"
            time.sleep(0.05)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def two_outside(tmp_path: Path) -> Iterator[list[Outside]]:
    engines = [Outside(tmp_path, f"outside-{i}") for i in range(2)]
    with contextlib.ExitStack() as stack:
        for engine in engines:
            stack.callback(engine.kill)
            engine.start(made_model()[1])
        yield engines


@pytest.mark.full
def test_external_engines_are_used_left_and_taken_back(tmp_path: Path, two_outside: list[Outside]) -> None:
    run_dir, model = tmp_path / "run", made_model()
    addresses = [word for engine in two_outside for word in ("--rollout-external-engine-addrs", engine.url)]
    engines = ["--engine", "sglang", "--router", "none", *addresses]  # ours speak SGLang's protocol
    process = start(run_dir, *SMALL, *model, *QUICK_LOOKS, *engines, "--num-rollout", "2000")
    wait_for_steps(process, run_dir, 2)
    up: dict[str, Any] = fleet(run_dir)
    assert {up["engine-0"].url, up["engine-1"].url} == {engine.url for engine in two_outside}
    two_outside[1].kill()
    wait_for_more_steps(process, run_dir)
    time.sleep(2.5)  # longer than three looks: else it would come back before it was missed
    two_outside[1].start(model[1])
    wait_until(process, started_again(run_dir, "engine-1", 1), "the engine is taken back")
    wait_for_more_steps(process, run_dir)
    process.send_signal(signal.SIGINT)
    done = finish(process, run_dir).check(130)
    engine = done.summary["engine"]
    assert (engine["kind"], engine["version"], engine["count"]) == ("embedded", "0.5.23+embedded", 2)
    assert engine["restarts"] == 0
    assert f"engine-1: {two_outside[1].url} is lost after 3 failed health checks in a row" in done.out
    assert f"engine-1: {two_outside[1].url} answers again" in done.out
    for engine in two_outside:
        assert engine.process is not None
        assert engine.process.poll() is None, "engines of somebody else outlive the run"
    assert not list((run_dir / "replicas").glob("engine-*.pid"))
    nothing_left(run_dir)


def test_the_helpers_of_this_file_see_what_is_left(tmp_path: Path) -> None:
    (tmp_path / "replicas").mkdir()
    (tmp_path / "replicas" / "me-0.pid").write_text(str(os.getpid()))
    with pytest.raises(AssertionError, match="me-0"):
        nothing_left(tmp_path, patience_s=0)
