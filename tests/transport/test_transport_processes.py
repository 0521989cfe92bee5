"""Real processes, real kills: nothing is lost and nothing arrives twice."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.transport.memory_link import ignore, take_one, until
from transport import DeadLetter, Hub, Inlet, Node, StreamSpec, awake_clock
from transport.awake import AwakeClock
from transport.core import session
from transport.errors import LinkLost

WORKER = Path(__file__).with_name("transport_worker.py")


@dataclass
class Fleet:
    """Hubs here, workers in processes of their own, restarted whenever they end."""

    node: Node
    jobs: Hub
    results: Hub
    letters: list[DeadLetter]
    work_s: float
    count: int
    got: Counter[str] = field(default_factory=Counter)
    running: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)
    collecting: asyncio.Task[None] = field(init=False)
    deaths: int = 0

    async def keep(self, replica: str, *, supervised: bool) -> None:
        """Start the replica again whenever it dies. Ends when it leaves in good order."""
        while True:
            process = await asyncio.create_subprocess_exec(
                sys.executable, str(WORKER), self.jobs.address, self.results.address, replica, str(self.work_s)
            )
            self.running[replica] = process
            code = await process.wait()
            if code == 0:
                return
            self.deaths += 1
            if supervised:
                self.jobs.peer_lost(replica)

    async def feed(self, deadly: int) -> None:
        outlet = await self.node.outlet(self.jobs.address, "jobs", bytes)
        for number in range(self.count):
            await outlet.send(b"deadly" if number == deadly else b"x" * 1000, f"job{number}")

    async def collect(self, inlet: Inlet[bytes], count: int) -> None:
        """Results by key until there are `count` different ones. Unblocked by results."""
        while len(self.got) < count:
            lease = await take_one(inlet)
            self.got[lease.key] += 1
            lease.done()


@asynccontextmanager
async def fleet(
    run_dir: Path, *replicas: str, work_s: float, lease_s: float, count: int, supervised: bool = True, deadly: int = -1
) -> AsyncIterator[Fleet]:
    """So many jobs on their way through these replicas; at the end each result but the deadly one's is there once."""
    async with asyncio.timeout(100), Node("run", "main") as node:
        letters: list[DeadLetter] = []
        spec = StreamSpec("jobs", f"ipc://{run_dir}/j", 100, lease_s=lease_s, max_attempts=4)
        jobs = await node.hub(spec, letters.append)
        results = await node.hub(StreamSpec("results", f"ipc://{run_dir}/r"), letters.append)
        inlet = await node.inlet(results.address, "results", bytes, window_items=64)
        made = Fleet(node, jobs, results, letters, work_s, count)
        try:
            async with asyncio.TaskGroup() as group:
                for replica in replicas:
                    group.create_task(made.keep(replica, supervised=supervised))
                group.create_task(made.feed(deadly))
                made.collecting = group.create_task(made.collect(inlet, count - (deadly >= 0)))
                yield made
                await made.collecting
                jobs.finish()
                await jobs.wait_empty()
        finally:
            for process in made.running.values():
                with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                    process.kill()
    assert set(made.got.values()) == {1}
    assert [letter.key for letter in letters] == ([f"job{deadly}"] if deadly >= 0 else [])


async def test_a_killed_consumer_loses_nothing_even_unseen(run_dir: Path) -> None:
    """No supervisor: the broken connection alone hands the work over, long before the lease ends."""
    async with fleet(run_dir, "victim", work_s=0.02, lease_s=60.0, count=40, supervised=False) as f:
        await until(lambda: f.results.stats().accepted >= 5)
        f.running["victim"].kill()
    assert f.deaths == 1
    assert f.jobs.stats().redelivered >= 1


@pytest.mark.slow
async def test_a_frozen_consumer_is_replaced_and_its_late_answers_are_suppressed(run_dir: Path) -> None:
    async with fleet(run_dir, "frozen", "other", work_s=0.01, lease_s=0.6, count=60) as f:
        await until(lambda: f.results.stats().accepted >= 10 and len(f.jobs.core.consumers) == 2)
        f.running["frozen"].send_signal(signal.SIGSTOP)
        await f.collecting  # complete although one replica stands still
        f.running["frozen"].send_signal(signal.SIGCONT)


@pytest.mark.slow
async def test_kills_at_random_lose_nothing(run_dir: Path) -> None:
    rng, kills = random.Random(1), 0
    async with fleet(run_dir, "a", "b", "c", work_s=0.004, lease_s=5.0, count=1500) as f:
        while kills < 12 and not f.collecting.done():
            await asyncio.sleep(0.15)
            live = [process for process in f.running.values() if process.returncode is None]
            if len(f.jobs.core.consumers) >= 2 and not f.collecting.done():
                rng.choice(live).kill()
                kills += 1
    assert kills >= 3


@pytest.mark.slow
async def test_a_deadly_message_is_buried_and_its_neighbours_live(run_dir: Path) -> None:
    async with fleet(run_dir, "a", "b", work_s=0.001, lease_s=5.0, count=50, deadly=20) as f:
        pass
    [letter] = f.letters
    assert letter.body == b"\xc4\x06deadly"
    assert "of max_attempts=4" in letter.reason


async def test_a_lost_hub_is_reported_after_give_up(run_dir: Path) -> None:
    """A worker whose hub has gone for good ends by itself with LinkLost."""
    address = f"ipc://{run_dir}/s"
    async with asyncio.timeout(120), Node("run", "peer", give_up_s=2.0, close_s=0.3) as peer:
        async with Node("run", "hub") as host:
            await host.hub(StreamSpec("s", address), ignore)
            inlet = await peer.inlet(address, "s", bytes)
            outlet = await peer.outlet(address, "s", bytes)
            await outlet.send(b"x", "k")
            await take_one(inlet)
        with pytest.raises(LinkLost, match=r"inlet of stream 's' at .* heard nothing for give_up_s=2\.0"):
            await inlet.receive()
        with pytest.raises(LinkLost, match="outlet of stream 's'"):
            await outlet.send(b"y", "k2")


async def test_the_time_in_which_a_process_was_stopped_is_no_silence(run_dir: Path) -> None:
    """After 45 s without a step, as in a stopped process, leases and links hold. Silence while awake still counts."""
    loop = asyncio.get_running_loop()
    real, ahead_s = loop.time, 0.0
    loop.time = lambda: real() + ahead_s  # type: ignore[method-assign]
    node = Node("run", "node", give_up_s=30.0, close_s=0.3)
    async with node:
        hub = await node.hub(StreamSpec("s", f"ipc://{run_dir}/s", lease_s=10.0), ignore)
        topic = await node.topic_server(f"ipc://{run_dir}/t")
        client = await node.topic(topic.address)
        inlet, outlet = await node.inlet(hub.address, "s", bytes), await node.outlet(hub.address, "s", bytes)
        await outlet.send(b"x", "k")
        lease = await take_one(inlet)
        for _ in range(3):
            ahead_s += 45.0
            await client.publish("key", b"value")
            await outlet.send(b"y", f"k{ahead_s}")
            await asyncio.sleep(0.05)
        assert (hub.stats().consumers, hub.stats().redelivered) == (1, 0)
        lease.done()
        hub.finish()
        for _ in range(3):
            (await take_one(inlet)).done()
        await hub.wait_empty()
    assert awake_clock().slept() == pytest.approx(135.0, abs=10.0)


def test_the_clock_of_the_time_awake_leaves_out_late_ticks() -> None:
    clock = AwakeClock(0.0)
    assert [clock.now(time) for time in (0.5, 1.9, 2.9)] == [0.5, 1.9, 2.9]  # a busy loop is not a stopped one
    assert [clock.now(time) for time in (95.0, 95.5)] == pytest.approx([2.9, 3.4])
    assert clock.asleep_s == pytest.approx(92.1)


async def test_an_idle_node_does_nothing(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once greeted, owner tasks sleep: no step but the greeting's own alarm is taken, and no wake-up comes late."""
    monkeypatch.setattr(session, "BEAT_LIMIT_S", 100.0)  # of a machine that stands still for seconds too
    async with Node("run", "node") as node:
        hub = await node.hub(StreamSpec("s", f"ipc://{run_dir}/s", lease_s=300), ignore)
        inlet = await node.inlet(hub.address, "s", bytes)
        steps = 0
        original = inlet.on_step

        def counted() -> None:
            nonlocal steps
            steps += 1
            original()

        inlet.on_step = counted  # type: ignore[method-assign]
        before = -1
        for _ in range(20):  # how many steps a greeting takes hangs on how its messages arrive
            if steps == before:
                break
            before = steps
            await asyncio.sleep(0.3)
        await asyncio.sleep(1.3)
        assert steps <= before + 1
        assert [port.link.late_wakeups for port in (hub, inlet)] == [0, 0]
