"""What deaths cost a stream, and what they lose: `python -m bench.kills [--quick]`.

Three consumers take messages from a hub, work on each for a few milliseconds and pass it on; whoever dies is started
again at once. Contenders, in one round: nobody dies; one consumer at random is ended by `kill -9` every 200 ms, or
every 50 ms; one stands still (SIGSTOP) every 150 ms, for one and a half leases. Real sockets, real processes, no model.

Reported: messages per second beside those of the run without deaths, what was lost and what arrived twice (it should
say 0), and the milliseconds from a kill to the moment in which the hub hands out again what the dead consumer held.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess

from bench.report import Series, arguments, finish, machine, print_table
from transport import DeadLetter, Hub, Node, StreamSpec
from transport.core.custody import Item
from transport.testing.net import until

FORKS = multiprocessing.get_context("forkserver")  # a consumer is there after milliseconds: it imports nothing
CONSUMERS, WORK_S, LEASE_S, BODY = 3, 0.003, 0.5, b"x" * 1000
WINDOW, GIVE_UP_S = 8, 30.0
BASELINE = "no deaths"


@dataclass(frozen=True)
class Contender:
    name: str
    every_s: float = 0.0  # 0: never
    stops: bool = False  # stands still and goes on, instead of a kill


CONTENDERS = (
    Contender(BASELINE), Contender("kill -9 every 200 ms", 0.2), Contender("kill -9 every 50 ms", 0.05),
    Contender("SIGSTOP every 150 ms", 0.15, stops=True),
)  # fmt: skip


@dataclass
class Outcome:
    rate: float
    deaths: int
    redelivered: int
    lost: int
    twice: int
    again_ms: list[float] = field(default_factory=list)


def consumer(jobs: str, results: str, name: str) -> None:
    """A process: take, work, pass on, acknowledge."""
    asyncio.run(_consume(jobs, results, name))


async def _consume(jobs: str, results: str, name: str) -> None:
    async with Node("bench", name, give_up_s=GIVE_UP_S) as node:
        inlet = await node.inlet(jobs, "jobs", bytes, window_items=WINDOW)
        outlet = await node.outlet(results, "results", bytes)
        while (lease := await inlet.receive()) is not None:
            await asyncio.sleep(WORK_S)
            await outlet.send(lease.message, lease.key)
            lease.done()


class Consumers:
    """Those of one run: started again whenever they end, until the stream has ended."""

    def __init__(self, jobs: Hub, results: Hub, tasks: asyncio.TaskGroup) -> None:
        self.jobs, self.results, self._tasks = jobs, results, tasks
        self.live: dict[str, BaseProcess] = {}
        self.killed_at: dict[str, float] = {}  # by name
        self.again_ms: list[float] = []

    async def keep(self, place: int) -> None:
        """One of them. Ends when it leaves in good order."""
        loop, number = asyncio.get_running_loop(), 0
        while True:
            name = f"{place}-{number}"
            process = FORKS.Process(target=consumer, args=(self.jobs.address, self.results.address, name), daemon=True)
            process.start()
            self.live[name] = process
            ended = asyncio.Event()
            loop.add_reader(process.sentinel, ended.set)
            await ended.wait()
            loop.remove_reader(process.sentinel)
            del self.live[name]
            process.join()
            if process.exitcode == 0:
                return
            peers = [peer for peer in self.jobs.core.consumers.values() if peer.replica == name]
            held = [item for peer in peers for item in peer.held.values()]
            self.jobs.peer_lost(name)
            if held:
                self._tasks.create_task(self._handed_out(self.killed_at[name], held))
            number += 1

    async def _handed_out(self, killed_at: float, held: list[Item]) -> None:
        """Note when the first of them is with another consumer."""
        await until(lambda: any(item.state != "queued" for item in held))
        self.again_ms.append(1000 * (time.monotonic() - killed_at))

    async def disturb(self, contender: Contender, rng: random.Random) -> int:
        """Until cancelled, which ends it between two deaths; so many deaths."""
        done = 0
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                await asyncio.sleep(contender.every_s)
                known = {peer.replica for peer in self.jobs.core.consumers.values()}
                working = [name for name in self.live if name in known]
                if len(working) < 2:  # on a machine that is too slow for this rate nothing would ever be done
                    continue
                name = rng.choice(working)
                self.killed_at[name] = time.monotonic()
                done += self._signal(name, signal.SIGSTOP if contender.stops else signal.SIGKILL)
                if contender.stops:
                    asyncio.get_running_loop().call_later(1.5 * LEASE_S, self._signal, name, signal.SIGCONT)
        return done

    def _signal(self, name: str, what: signal.Signals) -> bool:
        """Whether it was still there."""
        process = self.live.get(name)
        if process is None or process.pid is None:
            return False
        try:
            os.kill(process.pid, what)
        except ProcessLookupError:
            return False
        return True


async def measure(contender: Contender, count: int, seed: int) -> Outcome:
    """One run of `count` messages."""
    letters: list[DeadLetter] = []
    with tempfile.TemporaryDirectory(prefix="kills") as directory:
        async with Node("bench", "main", give_up_s=GIVE_UP_S) as node:
            # A message may meet many deaths here without being to blame for one.
            spec = StreamSpec("jobs", f"ipc://{directory}/j", capacity_items=256, lease_s=LEASE_S, max_attempts=1000)
            jobs = await node.hub(spec, letters.append)
            results = await node.hub(StreamSpec("results", f"ipc://{directory}/r"), letters.append)
            inlet = await node.inlet(results.address, "results", bytes, window_items=256)
            outlet = await node.outlet(jobs.address, "jobs", bytes)
            got = Counter[str]()

            async def feed() -> None:
                for number in range(count):
                    await outlet.send(BODY, str(number))

            async with asyncio.TaskGroup() as tasks:
                consumers = Consumers(jobs, results, tasks)
                for place in range(CONSUMERS):
                    tasks.create_task(consumers.keep(place))
                await until(lambda: len(jobs.core.consumers) == CONSUMERS)
                tasks.create_task(feed())
                quiet = not contender.every_s
                disturbing = None if quiet else tasks.create_task(consumers.disturb(contender, random.Random(seed)))
                start = time.monotonic()
                while len(got) < count and not letters:
                    lease = await inlet.receive()
                    if lease is None:
                        break
                    got[lease.key] += 1
                    lease.done()
                seconds = time.monotonic() - start
                deaths = 0
                if disturbing is not None:
                    disturbing.cancel()
                    deaths = await disturbing
                jobs.finish()
            return Outcome(
                rate=count / seconds,
                deaths=deaths,
                redelivered=jobs.stats().redelivered,
                lost=count - len(got),
                twice=sum(got.values()) - len(got),
                again_ms=consumers.again_ms,
            )


def main() -> None:
    options = arguments(__doc__, "kills", "1 round with fewer messages instead of 3").parse_args()
    rounds, count = options.rounds or (1 if options.quick else 3), 2_000 if options.quick else 5_000
    about = machine(["pyzmq", "msgspec"])
    FORKS.set_forkserver_preload(["bench.report", "transport", "transport.testing.net"])
    results: dict[str, list[Outcome]] = {}
    for number in range(rounds):
        for contender in CONTENDERS:
            print(f"round {number + 1} of {rounds}: {contender.name}", flush=True)
            results.setdefault(contender.name, []).append(asyncio.run(measure(contender, count, 100 + number)))
    series = [Series("stream", name, "messages/s", [one.rate for one in found]) for name, found in results.items()]
    print_table(series, BASELINE)
    remarks = [
        f"{rounds} rounds of {count} messages of 1 KB, {CONSUMERS} consumers, leases of {LEASE_S:g} s",
        about.load,
    ]
    for name, found in results.items():
        again = sorted(ms for one in found for ms in one.again_ms)
        total = {key: sum(getattr(one, key) for one in found) for key in ("deaths", "redelivered", "lost", "twice")}
        said = ", ".join(f"{value} {key}" for key, value in total.items())
        if len(again) >= 2:
            p99 = again[min(len(again) - 1, int(0.99 * len(again)))]
            said += f"; handed out again after {statistics.median(again):.0f} ms (median), {p99:.0f} ms (p99)"
            series.append(Series("stream", name, "ms until handed out again", again))
        remarks.append(f"{name}: {said}")
    finish(options.output, about, remarks, series)
    sys.exit(any(one.lost or one.twice for found in results.values() for one in found))


if __name__ == "__main__":
    main()
