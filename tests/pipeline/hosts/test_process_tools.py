"""What keeps servers: processes and their groups, ports, GPUs, last lines, the choice of a router."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import subprocess
import sys
import textwrap
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import msgspec
import pytest
from aiohttp import web
from fake_servers import Told, eventually
from hypothesis import given
from hypothesis import strategies as st
from launching import ROOT, alive

from configs.load import load
from configs.resolve import resolve
from models.engines.access_token import read_token
from models.engines.client import EngineClient
from models.engines.launch.command import Launch, with_token
from models.train.trainer_group.rank_spec import PeerGone
from models.weights.slot_directory import LEFT_BEHIND_FILE, torch_files
from pipeline.errors import ReplicaFailed, UsageError, leaf
from pipeline.facts.run_directory import RunDir
from pipeline.graph import threads
from pipeline.hosts import die_with_parent as die_with_parent
from pipeline.hosts import worker
from pipeline.hosts.launcher import ProcessSpec
from pipeline.hosts.local_launcher import LocalLauncher
from pipeline.hosts.machine import (
    PortInUse,
    ProcessState,
    cpu_seconds,
    held_port,
    interruptible,
    last_line,
    shared_memory_files,
    slices,
    visible_gpus,
)
from pipeline.hosts.rendezvous import Entry
from pipeline.hosts.worker import ReplicaSpec
from pipeline.supervise import restarts
from pipeline.supervise.auto_resume import WINDOW_S
from pipeline.supervise.health_probe import HealthTracker, HttpProbe, SchedulerProbe
from pipeline.supervise.restarts import Restarts, Supervision
from pipeline.supervise.runner import TaskRunner
from pipeline.supervise.servers import WeightFetchers
from stages.base import TrainOptions
from stages.engines.stage import END
from tests.other_programs import served_app
from transport import Node

# ------------------------------------------------------------------ processes, ports, GPUs


async def test_a_leashed_program_dies_with_its_parent(tmp_path: Path) -> None:
    parent = textwrap.dedent(f"""
        import os, subprocess, sys, time
        child = subprocess.Popen([sys.executable, {die_with_parent.__file__!r}, str(os.getpid()), "sleep", "600"])
        print(child.pid, flush=True)
        time.sleep(600)
    """)
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", parent, stdout=asyncio.subprocess.PIPE)
    child = int(await process.stdout.readline())
    await eventually(lambda: b"sleep" in Path(f"/proc/{child}/cmdline").read_bytes()[:6])
    process.kill()
    await process.wait()
    await eventually(lambda: not alive(child))


async def test_stopping_ends_what_ignores_it(rundir: RunDir) -> None:
    launcher = LocalLauncher(rundir)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); "
    deaf += "time.sleep(600)"
    process = await launcher.spawn(ProcessSpec("deaf", (sys.executable, "-c", deaf), grace_s=0.3))
    await eventually(lambda: "ready" in process.log.read_text())
    assert process.alive
    await launcher.stop_all()
    assert await process.wait() == -signal.SIGKILL
    assert not process.alive


async def test_a_killed_server_leaves_nothing_in_shared_memory(rundir: RunDir) -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("there is no /dev/shm")
    names = [Path(f"/dev/shm/{kind}sluice_test_{os.getpid()}") for kind in ("sglang_", "mine_")]
    script = f"""
        import mmap, time
        maps = []
        for name in {[str(name) for name in names]!r}:
            with open(name, "w+b") as file:
                file.truncate(4096)
                maps.append(mmap.mmap(file.fileno(), 4096))
        print("mapped", flush=True)
        time.sleep(600)
    """
    launcher = LocalLauncher(rundir)
    try:
        process = await launcher.spawn(ProcessSpec("one", (sys.executable, "-c", textwrap.dedent(script)), sweep=True))
        await eventually(lambda: "mapped" in process.log.read_text())
        assert shared_memory_files(process.pid) == {names[0]}
        for _ in range(2):
            process.remember_shared()
        assert (rundir.sockets / LEFT_BEHIND_FILE).read_text() == f"{names[0]}\n", "for whoever starts after a kill"
        assert await process.kill() == -signal.SIGKILL
        assert [name.exists() for name in names] == [False, True], "weights and what others made are left alone"
    finally:
        for name in names:
            name.unlink(missing_ok=True)


@pytest.mark.slow
async def test_what_torch_left_in_shared_memory_goes_when_a_killed_stage_starts_again(rundir: RunDir) -> None:
    script = """
        import time
        from models.weights.transfer import SharedBuffer
        buffer = SharedBuffer(4096)
        print("ready", flush=True)
        time.sleep(600)
    """
    launcher, spec = LocalLauncher(rundir), ProcessSpec("engines-0", (sys.executable, "-c", textwrap.dedent(script)))
    process = await launcher.spawn(spec)
    await eventually(lambda: "ready" in process.log.read_text())
    pattern = torch_files(process.pid)
    assert list(pattern.parent.glob(pattern.name)) != []
    assert (rundir.sockets / LEFT_BEHIND_FILE).read_text() == f"{pattern}\n"
    assert await process.kill() == -signal.SIGKILL
    assert list(pattern.parent.glob(pattern.name)) != [], "an engine may be about to open it"
    again = await launcher.spawn(spec)
    assert list(pattern.parent.glob(pattern.name)) == []
    await again.kill()


async def test_a_program_sees_its_gpus_and_few_threads_and_only_ours_find_the_project(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads sleep where they wait; what the user has set stays."""
    threads = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
    for name in threads:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KMP_BLOCKTIME", "7")
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    names = (*threads, "ONE", "CUDA_VISIBLE_DEVICES", "PYTHONPATH")
    tell = f"import os; print(*(os.environ.get(name) for name in {names!r}))"
    launcher, shown = LocalLauncher(rundir, 3), {}
    for ours in (True, False):
        spec = ProcessSpec(f"one-{ours}", (sys.executable, "-c", tell), {"ONE": "1"}, ("4", "GPU-5"), ours=ours)
        process = await launcher.spawn(spec)
        assert await process.wait() == 0
        shown[ours] = process.last_line()
    assert shown[False].endswith(" 1 4,GPU-5 elsewhere")
    assert shown[True].startswith(f"3 PASSIVE 1000 7 1 4,GPU-5 {ROOT}{os.pathsep}")


async def test_restarts_are_counted_within_a_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is lost now and then in weeks goes on; what keeps dying ends the run, and waits longer each time."""
    waits: list[float] = []

    async def wait(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", wait)
    reported, now = Told(), 0.0
    restarts = Restarts(reported, 2, clock=lambda: now)
    for _ in range(8):
        await restarts.again("reward", "reward-0", "signal SIGKILL", "", tmp_path)
        now += WINDOW_S / 2
    assert len(reported.events) == 8, "all are reported"
    assert waits == [0.2] + [0.4] * 7
    await restarts.again("reward", "reward-0", "signal SIGKILL", "", tmp_path)
    with pytest.raises(ReplicaFailed, match="reward-0 ended 3 times within 60 minutes"):
        await restarts.again("reward", "reward-0", "signal SIGKILL", "", tmp_path)
    assert len(reported.events) == 10, "the last loss is told too"


async def test_a_group_shows_what_is_stopped_and_how_much_it_computes(rundir: RunDir) -> None:
    launcher = LocalLauncher(rundir)
    process = await launcher.spawn(ProcessSpec("busy", (sys.executable, "-c", "while True: pass"), grace_s=0))
    try:
        before = process.state()
        if before is None:
            pytest.skip("there is no /proc")
        await eventually(lambda: (state := process.state()) is not None and state.cpu_s > 0.1)
        os.kill(process.pid, signal.SIGSTOP)
        await eventually(lambda: (state := process.state()) is not None and state.stopped != ())
        after = process.state()
        assert after.stopped[0].startswith(f"process {process.pid}")
    finally:
        await launcher.stop_all()


def test_a_held_port_is_given_only_to_the_server_that_names_it() -> None:
    with held_port() as port:
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("127.0.0.1", port))
            server.listen()
            with pytest.raises(PortInUse, match=f"port {port} of 127.0.0.1 cannot be used"), held_port(port):
                pass
        with held_port() as other:
            assert other != port


def test_the_last_line_are_those_of_the_error(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("OSError: of an earlier life\n")
    start = log.stat().st_size
    with log.open("a") as file:
        file.write(
            "[2026-11-21 15:13:21] Scheduler hit an exception\ntorch.OutOfMemoryError: CUDA out of memory\n\nKilled\n"
        )
    assert last_line(log, start, error=True) == "torch.OutOfMemoryError: CUDA out of memory"
    log.write_text(
        "[t] Subprocess scheduler_0 (pid=1) crashed with exit code -9. Triggering\nkill_process_tree called\n"
    )
    assert "crashed with exit code -9" in last_line(log, error=True)
    log.write_text("first\nreason: out of luck\n")
    assert last_line(log, error=True) == "out of luck"
    assert last_line(tmp_path / "none", error=True) == "no output"


def test_engines_get_the_gpus_behind_the_trainers() -> None:
    eight = [str(i) for i in range(8)]
    assert slices(eight, 3, 2, ["0"]) == (("1", "2"), ("3", "4"), ("5", "6"))
    assert slices(eight, 7, 1, ["3"]) == (("0",), ("1",), ("2",), ("4",), ("5",), ("6",), ("7",))
    assert slices(eight, 4, 2, ["0"]) == (("0", "1"), ("2", "3"), ("4", "5"), ("6", "7")), "shared with the trainer"
    assert slices(["GPU-a"], 1, 1, ["GPU-a"]) == (("GPU-a",),)
    assert slices([], 2, 1, []) == ((), ())
    with pytest.raises(UsageError, match="3 engines of 4 GPUs need 12, but 8 are visible; lower --rollout-num-gpus"):
        slices(eight, 3, 4, [])


def test_visible_gpus_are_those_of_the_environment_or_of_the_machine(tmp_path: Path) -> None:
    for name in ("nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == ("2", "10")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3, GPU-x"}, tmp_path) == ("3", "GPU-x")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "1,-1,2"}, tmp_path) == ("1",)
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == ()


def test_servers_of_others_get_their_token_and_show_it_nowhere(tmp_path: Path) -> None:
    """One in 64 begins with a sign that makes it look like an option, as this one."""
    (tmp_path / "gate.py").write_text("""
import argparse, logging, os, pathlib, sys
assert os.umask(0) == 0o077
try:
    import sglang.srt
except ImportError:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port")
    parser.add_argument("--api-key")
    read = parser.parse_args()
    print("hidden", __name__, read.port, read.api_key, "launch" in sys.path[0])
print(pathlib.Path("/proc/self/cmdline").read_text(), pathlib.Path("/proc/self/environ").read_text(), file=sys.stderr)
logging.basicConfig(stream=sys.stderr)
logging.warning("server_args=%s", {"api_key": read.api_key})
logging.warning("%d of them", "x")
""")
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "srt.py").touch()
    (tmp_path / "token").touch(mode=0o600)
    (tmp_path / "token").write_text("-" + secrets.token_urlsafe(32))
    token = read_token(tmp_path / "token")
    launch = with_token(Launch((sys.executable, "-m", "gate", "--port", "1"), {}, ""), token.path, hidden="sglang")
    done = subprocess.run(launch.argv, cwd=tmp_path, capture_output=True, text=True)
    key = token.token.text
    assert done.stdout.strip() == f"hidden __main__ 1 {key} False", done.stderr
    assert "WARNING:root:server_args={'api_key': 'hidden'}" in done.stderr
    assert "--port" in done.stderr
    assert key not in done.stderr


def test_what_ends_a_program_interrupts_the_controller_unless_it_is_ignored() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with interruptible():
            os.kill(os.getpid(), signal.SIGHUP)
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) == before[0]
    finally:
        signal.signal(signal.SIGHUP, before[1])


def test_a_run_may_open_as_many_files_as_its_user() -> None:
    script = "import resource; from pipeline.hosts.machine import raise_file_limit; "
    script += "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 500)); raise_file_limit(9); "
    script += "print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    messages = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert messages.stdout == "(500, 500)\n", messages.stderr
    script = script.replace("raise_file_limit(9)", "raise_file_limit(200)")  # of 72 files, and 4 for each process
    refused = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "is too low for this run, which needs 872: raise it" in refused.stderr


@pytest.mark.parametrize(
    ("flags", "mebibytes", "cores", "expected"),
    [
        ((), 1, 64, 2),  # small: two, however many there are
        ((), 40, 64, 10),  # one for each million parameters
        ((), 4000, 64, 32),  # trainer and engine share
        ((), 4000, 2, 1),
        (("--loss-type", "sft_loss"), 4000, 64, 64),  # a warm start has no engine
        (("--loss-type", "sft_loss"), 1, 2, 2),
        ((), 0, 64, 32),  # of the hub: its size is not known
    ],
)
def test_no_more_threads_than_the_model_is_worth(
    flags: tuple[str, ...], mebibytes: int, cores: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mebibytes:
        with (tmp_path / "model.safetensors").open("wb") as file:
            file.truncate(mebibytes << 20)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    loaded = load(["--hf-checkpoint", str(tmp_path), "--prompt-data", "arithmetic", "--num-rollout", "2", *flags])
    config = resolve(loaded.config, loaded.given)
    assert threads(config) == expected


async def test_a_silent_fetcher_is_ended_and_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "HANG_S", 1.0)
    codes, ended = [-9], asyncio.Event()

    async def wait() -> int:
        await ended.wait()
        return codes[-1]

    async def spawn(spec: ProcessSpec) -> Any:
        ended.clear()
        return MagicMock(wait=wait, kill=AsyncMock(side_effect=ended.set), log=Path("fetcher-0.log"), last_line=str)

    launcher = AsyncMock(controller="10.0.0.1", spawn=AsyncMock(side_effect=spawn))
    async with asyncio.timeout(120), Node("run", "controller") as node, asyncio.TaskGroup() as tasks:
        topic = await node.topic_server("inproc://silent-fetcher")
        spec = ReplicaSpec("fetcher", "fetcher-0", "", 0, 1, 1, str(tmp_path), {}, {})
        placement: Any = SimpleNamespace(rundir=SimpleNamespace(path=tmp_path), replica=lambda *_: spec)
        entry = Entry("run", topic.address)
        fetchers = WeightFetchers(Supervision(placement, topic, launcher, Restarts(Told(), 5), entry))
        fetchers.tasks = tasks
        assert fetchers.beside("engine-1", "10.0.0.2") == "fetcher-0"
        await eventually(lambda: launcher.spawn.await_count == 2)
        topic.publish(END, b"")
        codes.append(0)  # as after the end of the run
        ended.set()


# Looks at a server: how many in a row count, and what a scheduler that answers nothing may be doing.


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 5))
def test_an_engine_is_lost_after_n_faults_in_a_row_and_recovers_with_one_good_look(looks: list[bool], n: int) -> None:
    account = HealthTracker(n)
    for i, good in enumerate(looks):
        before = account.up
        change = account.saw(None if good else f"fault {i}")
        newest = looks[: i + 1][-n:]
        assert (change == "lost") == (before and len(newest) == n and not any(newest))
        assert (change == "recovered") == (good and not before)
        if change == "lost":
            assert f"fault {i}" in account.why
    faults_at_the_end = next((i for i, good in enumerate(reversed(looks)) if good), len(looks))
    assert account.up == (faults_at_the_end < n)


class Busy:
    """Processes that use this share of one core."""

    def __init__(self, share: float) -> None:
        self.share = share

    def state(self) -> ProcessState:
        return ProcessState((), self.share * asyncio.get_running_loop().time())


@pytest.mark.parametrize(("share", "healthy"), [(0.1, False), (0.3, True)])
async def test_a_scheduler_that_computes_is_no_dead_one(share: float, healthy: bool) -> None:
    """A long prefill answers nothing and is busy; one that hangs uses next to nothing."""

    over = asyncio.Event()

    async def healthily(_: web.Request) -> web.Response:
        return web.json_response({})

    async def at_the_end(_: web.Request) -> web.Response:
        await over.wait()
        return web.json_response({})

    app = web.Application()
    app.add_routes([web.get("/health", healthily), web.get("/server_info", at_the_end)])
    async with served_app(app) as url, EngineClient(url, connect_timeout_s=5.0) as client:
        first = HttpProbe(client, 0.5)
        look = SchedulerProbe(first, Busy(share), lambda: False)  # type: ignore[arg-type]
        well = await look() is None
        over.set()
    assert well is healthy


# CPU time of a process with its children, and idle cores, as a run's advice reads them.


SPINS = (
    "import time\nend = time.process_time() + 0.2\nwhile time.process_time() < end: pass\nprint(flush=True)\ninput()"
)


def test_the_time_of_children_counts() -> None:
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SPINS!r}])"
    child = subprocess.Popen([sys.executable, "-c", outer], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.readline()
    assert cpu_seconds(child.pid) >= 0.19
    child.communicate(b"\n")
    assert cpu_seconds(child.pid) == 0.0, "it has ended"


async def test_all_stages_of_a_process_use_the_run_directory_of_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    first, *others = (ReplicaSpec(name, f"{name}-0", "", 0, 1, 1, "/there", {}, {}) for name in ("a", "b", "c"))
    chain, config = msgspec.structs.replace(first, chained=tuple(others)), object()
    run = AsyncMock()
    monkeypatch.setattr(worker.rendezvous, "read", AsyncMock(return_value=(chain, config)))
    monkeypatch.setattr(worker.rendezvous, "settled", lambda topic, run_dir, config: nullcontext(("/here", config)))
    monkeypatch.setattr(worker, "run_replica", run)
    node = AsyncMock()
    await worker._run_replica_process(MagicMock(node=lambda name: nullcontext(node), topic=""), "a-0")
    assert run.await_args is not None
    assert [member.run_dir for member in run.await_args.args[0].members] == ["/here"] * 3


async def test_a_lost_rank_is_named_though_the_train_stage_sees_it_first(monkeypatch: pytest.MonkeyPatch) -> None:
    async def until_lost() -> None:
        await asyncio.sleep(0.05)
        raise ReplicaFailed("train-rank-1 ended with signal SIGKILL")

    runner = object.__new__(TaskRunner)
    runner.node, runner.topic, runner.config = AsyncMock(), MagicMock(), MagicMock()
    runner._ranks = MagicMock(until_lost=until_lost)
    monkeypatch.setattr("pipeline.supervise.runner.run_replica", AsyncMock(side_effect=PeerGone("the group was lost")))
    with pytest.raises(ExceptionGroup) as caught:
        await runner._supervise(ReplicaSpec("train", "train-0", "", 0, 1, 1, "", {}, {}, built_in=TrainOptions()))
    assert str(leaf(caught.value)) == "train-rank-1 ended with signal SIGKILL"
