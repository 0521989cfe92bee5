"""A Ray cluster of two hosts, which are namespaces of this machine: nothing is shared but the network and the code."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import SMALL, finish, made_model, start
from namespace_launcher import NamespacesRefused, OtherHost, hidden

from pipeline.observe.metrics import read_metrics

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install ray")

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

PORT = 6399
NODE = ("--num-cpus", "4", "--object-store-memory", str(80 << 20), "--block")


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[OtherHost]:
    """The head on this host, a second node on the other, with a token. Asked for `files`, they have them in common."""
    own = [Path("/dev/shm")] if getattr(request, "param", "") == "files" else hidden(tmp_path / "run")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    command = (sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start")
    try:
        host = OtherHost(*own).__enter__()
    except NamespacesRefused as refused:
        pytest.skip(f"this machine has no namespaces for a second host: {refused}")
    with contextlib.ExitStack() as stack:
        stack.callback(host.__exit__)
        at_head = f"--node-ip-address={host.here}", f"--port={PORT}", "--include-dashboard=false"
        head = started(stack, (*command, "--head", *at_head, *NODE), tmp_path / "head.log")
        until_up(head, tmp_path / "head.log")  # a node that finds nobody gives up
        there = f"--address={host.here}:{PORT}", f"--node-ip-address={host.there}", "--labels", "side=there"
        node = started(stack, host.inside((*command, *there, *NODE)), tmp_path / "node.log")
        until_up(node, tmp_path / "node.log")
        yield host


def started(stack: contextlib.ExitStack, command: tuple[str, ...], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    stack.callback(process.wait, 60)
    stack.callback(process.terminate)
    return process


def until_up(process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 90
    while b"Ray runtime started" not in log.read_bytes():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


def test_engines_generation_and_rewards_on_the_other_host(cluster: OtherHost, tmp_path: Path) -> None:
    flags = [*SMALL, *made_model(), "--num-rollout", "3", "--runner", "ray", "--ray-address", f"{cluster.here}:{PORT}"]
    flags += ["--ray-labels", "rollout=side:there", "cpu=side:there"]
    done = finish(start(tmp_path / "run", *flags), tmp_path / "run")
    assert done.code == 0, done.err[-3000:]
    done.check_books()
    assert f"serving at http://{cluster.there}:" in (tmp_path / "run" / "logs" / "engine-0.log").read_text()
    fetched = (tmp_path / "run" / "logs" / "engines-0.log").read_text()
    assert "version 1: fetched" in fetched
    assert f"bytes from tcp://{cluster.here}:" in fetched
    trace = {path.name.partition("-")[0] for path in (tmp_path / "run" / "trace").iterdir()}
    assert "train" in trace
    assert not trace & {"generate", "reward"}, "the run directory is the other host's own"


@pytest.mark.full
def test_the_quickstart_learns_with_engines_on_the_other_host(cluster: OtherHost, tmp_path: Path) -> None:
    flags = ["--mode", "async", "--num-rollout", "100", "--eval-interval", "50", "--runner", "ray"]
    flags += ["--ray-address", f"{cluster.here}:{PORT}", "--ray-labels", "rollout=side:there", "cpu=side:there"]
    done = finish(start(tmp_path / "run", *flags), tmp_path / "run", timeout_s=1500)
    assert done.code == 0, done.err[-3000:]
    done.check_books()
    scores = [row["eval/sums"] for row in read_metrics(done.run_dir / "metrics.jsonl") if "eval/sums" in row]
    assert scores[-1] >= scores[0] + 0.08, scores  # standard error of the difference: 0.03
    assert f"bytes from tcp://{cluster.here}:" in (tmp_path / "run" / "logs" / "engines-0.log").read_text()


@pytest.mark.full
@pytest.mark.parametrize("cluster", ["files"], indirect=True)
@pytest.mark.parametrize("backend", [["fsdp"], ["megatron", "--tensor-model-parallel-size", "2"]], ids=["fsdp", "tp2"])
def test_ranks_of_one_trainer_on_both_hosts(backend: list[str], cluster: OtherHost, tmp_path: Path) -> None:
    flags = [*SMALL, *made_model(), "--num-rollout", "3", "--runner", "ray", "--ray-address", f"{cluster.here}:{PORT}"]
    flags += ["--train-backend", *backend, "--actor-num-nodes", "2", "--train-device", "cpu", "--save-interval", "2"]
    done = finish(start(tmp_path / "run", *flags), tmp_path / "run")
    assert done.code == 0, done.err[-3000:]
    done.check_books()
    assert done.summary["groups"]["trained"] == 12
    numbers = {rank: (tmp_path / "run" / "replicas" / f"train-rank-{rank}.pid").read_text() for rank in (0, 1)}
    assert int(numbers[1]) < 2000, "a number of the other host, which has few processes"
    assert done.summary["restarts"] == {}
