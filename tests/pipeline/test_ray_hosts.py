"""A Ray cluster of two hosts, which are namespaces of this machine: nothing is shared but the network and the code."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import SIMULATED, SMALL, finish, made_model, start
from namespace_launcher import NamespacesRefused, OtherHost, hidden
from test_kill import steps_done, wait_for_steps, wait_until

from pipeline.observe.metrics import read_metrics

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install ray")

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

PORT = 6399
HEAD = "10.78.0.1"
COMMAND = (sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start")
NODE = ("--num-cpus", "4", "--object-store-memory", str(80 << 20), "--block")


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[OtherHost]:
    """The head on this host, a second node on the other, with a token. Asked for `files`, they have them in common; for
    `shared`, only the run directory and the model; for `power`, the head has an address that does not go with the other
    host."""
    own = [Path("/dev/shm")] if getattr(request, "param", "") == "files" else hidden(tmp_path / "run")
    shared: list[Path] = []
    if getattr(request, "param", "") == "shared":
        (tmp_path / "run").mkdir(0o700)
        shared = [tmp_path / "run", Path(made_model()[1])]
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    try:
        host = OtherHost(*own, shared=tuple(shared)).__enter__()
    except NamespacesRefused as refused:
        pytest.skip(f"this machine has no namespaces for a second host: {refused}")
    with contextlib.ExitStack() as stack:
        stack.callback(host.__exit__)
        head_at = host.here
        if getattr(request, "param", "") == "power":
            head_at = HEAD
            subprocess.run(("ip", "addr", "add", f"{HEAD}/32", "dev", "lo"), check=True)
            stack.callback(subprocess.run, ("ip", "addr", "del", f"{HEAD}/32", "dev", "lo"), check=True)
        at_head = f"--node-ip-address={head_at}", f"--port={PORT}", "--include-dashboard=false"
        head = started(stack, (*COMMAND, "--head", *at_head, *NODE), tmp_path / "head.log")
        until_up(head, tmp_path / "head.log")  # a node that finds nobody gives up
        join(stack, host, head_at, tmp_path / "node.log")
        yield host


def join(stack: contextlib.ExitStack, host: OtherHost, head: str, log: Path) -> None:
    """A node on another host joins the cluster."""
    there = f"--address={head}:{PORT}", f"--node-ip-address={host.there}", "--labels", "side=there"
    until_up(started(stack, host.inside((*COMMAND, *there, *NODE)), log), log)


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


@pytest.mark.full
@pytest.mark.parametrize("cluster", ["shared"], indirect=True)
def test_all_but_the_controller_on_the_other_host_where_the_trainer_is_killed(
    cluster: OtherHost, tmp_path: Path
) -> None:
    """One of two engines is on the controller's node, whose weights come from the trainer's. What is not shared is a
    private run directory of the other host."""
    flags = [*SMALL, *made_model(), *SIMULATED, "--runner", "ray", "--ray-address", f"{cluster.here}:{PORT}"]
    flags += ["--ray-labels", "train=side:there", "cpu=side:there"]
    run_dir, unseen = tmp_path / "run", tmp_path / "unseen"
    refused = finish(start(unseen, *flags), unseen)
    assert refused.code == 2, refused.err
    assert (
        f"train-0 is to run on node {cluster.there}, which does not see the controller's run directory {unseen}; put"
        in (refused.err)
    )
    flags += ["--num-rollout", "8", "--save-interval", "1", "--scale", "engine=2", "--ray-placement", "spread"]
    process = start(run_dir, *flags)
    wait_for_steps(process, run_dir, 2)
    trainer = (run_dir / "replicas" / "train-0.pid").read_text()
    subprocess.run(cluster.inside(("/bin/kill", "-9", trainer)), check=True)
    done = finish(process, run_dir)
    assert done.code == 0, done.err[-3000:]
    done.check_books()
    assert (done.summary["groups"]["trained"], done.summary["restarts"]) == (32, {"train-0": 1})
    assert f"train-0: placed on {cluster.there}" in done.out

    def log(name: str) -> str:
        return (run_dir / "logs" / f"{name}.log").read_text()

    at = {host: f"serving at http://{host}:" for host in (cluster.here, cluster.there)}
    assert sorted(host for host in at for n in (0, 1) if at[host] in log(f"engine-{n}")) == [
        cluster.here,
        cluster.there,
    ]
    fetched = re.findall(r"version \d+: fetched \d+ bytes from tcp://(\S+):\d+", log("engines-0"))
    assert set(fetched) == {cluster.there}
    assert "fetched" not in log("fetcher-0"), "the slots are on its own host"
    trace = {path.name.partition("-")[0] for path in (run_dir / "trace").iterdir()}
    assert "train" in trace
    assert not trace & {"generate", "reward"}, "the run directory is the other host's own"


@pytest.mark.full
@pytest.mark.parametrize("cluster", ["power"], indirect=True)
def test_a_node_is_gone_in_the_middle_of_a_run_and_another_joins(cluster: OtherHost, tmp_path: Path) -> None:
    """As when the power is cut: nobody says good-bye. One of two engines and the other stages were there."""
    flags = [*SMALL, *made_model(), *SIMULATED, "--num-rollout", "4000", "--scale", "engine=2", "--runner", "ray"]
    flags += ["--ray-address", f"{HEAD}:{PORT}", "--ray-placement", "spread", "--ray-cpus", "rollout=2"]
    flags += ["--ray-labels", "cpu=side:there|side:!there", "--simulated-step-s", "0.5", "--log-interval", "50"]
    run_dir = tmp_path / "run"

    def log(name: str) -> str:
        path = run_dir / "logs" / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def fetched(name: str) -> list[str]:
        return re.findall(r"version (\d+): fetched", log(name))

    def more_steps(count: int) -> None:
        wait_for_steps(process, run_dir, steps_done(run_dir) + count)

    process = start(run_dir, *flags)
    with contextlib.ExitStack() as stack:
        try:
            wait_for_steps(process, run_dir, 2)
            [lost] = [name for name in ("engine-0", "engine-1") if f"serving at http://{cluster.there}:" in log(name)]
            wait_until(process, lambda: len(fetched("fetcher-0")) > 1, "weights on the other node")
            cluster.__exit__()
            for name in (lost, "reward-0", "generate-0", "group-0"):
                gone = f"the Ray actor of {name} is gone"
                wait_until(process, lambda name=name, gone=gone: gone in log(name), gone)  # type: ignore[misc]
            more_steps(3)
            other = stack.enter_context(OtherHost(*hidden(run_dir)))
            join(stack, other, HEAD, tmp_path / "other.log")
            wait_until(process, lambda: f"serving at http://{other.there}:" in log(lost), "the engine on the new node")
            wait_until(process, lambda: len(fetched("fetcher-1")) > 1, "its weights there, and newer ones")
            more_steps(3)
        finally:
            process.send_signal(signal.SIGINT)
            done = finish(process, run_dir)
    assert done.code == 130, done.err[-3000:]
    done.check_books()
    assert done.out.count(f"{lost}: no node has room for it (it needs 2 CPU, and free are") == 1, done.out
    assert "; 1 of its kind goes on. It is placed as soon as a node joins" in done.out
    assert f"{lost}: placed on {other.there}" in done.out
    assert done.summary["groups"]["failed"] == 0


@pytest.mark.full
def test_the_quickstart_learns_with_engines_on_the_other_host(cluster: OtherHost, tmp_path: Path) -> None:
    flags = ["--mode", "async", "--num-rollout", "100", "--eval-interval", "50", "--runner", "ray"]
    flags += ["--ray-address", f"{cluster.here}:{PORT}", "--ray-labels", "rollout=side:there", "cpu=side:there"]
    done = finish(start(tmp_path / "run", *flags), tmp_path / "run", timeout_s=1500)
    assert done.code == 0, done.err[-3000:]
    done.check_books()
    scores = [row["eval/sums"] for row in read_metrics(done.run_dir / "metrics.jsonl") if "eval/sums" in row]
    assert scores[-1] >= scores[0] + 0.08, scores  # standard error of the difference: 0.03
    assert f"bytes from tcp://{cluster.here}:" in (tmp_path / "run" / "logs" / "fetcher-0.log").read_text()


@pytest.mark.full
@pytest.mark.parametrize("cluster", ["files"], indirect=True)
@pytest.mark.parametrize(
    "layout",
    [
        ["fsdp", "--actor-num-nodes", "2"],
        ["megatron", "--actor-num-nodes", "2", "--tensor-model-parallel-size", "2"],
        ["fsdp", "--actor-num-gpus-per-node", "2", "--ray-labels", "train=side:there"],
    ],
    ids=["fsdp", "tp2", "fsdp-there"],
)
def test_ranks_of_one_trainer_on_both_hosts_or_the_other(layout: list[str], cluster: OtherHost, tmp_path: Path) -> None:
    flags = [*SMALL, *made_model(), "--num-rollout", "3", "--runner", "ray", "--ray-address", f"{cluster.here}:{PORT}"]
    flags += ["--train-backend", *layout, "--train-device", "cpu", "--save-interval", "2"]
    done = finish(start(tmp_path / "run", *flags), tmp_path / "run")
    assert done.code == 0, done.err[-3000:]
    done.check_books()
    assert done.summary["groups"]["trained"] == 12
    there = ["rank-1"] if "--actor-num-nodes" in layout else ["0", "rank-0", "rank-1"]
    numbers = [int((tmp_path / "run" / "replicas" / f"train-{one}.pid").read_text()) for one in there]
    assert max(numbers) < 2000, "numbers of the other host, which has few processes"
    assert done.summary["restarts"] == {}
