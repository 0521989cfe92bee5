"""Real processes, real kills: nothing is lost and nothing arrives twice."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.transport.memory_link import ignore, take_one, until
from transport import DeadLetter, Hub, Inlet, LinkLost, Node, StreamSpec, awake_clock
from transport.awake import AwakeClock

WORKER = Path(__file__).with_name("transport_worker.py")


@dataclass
class Fleet:
    """Hubs here, workers in processes of their own, restarted whenever they end."""

    node: Node
    jobs: Hub
    results: Hub
    letters: list[DeadLetter]
    inlet: Inlet[bytes]
    work_s: float
    running: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)
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

    async def collect(self, count: int) -> Counter[str]:
        """Results by key until there are `count` different ones. Unblocked by results."""
        got: Counter[str] = Counter()
        while len(got) < count:
            lease = await take_one(self.inlet)
            got[lease.key] += 1
            lease.done()
        return got


Fleets = Callable[..., AbstractAsyncContextManager[Fleet]]


@pytest.fixture
def fleet(run_dir: Path) -> Fleets:
    @asynccontextmanager
    async def opened(work_s: float, lease_s: float) -> AsyncIterator[Fleet]:
        letters: list[DeadLetter] = []
        async with asyncio.timeout(100), Node("run", "main") as node:
            spec = StreamSpec("jobs", f"ipc://{run_dir}/j", 100, lease_s=lease_s, max_attempts=4)
            jobs = await node.hub(spec, letters.append)
            results = await node.hub(StreamSpec("results", f"ipc://{run_dir}/r"), letters.append)
            inlet = await node.inlet(results.address, "results", bytes, window_items=64)
            made = Fleet(node, jobs, results, letters, inlet, work_s)
            try:
                yield made
            finally:
                for process in made.running.values():
                    with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                        process.kill()

    return opened


async def feed(made: Fleet, count: int, deadly: int = -1) -> None:
    outlet = await made.node.outlet(made.jobs.address, "jobs", bytes)
    for number in range(count):
        await outlet.send(b"deadly" if number == deadly else b"x" * 1000, f"job{number}")


async def test_a_killed_consumer_loses_nothing_even_unseen(fleet: Fleets) -> None:
    """No supervisor: the broken connection alone hands the work over, long before the lease ends."""
    async with fleet(0.02, lease_s=60.0) as f, asyncio.TaskGroup() as group:
        group.create_task(f.keep("victim", supervised=False))
        group.create_task(feed(f, 40))
        collecting = group.create_task(f.collect(40))
        await until(lambda: f.results.stats().accepted >= 5)
        f.running["victim"].kill()
        got = await collecting
        f.jobs.finish()
        await f.jobs.wait_empty()
    assert set(got.values()) == {1}
    assert f.deaths == 1
    assert f.jobs.stats().redelivered >= 1
    assert f.letters == []


@pytest.mark.slow
async def test_a_frozen_consumer_is_replaced_and_its_late_answers_are_suppressed(fleet: Fleets) -> None:
    async with fleet(0.01, lease_s=0.6) as f, asyncio.TaskGroup() as group:
        for replica in ("frozen", "other"):
            group.create_task(f.keep(replica, supervised=True))
        group.create_task(feed(f, 60))
        collecting = group.create_task(f.collect(60))
        await until(lambda: f.results.stats().accepted >= 10 and len(f.jobs.core.consumers) == 2)
        f.running["frozen"].send_signal(signal.SIGSTOP)
        got = await collecting  # complete although one replica stands still
        f.running["frozen"].send_signal(signal.SIGCONT)
        f.jobs.finish()
    assert set(got.values()) == {1}
    assert f.letters == []


@pytest.mark.slow
async def test_kills_at_random_lose_nothing(fleet: Fleets) -> None:
    rng = random.Random(1)
    async with fleet(0.004, lease_s=5.0) as f, asyncio.TaskGroup() as group:
        for replica in ("a", "b", "c"):
            group.create_task(f.keep(replica, supervised=True))
        group.create_task(feed(f, 1500))
        collecting = group.create_task(f.collect(1500))
        kills = 0
        while kills < 12:
            await asyncio.sleep(0.15)
            live = [process for process in f.running.values() if process.returncode is None]
            if len(f.jobs.core.consumers) >= 2 and not collecting.done():
                rng.choice(live).kill()
                kills += 1
            elif collecting.done():
                break
        got = await collecting
        f.jobs.finish()
        await f.jobs.wait_empty()
    assert set(got.values()) == {1}
    assert len(got) == 1500
    assert f.letters == []
    assert kills >= 3


@pytest.mark.slow
async def test_a_deadly_message_is_buried_and_its_neighbours_live(fleet: Fleets) -> None:
    async with fleet(0.001, lease_s=5.0) as f, asyncio.TaskGroup() as group:
        for replica in ("a", "b"):
            group.create_task(f.keep(replica, supervised=True))
        group.create_task(feed(f, 50, deadly=20))
        got = await f.collect(49)
        f.jobs.finish()
        await f.jobs.wait_empty()
    assert set(got.values()) == {1}
    [letter] = f.letters
    assert (letter.key, letter.body) == ("job20", b"\xc4\x06deadly")
    assert "of max_attempts=4" in letter.reason


async def test_a_lost_hub_is_reported_after_give_up(run_dir: Path) -> None:
    """A worker whose hub has gone for good ends by itself with LinkLost."""
    address = f"ipc://{run_dir}/s"
    async with asyncio.timeout(120), Node("run", "peer", give_up_s=0.6, close_s=0.3) as peer:
        async with Node("run", "hub") as host:
            await host.hub(StreamSpec("s", address), ignore)
            inlet = await peer.inlet(address, "s", bytes)
            outlet = await peer.outlet(address, "s", bytes)
            await outlet.send(b"x", "k")
            await take_one(inlet)
        with pytest.raises(LinkLost, match=r"inlet of stream 's' at .* heard nothing for give_up_s=0\.6"):
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


async def test_an_idle_node_does_nothing(run_dir: Path) -> None:
    """Beats aside, owner tasks sleep: no step is taken while nothing happens, and no wake-up comes late."""
    async with Node("run", "node") as node:
        hub = await node.hub(StreamSpec("s", f"ipc://{run_dir}/s"), ignore)
        inlet = await node.inlet(hub.address, "s", bytes)
        steps = 0
        original = inlet.on_step

        def counted() -> None:
            nonlocal steps
            steps += 1
            original()

        inlet.on_step = counted  # type: ignore[method-assign]
        await asyncio.sleep(1.3)
        assert steps <= 4
        assert [port.link.late_wakeups for port in (hub, inlet)] == [0, 0]
