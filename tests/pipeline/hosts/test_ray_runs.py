"""Whole runs with `--runner ray` on this machine: the same batches, deaths of every kind, nodes by their labels."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
from launching import SIMULATED, SMALL, alive, finish, launch, made_model, start, succeed, succeed_here
from namespace_launcher import NamespacesRefused, OtherHost, hidden
from scripted_run import Scripted, scripted
from test_evaluation_engines import HELD, check_slow, evaluated, requests, slow_evaluation
from test_kill import kill_and_await, pids, steps_done, wait_for_steps, wait_until
from test_runs import RANKS

import launch as program
from configs.load import load
from pipeline.control.client import ask
from pipeline.control.endpoint import Status
from pipeline.errors import UsageError
from pipeline.facts.run_directory import RunDir
from pipeline.hosts.launcher import ProcessSpec
from pipeline.hosts.ray.cluster import nodes
from pipeline.hosts.ray.launcher import RayLauncher
from pipeline.hosts.ray.placement import RayPlacement
from pipeline.record.metrics import read_metrics

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install ray")

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]  # one cluster at a time

RAY = ("--runner", "ray")


def parent(pid: int) -> int:
    return psutil.Process(pid).ppid()


def launcher(run: Scripted) -> RayLauncher:
    assert isinstance(run.runner.launcher, RayLauncher)
    return run.runner.launcher


@pytest.mark.full
def test_the_same_batches_are_trained_as_without_ray(tmp_path: Path) -> None:
    flags = [*SMALL, *made_model(), "--mode", "sync", "--deterministic", "--num-rollout", "3"]
    alone = succeed_here(tmp_path / "alone", *flags)
    done = succeed(tmp_path / "run", *flags, *RAY)
    assert done.audit.batches == alone.audit.batches
    assert "ray: " in done.err
    assert "serving at http://" in (tmp_path / "run" / "logs" / "engine-0.log").read_text()
    assert not any(alive(pid) for pid in pids(tmp_path / "run", "train-0", "engine-0", "generate-0"))


def test_a_killed_process_and_a_killed_actor_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def script(run: Scripted) -> None:
        await run.steps(2)
        run.kill("generate-0", signal.SIGKILL)
        await run.steps(2)
        reward = pids(tmp_path / "run", "reward-0")[0]
        engine = pids(tmp_path / "run", "engine-0")[0]
        for child in (reward, engine):
            os.kill(parent(child), signal.SIGKILL)
        await run.until(lambda: not alive(reward) and not alive(engine))
        await run.until(lambda: pids(tmp_path / "run", "reward-0", "engine-0") != [reward, engine])
        run.runner.scale("engine", 2)
        await run.until((tmp_path / "run" / "replicas" / "engine-1.pid").exists)
        await run.until(lambda: (tmp_path / "run" / "logs" / "engine-1.log").read_text().count("serving at") == 1)
        run.runner.scale("engine", 1)
        await run.until(lambda: "engine-1" not in launcher(run)._placed)
        assert not alive(pids(tmp_path / "run", "engine-1")[0])
        spare = os.cpu_count() or 1  # of a cluster of our own; Ray tells a little later what is free
        await run.until(lambda: sum(node.free["CPU"] for node in nodes()) >= spare)
        for number in range(2, 2 + spare):
            launcher(run).expect(f"engine-{number}")
        with pytest.raises(UsageError, match="there is no room for engine-99: it needs 1 CPU, and free are"):
            launcher(run).expect("engine-99")
        await run.steps(3)

    flags = [*SMALL, *made_model(), *SIMULATED, *RAY, "--num-rollout", "4000"]
    run = scripted(monkeypatch, tmp_path / "run", script, lambda place: program.main(["--run-dir", str(place), *flags]))
    assert set(run.controller.recorder.restarts) == {"generate-0", "reward-0", "engine-0"}
    assert "the Ray actor of reward-0 is gone: " in (tmp_path / "run" / "logs" / "reward-0.log").read_text()
    assert not ray.is_initialized()


@pytest.mark.full
def test_nothing_outlives_a_killed_controller(tmp_path: Path) -> None:
    flags = [*SMALL, *made_model(), *SIMULATED, *RAY, "--num-rollout", "4000"]
    process = start(tmp_path / "run", *flags)
    wait_for_steps(process, tmp_path / "run", 1)
    children = pids(tmp_path / "run", "train-0", "engine-0", "engines-0", "generate-0")
    family = [*children, *map(parent, children)]
    assert all(map(alive, family))
    process.kill()
    process.communicate()
    wait_until(None, lambda: not any(map(alive, family)), "the end of all processes")


@contextlib.contextmanager
def logical_nodes(*labels: dict[str, str], cpus: int = 2, gpus: int = 0) -> Iterator[None]:
    """A cluster of them, the first of which is the controller's."""
    from ray.cluster_utils import Cluster

    small = {"num_cpus": cpus, "num_gpus": gpus, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**small, "labels": labels[0], "include_dashboard": False})
    try:
        for node in labels[1:]:
            cluster.add_node(**small, labels=node)
        ray.init(cluster.address, log_to_driver=False, logging_level="warning")
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.full
def test_processes_go_to_nodes_by_their_labels(tmp_path: Path) -> None:
    flags = ["--scale", "engine=2", "--ray-labels", "rollout=market:spot|market:on-demand", "cpu=pool:cpu"]
    config = load([*SMALL, *RAY, *flags]).config
    sleep = (sys.executable, "-c", "print('here', flush=True); import time; time.sleep(1000)")

    async def script() -> None:
        # Two engines together need both CPUs of a node: the trainer's has only one left.
        with RunDir(tmp_path / "run").open(resume=False) as rundir:
            launcher = RayLauncher(RayPlacement(config, gpus=False), nodes, rundir)
            names = ["train-0", "engine-0", "engine-1", "engines-0", "reward-0"]
            try:
                handles = [await launcher.spawn(ProcessSpec(name, sleep, grace_s=0)) for name in names]
                market = {node.id: node.labels.get("market") or node.labels.get("pool") for node in nodes()}
                where = {name: market[launcher._placed[name].node] for name in names}
                assert where == {
                    "train-0": None, "engine-0": "spot", "engine-1": "spot", "engines-0": None, "reward-0": "cpu",
                }  # fmt: skip
                other = RayPlacement(
                    msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, scale={})), gpus=False
                )
                second = RayLauncher(other, nodes, rundir)  # of another run: no spot node has room
                await second.place("engine-0")
                assert market[second._placed["engine-0"].node] == "on-demand"
                await second.stop_all()
            finally:
                await launcher.stop_all()
            assert [handle.alive for handle in handles] == [False] * 5
            assert all(handle.last_line() == "here" for handle in handles)

    with logical_nodes({}, {"pool": "cpu"}, {"market": "spot"}, {"market": "on-demand"}):
        asyncio.run(script())


@pytest.mark.full
def test_an_engine_of_two_gpus_has_those_of_two_ranks_on_their_node(tmp_path: Path) -> None:
    flags = ["--mode", "sync", "--colocate", "--engine", "sglang", "--rollout-num-gpus-per-engine", "2"]
    flags += ["--rollout-num-gpus", "4", "--train-backend", "fsdp", "--actor-num-nodes", "2"]
    config = load([*SMALL, *RAY, *flags, "--actor-num-gpus-per-node", "2"]).config
    tell = (sys.executable, "-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])")
    ranks, names = [f"train-rank-{rank}" for rank in range(4)], ["engine-0", "engine-1"]

    async def script() -> None:
        with RunDir(tmp_path / "run").open(resume=False) as rundir:
            launcher = RayLauncher(RayPlacement(config, gpus=True), nodes, rundir)

            async def told(name: str) -> str:
                handle = await launcher.spawn(ProcessSpec(name, tell))
                assert await handle.wait() == 0
                return handle.last_line()

            try:
                seen = await asyncio.gather(*map(told, (*names, *ranks)))
            finally:
                places = [launcher._placed[name].node for name in (*names, *ranks)]
                await launcher.stop_all()
        one, other, *gpus = seen
        assert (sorted(gpus[:2]), sorted(gpus[2:])) == (["0", "1"], ["0", "1"])
        assert (one, other) == (f"{gpus[0]},{gpus[1]}", f"{gpus[2]},{gpus[3]}")
        assert places[2:] == [places[0], places[0], places[1], places[1]]
        assert places[0] != places[1]

    with logical_nodes({}, {}, cpus=4, gpus=2):
        asyncio.run(script())


# Trainer and engines that take turns on the GPUs of one node: Ray counts them, nothing uses them.


def visible(run_dir: Path, name: str) -> str:
    """The GPUs that a process of a run sees."""
    variables = psutil.Process(*pids(run_dir, name)).environ()
    return variables["CUDA_VISIBLE_DEVICES"]


@pytest.mark.full
def test_engines_take_turns_with_the_ranks_whose_gpus_they_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trained is what a run without Ray trains, though an engine's actor is killed; a killed rank ends the run, which
    is continued."""
    run_dir = tmp_path / "run"
    flags = [*SMALL, *made_model(), *RANKS, "--colocate", "--scale", "engine=2", "--save-interval", "2"]
    flags += ["--num-rollout", "20"]
    names = "engine-0", "engine-1", "train-rank-0", "train-rank-1"
    alone = succeed(tmp_path / "alone", *flags)
    with_a_token(monkeypatch)
    with contextlib.ExitStack() as stack:
        at = "--node-ip-address=127.0.0.1", f"--port={PORT}", "--include-dashboard=false", "--num-gpus=2"
        head = started(stack, (*COMMAND, "--head", *at, *NODE), tmp_path / "head.log")
        until_up(head, tmp_path / "head.log")
        flags += ["--runner", "ray", "--ray-address", f"127.0.0.1:{PORT}"]
        process = start(run_dir, *flags)
        wait_for_steps(process, run_dir, 2)
        assert [visible(run_dir, name) for name in names] == ["0", "1", "0", "1"]
        old = pids(run_dir, "engine-1")
        os.kill(parent(*old), signal.SIGKILL)
        wait_until(process, lambda: pids(run_dir, "engine-1") != old, "another engine")
        wait_for_steps(process, run_dir, steps_done(run_dir) + 2)
        assert visible(run_dir, "engine-1") == "1"
        every = pids(run_dir, *names, "train-0", "engines-0", "generate-0")
        os.kill(*pids(run_dir, "train-rank-1"), signal.SIGKILL)
        killed = finish(process, run_dir)
        assert "train-0 ended with signal SIGKILL of train-rank-1; continue from the last checkpoint" in killed.err
        assert (killed.code, [pid for pid in every if alive(pid)]) == (6, [])
        done = finish(start(None, "--resume", str(run_dir)), run_dir).check()
    assert done.audit.batches == alone.audit.batches
    assert weights_of(run_dir, 20) == weights_of(alone.run_dir, 20)


def weights_of(run_dir: Path, step: int) -> bytes:
    (file,) = (run_dir / "checkpoints" / f"step-{step:08}" / "hf").glob("*.safetensors")
    return file.read_bytes()


# A Ray cluster of two hosts, which are namespaces of this machine: nothing is shared but the network and the code.


PORT = 6399
HEAD = "10.78.0.1"
COMMAND = (sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start")
NODE = ("--num-cpus", "4", "--object-store-memory", str(80 << 20), "--block")


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[OtherHost]:
    """The head on this host, a second node on the other, with a token. Asked for `files`, they have them in common; for
    `gpus`, as well, and each node counts one GPU; for `shared`, only the run directory and the model; for `power`, the
    head has an address that does not go with the other host."""
    own = [Path("/dev/shm")] if getattr(request, "param", "") in ("files", "gpus") else hidden(tmp_path / "run")
    gpus = f"--num-gpus={int(getattr(request, 'param', '') == 'gpus')}"
    shared: list[Path] = []
    if getattr(request, "param", "") == "shared":
        (tmp_path / "run").mkdir(0o700)
        shared = [tmp_path / "run", Path(made_model()[1])]
    with_a_token(monkeypatch)
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
        head = started(stack, (*COMMAND, "--head", *at_head, *NODE, gpus), tmp_path / "head.log")
        until_up(head, tmp_path / "head.log")  # a node that finds nobody gives up
        join(stack, host, head_at, tmp_path / "node.log", gpus)
        yield host


def with_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")


def join(stack: contextlib.ExitStack, host: OtherHost, head: str, log: Path, gpus: str = "--num-gpus=0") -> None:
    """A node on another host joins the cluster."""
    there = f"--address={head}:{PORT}", f"--node-ip-address={host.there}", "--labels", "side=there"
    until_up(started(stack, host.inside((*COMMAND, *there, *NODE, gpus)), log), log)


def started(stack: contextlib.ExitStack, command: tuple[str, ...], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    stack.callback(process.wait, 60)
    stack.callback(process.terminate)
    return process


def until_up(process: subprocess.Popen[bytes], log: Path) -> None:
    wait_until(process, lambda: b"Ray runtime started" in log.read_bytes(), f"Ray is up, see {log}")


@pytest.mark.full
@pytest.mark.parametrize("cluster", ["shared"], indirect=True)
def test_all_but_the_controller_on_the_other_host_where_the_trainer_is_killed(
    cluster: OtherHost, tmp_path: Path
) -> None:
    """One of two engines is on the controller's node, whose weights come from the trainer's. What is not shared is a
    private run directory of the other host."""
    flags = [*SMALL, *made_model(), *SIMULATED, "--runner", "ray", "--ray-address", f"{cluster.here}:{PORT}"]
    plain = finish(start(tmp_path / "plain", *flags), tmp_path / "plain")
    assert (plain.code, "2 nodes, and requests to engines cross its network as plain HTTP" in plain.err) == (2, True)
    flags += ["--allow-plain-engines", "--ray-labels", "train=side:there", "cpu=side:there"]
    run_dir, unseen = tmp_path / "run", tmp_path / "unseen"
    refused = finish(start(unseen, *flags), unseen)
    assert refused.code == 2, refused.err
    why = f"train-0 is to run on node {cluster.there}, which does not see the controller's run directory {unseen}; put"
    assert why in refused.err
    flags += ["--num-rollout", "8", "--save-interval", "1", "--scale", "engine=2", "--ray-placement", "spread"]
    process = start(run_dir, *flags)
    wait_for_steps(process, run_dir, 2)
    subprocess.run(cluster.inside(("/bin/kill", "-9", str(pids(run_dir, "train-0")[0]))), check=True)
    done = finish(process, run_dir).check()
    assert (done.summary["groups"]["trained"], done.summary["restarts"]) == (32, {"train-0": 1})
    assert f"train-0: placed on {cluster.there}" in done.out

    def log(name: str) -> str:
        return (run_dir / "logs" / f"{name}.log").read_text()

    at = {host: f"serving at http://{host}:" for host in (cluster.here, cluster.there)}
    where = sorted(host for host in at for n in (0, 1) if at[host] in log(f"engine-{n}"))
    assert where == [cluster.here, cluster.there]
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
    flags += ["--allow-plain-engines", "--ray-address", f"{HEAD}:{PORT}", "--ray-placement", "spread"]
    flags += ["--ray-cpus", "rollout=2"]
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
            for name in (lost, "generate-0"):  # whose process has reward and group too
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
    done.check(130)
    assert done.out.count(f"{lost}: no node has room for it (it needs 2 CPU, and free are") == 1, done.out
    assert "; 1 of its kind goes on. It is placed as soon as a node joins" in done.out
    assert f"{lost}: placed on {other.there}" in done.out
    assert done.summary["groups"]["failed"] == 0


@pytest.mark.full
@pytest.mark.parametrize("cluster", ["files"], indirect=True)
def test_an_engine_of_evaluations_on_the_other_host_has_the_rows_of_a_run_without_ray(
    cluster: OtherHost, tmp_path: Path
) -> None:
    """Other weights than its own reach that host as differences, in a directory that both see."""
    flags = [*SMALL, *made_model(), *HELD, "--mode", "sync", "--deterministic", "--eval-engines", "1"]
    succeed_here(tmp_path / "alone", *flags)
    flags += ["--runner", "ray", "--ray-address", f"{cluster.here}:{PORT}", "--allow-plain-engines"]
    flags += ["--update-weight-transport", "delta", "--update-weight-delta-dir", str(tmp_path / "weights")]
    done = succeed(tmp_path / "run", *flags, "--ray-labels", "rollout=side:there", "cpu=side:!there")
    alone, rows = evaluated(tmp_path / "alone"), evaluated(tmp_path / "run")
    assert {0, 4} <= set(rows), "the version between may find the first one's evaluation under way"
    common = rows.keys() & alone.keys()
    assert {version: rows[version] for version in common} == {version: alone[version] for version in common}
    assert all(row["eval/complete"] == 1 for row in rows.values())
    assert f"serving at http://{cluster.there}:" in (done.run_dir / "logs" / "eval-engine-0.log").read_text()
    assert {detail.split(",")[0] for detail in requests(done.run_dir, evaluation=True)} == {"eval-engine-0"}


@pytest.mark.full
def test_a_killed_engine_of_an_evaluation_fetches_its_version_again_though_both_slots_hold_later_ones(
    cluster: OtherHost, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    process = slow_evaluation(
        run_dir, "--eval-engines", "1", "--runner", "ray", "--ray-address", f"{cluster.here}:{PORT}",
        "--allow-plain-engines", "--ray-labels", "rollout=side:there",
    )  # fmt: skip
    wait_for_steps(process, run_dir, 5)
    assert not evaluated(run_dir)
    engines = {engine.name: engine.version for engine in ask(run_dir, Status()).status.engines}
    assert engines["eval-engine-0"] == 0
    assert engines["engine-0"] > 2
    old = pids(run_dir, "eval-engine-0")
    subprocess.run(cluster.inside(("/bin/kill", "-9", str(old[0]))), check=True)
    wait_until(process, lambda: pids(run_dir, "eval-engine-0") != old, "another engine")
    wait_for_steps(process, run_dir, steps_done(run_dir) + 3)
    done = finish(process, run_dir).check()
    check_slow(done)
    assert done.summary["restarts"] == {"eval-engine-0": 1}
    versions = re.findall(r"version (\d+): fetched [1-9]", (run_dir / "logs" / "fetcher-0.log").read_text())
    assert versions.count("0") >= 2, versions


@pytest.mark.full
@pytest.mark.parametrize("cluster", ["shared"], indirect=True)
def test_an_evaluation_whose_weights_went_with_a_trainer_on_the_other_host_is_given_up(
    cluster: OtherHost, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    process = slow_evaluation(
        run_dir, "--eval-engines", "1", "engine.simulated.a_ms=30", "--runner", "ray", "--allow-plain-engines",
        "--ray-address", f"{cluster.here}:{PORT}",
        "--ray-labels", "train=side:there", "rollout=side:!there", "cpu=side:!there", prompts=256,
    )  # fmt: skip
    wait_for_steps(process, run_dir, 3)
    subprocess.run(cluster.inside(("/bin/kill", "-9", str(pids(run_dir, "train-0")[0]))), check=True)
    wait_for_steps(process, run_dir, steps_done(run_dir) + 2)
    assert not evaluated(run_dir)
    kill_and_await(process, run_dir, "eval-engine-0")
    done = finish(process, run_dir).check()
    rows = evaluated(run_dir)
    assert (rows[0]["eval/complete"], rows[60]["eval/complete"]) == (0, 1)
    assert done.summary["restarts"] == {"train-0": 1, "eval-engine-0": 1}
    assert "failed" not in (run_dir / "logs" / "engines-0.log").read_text(), "it asks for nothing that is not kept"


@pytest.mark.full
def test_the_quickstart_learns_with_engines_on_the_other_host(cluster: OtherHost, tmp_path: Path) -> None:
    flags = ["--mode", "async", "--num-rollout", "100", "--eval-interval", "50", "--runner", "ray"]
    flags += ["--ray-address", f"{cluster.here}:{PORT}", "--ray-labels", "rollout=side:there", "cpu=side:there"]
    flags.append("--allow-plain-engines")
    done = launch(tmp_path / "run", *flags, timeout_s=1500).check()
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
    flags += ["--train-backend", *layout, "--train-device", "cpu", "--save-interval", "2", "--allow-plain-engines"]
    done = succeed(tmp_path / "run", *flags)
    assert done.summary["groups"]["trained"] == 12
    there = ["rank-1"] if "--actor-num-nodes" in layout else ["0", "rank-0", "rank-1"]
    numbers = pids(tmp_path / "run", *(f"train-{one}" for one in there))
    assert max(numbers) < 2000, "numbers of the other host, which has few processes"
    assert done.summary["restarts"] == {}


@pytest.mark.full
@pytest.mark.parametrize("cluster", ["gpus"], indirect=True)
def test_each_of_two_hosts_has_a_rank_and_the_engine_that_takes_turns_with_it(
    cluster: OtherHost, tmp_path: Path
) -> None:
    shared = [*SMALL, *made_model(), "--mode", "sync", "--deterministic", "--train-backend", "fsdp", "--colocate"]
    shared += ["--scale", "engine=2"]
    alone = succeed(tmp_path / "alone", *shared, "--actor-num-gpus-per-node", "2")
    there = ["--runner", "ray", "--ray-address", f"{cluster.here}:{PORT}", "--allow-plain-engines"]
    done = succeed(tmp_path / "run", *shared, "--actor-num-nodes", "2", *there)
    assert done.audit.batches == alone.audit.batches
    assert weights_of(done.run_dir, 4) == weights_of(alone.run_dir, 4)
    for number, host in enumerate((cluster.here, cluster.there)):
        assert f"serving at http://{host}:" in (done.run_dir / "logs" / f"engine-{number}.log").read_text()
