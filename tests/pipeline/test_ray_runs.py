"""Whole runs with `--runner ray` on this machine: the same batches, deaths of every kind, nodes by their labels."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from launching import SIMULATED, SMALL, alive, finish, made_model, start, succeed_here
from scripted_run import Scripted, scripted
from test_kill import pids, wait_for_steps

import launch as program
from configs.load import load
from pipeline.errors import UsageError
from pipeline.facts.run_directory import RunDir
from pipeline.hosts.launcher import ProcessSpec
from pipeline.hosts.ray.cluster import nodes
from pipeline.hosts.ray.launcher import RayLauncher
from pipeline.hosts.ray.placement import RayPlacement

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install ray")

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]  # one cluster at a time

RAY = ("--runner", "ray")


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def launcher(run: Scripted) -> RayLauncher:
    assert isinstance(run.runner.launcher, RayLauncher)
    return run.runner.launcher


def until(met: Callable[[], bool], what: str, limit_s: float = 60) -> None:
    deadline = time.monotonic() + limit_s
    while not met():
        assert time.monotonic() < deadline, f"not within {limit_s:g} s: {what}"
        time.sleep(0.05)


@pytest.mark.full
def test_the_same_batches_are_trained_as_without_ray(tmp_path: Path) -> None:
    flags = [*SMALL, *made_model(), "--mode", "sync", "--deterministic", "--num-rollout", "3"]
    alone = succeed_here(tmp_path / "alone", *flags)
    done = finish(start(tmp_path / "run", *flags, *RAY), tmp_path / "run")
    assert done.code == 0, done.err[-3000:]
    done.check_books()
    assert done.audit.batches == alone.audit.batches
    assert "ray: " in done.err
    assert "serving at http://" in (tmp_path / "run" / "logs" / "engine-0.log").read_text()
    assert not any(alive(pid) for pid in pids(tmp_path / "run", "train-0", "engine-0", "generate-0", "reward-0"))


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
    assert set(run.runner._restarts.counts) == {"generate-0", "reward-0", "engine-0"}
    assert "the Ray actor of reward-0 is gone: " in (tmp_path / "run" / "logs" / "reward-0.log").read_text()
    assert not ray.is_initialized()


@pytest.mark.full
def test_nothing_outlives_a_killed_controller(tmp_path: Path) -> None:
    flags = [*SMALL, *made_model(), *SIMULATED, *RAY, "--num-rollout", "4000"]
    process = start(tmp_path / "run", *flags)
    wait_for_steps(process, tmp_path / "run", 1)
    children = pids(tmp_path / "run", "train-0", "engine-0", "engines-0", "generate-0", "reward-0", "group-0")
    family = [*children, *map(parent, children)]
    assert all(map(alive, family))
    process.kill()
    process.communicate()
    until(lambda: not any(map(alive, family)), "the end of all processes")


@contextlib.contextmanager
def four_nodes() -> Iterator[None]:
    """A cluster of logical nodes: the controller's, one for training, a spot and an on-demand one for rollouts."""
    from ray.cluster_utils import Cluster

    small = {"num_cpus": 2, "object_store_memory": 80 << 20}
    labels = [{}, {"pool": "cpu"}, {"market": "spot"}, {"market": "on-demand"}]
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

    with four_nodes():
        asyncio.run(script())
