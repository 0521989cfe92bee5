"""Engines, generation and rewards on another host: nothing is shared with it but the network."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from launching import SIMULATED, SMALL, finish, made_model, start, succeed_here
from namespace_launcher import THERE, NamespaceLauncher, NamespacesRefused, OtherHost, hidden
from scripted_run import Scripted, scripted
from test_kill import kill, steps_done, wait_for_steps

import launch as program
import pipeline.run
from pipeline.hosts.weights_source import SOURCE, WeightsServer
from pipeline.record.journal import Audit, audit
from stages.messages import RolloutSlice
from transport import AddressRefused, LinkError, LinkRefused, Node
from transport.security import create_keys, load_security

pytestmark = pytest.mark.slow


@pytest.fixture
def host(tmp_path: Path) -> Iterator[OtherHost]:
    try:
        with OtherHost(*hidden(tmp_path / "run")) as made:
            yield made
    except NamespacesRefused as refused:
        pytest.skip(f"this machine has no namespaces for a second host: {refused}")


@pytest.fixture
def over(host: OtherHost, monkeypatch: pytest.MonkeyPatch) -> OtherHost:
    """Runs of this process place their processes on the other host."""
    launchers = functools.partial(NamespaceLauncher, {host: THERE})
    monkeypatch.setattr(pipeline.run, "run", functools.partial(pipeline.run.run, launchers=launchers))
    return host


def books_of(run_dir: Path, *flags: str) -> Audit:
    assert program.main(["--run-dir", str(run_dir), *flags]) == 0
    books = audit(run_dir / "ledger.jsonl")
    assert books.open == 0
    assert books.twice == ()
    return books


def test_weights_arrive_where_no_file_of_the_trainer_is_seen(over: OtherHost, tmp_path: Path) -> None:
    books = books_of(tmp_path / "run", *SMALL, *made_model(), *SIMULATED, "--num-rollout", "6")
    assert books.outcomes["trained"] == 24
    logs = "".join(path.read_text() for path in (tmp_path / "run" / "logs").glob("[efg]*.log"))
    assert all(f"version {version}: fetched" in logs for version in (0, 1))
    trace = {path.name.partition("-")[0] for path in (tmp_path / "run" / "trace").iterdir()}
    assert "train" in trace
    assert not trace & {"generate", "reward"}, "the run directory is the other host's own"


def test_engines_of_two_hosts_carry_the_same_weights_though_a_fetcher_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither host sees a file of the trainer's or of the other; checksums of the engines' tensors are compared."""
    run_dir = tmp_path / "run"

    def murder() -> None:
        deadline = time.monotonic() + 120
        while steps_done(run_dir) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        kill(run_dir, "fetcher-1")

    with contextlib.ExitStack() as stack:
        try:
            hosts = [stack.enter_context(OtherHost(*hidden(run_dir))) for _ in range(2)]
        except NamespacesRefused as refused:
            pytest.skip(f"this machine has no namespaces for other hosts: {refused}")
        launchers = functools.partial(NamespaceLauncher, dict(zip(hosts, [("engine-0",), ("engine-1",)], strict=True)))
        monkeypatch.setattr(pipeline.run, "run", functools.partial(pipeline.run.run, launchers=launchers))
        murderer = threading.Thread(target=murder)
        murderer.start()
        try:
            flags = ["--scale", "engine=2", "--check-weight-update-equal", "--num-rollout", "8"]
            books = books_of(run_dir, *SMALL, *made_model(), *flags)
        finally:
            murderer.join()
    assert books.outcomes["trained"] == 32
    assert json.loads((run_dir / "summary.json").read_text())["restarts"] == {"fetcher-1": 1}
    logs = {name: (run_dir / "logs" / f"{name}.log").read_text() for name in ("engines-0", "fetcher-0", "fetcher-1")}
    fetched = [re.findall(r"version (\d+): fetched", logs[name]) for name in ("fetcher-0", "fetcher-1")]
    assert len(fetched[0]) == len(set(fetched[0])), "each version once"
    assert all(versions[0] == "0" and int(versions[-1]) > 3 for versions in fetched), fetched
    assert "fetched" not in logs["engines-0"]
    for number, host in enumerate(hosts):
        assert f"http://{host.there}:" in (run_dir / "logs" / f"engine-{number}.log").read_text()
    assert "failed" not in logs["engines-0"]


def test_who_has_no_key_gets_nothing(over: OtherHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def script(run: Scripted) -> None:
        await run.until(lambda: run.runner.topic.get(SOURCE) is not None)
        topic = run.runner.topic.address
        train = run.controller.placement.addresses["train"]
        weights = msgspec.msgpack.decode(run.runner.topic.get(SOURCE) or b"", type=WeightsServer)
        bound = [topic, weights.address, train]
        assert all(address.startswith(f"tcp://{over.here}:") for address in bound)
        assert run.keys is not None
        assert "|" in weights.address, "a key of the trainer's own"
        create_keys(tmp_path / "made", ["worker"])  # of the thief's own; what the run's server is called, anybody knows
        (tmp_path / "made" / "server.pub").write_text(load_security(run.keys[0]).server_public)
        for security in (load_security(tmp_path / "made", "worker"), None):
            async with Node(run.runner.entry.run_id, "thief", security, give_up_s=1.0, close_s=0.1) as node:
                with pytest.raises((LinkError, AddressRefused)):
                    await node.topic(topic)
                with pytest.raises((LinkError, AddressRefused)):
                    await node.outlet(train, "train", RolloutSlice)
                with pytest.raises((LinkError, AddressRefused)):
                    await (await node.byte_client(weights.address)).stat(weights.files[0])
        *_, its = run.runner.entry.process("module", "reward-7").argv  # what each process of the run is given
        security = load_security(Path(its), "reward-7")
        async with Node(run.runner.entry.run_id, "reward-7", security, give_up_s=5.0, close_s=0.1) as node:
            there = await node.topic(topic)
            with pytest.raises(LinkRefused, match="'reward-7' may not write 'weights' on the topic; only train may"):
                await there.publish("weights", b"")
            with pytest.raises(LinkRefused, match="'reward-7' is no producer of stream 'train'"):
                await node.outlet(train, "train", RolloutSlice)
        async with Node(run.runner.entry.run_id, "train-0", security, give_up_s=1.0, close_s=0.1) as node:
            with pytest.raises(LinkError):
                await node.topic(topic)

    flags = [*SMALL, *made_model(), *SIMULATED, "--num-rollout", "4000"]
    scripted(monkeypatch, tmp_path / "run", script, lambda place: program.main(["--run-dir", str(place), *flags]))


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.full), 2])
def test_sync_trains_the_same_batches_there_though_a_replica_is_killed(
    over: OtherHost, tmp_path: Path, replicas: int
) -> None:
    flags = [*SMALL, *made_model(), "--mode", "sync", "--deterministic", "--num-rollout", "8"]
    alone = succeed_here(tmp_path / "alone", *flags).audit.batches
    assert len(alone) == 8
    flags += ["--scale", f"generate={replicas}", "--scale", f"engine={replicas}"]

    def murder() -> None:
        deadline = time.monotonic() + 120
        while steps_done(tmp_path / "run") < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        kill(tmp_path / "run", "generate-0")

    murderer = threading.Thread(target=murder)
    murderer.start()
    try:
        assert books_of(tmp_path / "run", *flags).batches == alone
    finally:
        murderer.join()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["restarts"] == {"generate-0": 1}


@pytest.mark.full
@pytest.mark.parametrize("replicas", [2])
def test_sync_trains_the_same_batches_here_though_a_replica_is_killed(tmp_path: Path, replicas: int) -> None:
    flags = [*SMALL, *made_model(), "--mode", "sync", "--deterministic", "--num-rollout", "8"]
    alone = succeed_here(tmp_path / "alone", *flags).audit.batches
    process = start(tmp_path / "run", *flags, "--scale", f"generate={replicas}", "--scale", f"engine={replicas}")
    wait_for_steps(process, tmp_path / "run", 2)
    kill(tmp_path / "run", "generate-0")
    done = finish(process, tmp_path / "run")
    assert done.code == 0, done.err[-3000:]
    assert done.audit.batches == alone
