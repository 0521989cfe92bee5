"""Messages per second through a stream, next to bare queues: `python -m bench.transport [--quick]`.

All contenders run together, interleaved round by round, so that a change of the machine's load hits all of them.
Their guarantees differ: only the stream acknowledges, redelivers, bounds bytes and survives a killed consumer. The
baselines show the cost of that. Every contender moves the same bytes from a producer process to this process.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import multiprocessing.queues
import os
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import zmq

from bench.report import Series, arguments, finish, machine
from transport import DeadLetter, Node, StreamSpec

SPAWN = multiprocessing.get_context("spawn")
SENDERS = 64  # concurrent sends of the producer: each waits for its acceptance
WINDOW_ITEMS = 256
BASELINE = "PUSH/PULL"
SIZES = {"1 KB": 1 << 10, "64 KB": 64 << 10, "1 MB": 1 << 20}
COUNTS = {"1 KB": (20_000, 6_000), "64 KB": (6_000, 1_500), "1 MB": (600, 150)}  # full, quick
DEPTHS = {1 << 10: 256, 64 << 10: 256, 1 << 20: 32}  # messages that may wait, the same for all contenders
WARM_UP = 600  # messages before the clock starts: more than can wait, so every timed message was sent within the time


def drain(take: Callable[[], object], count: int) -> float:
    """Messages per second of so many, after those of the warm-up."""
    for _ in range(WARM_UP):
        take()
    start = time.perf_counter()
    for _ in range(count):
        take()
    return count / (time.perf_counter() - start)


# The stream.


def fail_on_letter(letter: DeadLetter) -> None:
    raise RuntimeError(f"message {letter.key} was dead-lettered: {letter.reason}")


def run_async(main: Callable[..., Coroutine[Any, Any, None]], *args: object) -> None:
    asyncio.run(main(*args))


async def stream_producer(address: str, size: int, count: int) -> None:
    body = os.urandom(size)
    numbers = iter(range(count))

    async with Node("bench", "producer") as node:
        outlet = await node.outlet(address, "bench", bytes)

        async def sender() -> None:
            """Send until the numbers are used up. Each send waits for credit and acceptance."""
            for number in numbers:
                await outlet.send(body, str(number))

        async with asyncio.TaskGroup() as group:
            for _ in range(SENDERS):
                group.create_task(sender())


async def hub(node: Node, address: str, size: int) -> None:
    await node.hub(StreamSpec("bench", address, capacity_items=DEPTHS[size]), fail_on_letter)


async def stream_hub(address: str, size: int, done: multiprocessing.queues.Queue[int]) -> None:
    async with Node("bench", "hub") as node:
        await hub(node, address, size)
        await asyncio.to_thread(done.get)


def hop(size: int, count: int, directory: Path, *, apart: bool) -> float:
    """Messages per second through a stream whose hub is in this process, or apart in one of its own."""
    address = f"ipc://{directory}/{'three' if apart else 'two'}"
    done: multiprocessing.queues.Queue[int] = SPAWN.Queue()

    async def main() -> float:
        """Take and finish all messages; rate after the warm-up. Unblocked by deliveries."""
        async with Node("bench", "consumer") as node:
            if not apart:
                await hub(node, address, size)
            inlet = await node.inlet(address, "bench", bytes, window_items=WINDOW_ITEMS)
            start = 0.0
            for number in range(WARM_UP + count):
                if number == WARM_UP:
                    start = time.perf_counter()
                lease = await inlet.receive()
                if lease is None:
                    raise RuntimeError("the stream ended early")
                lease.done()
            return count / (time.perf_counter() - start)

    with ExitStack() as processes:
        if apart:
            processes.enter_context(started(run_async, stream_hub, address, size, done))
            processes.callback(done.put, 1)
        processes.enter_context(started(run_async, stream_producer, address, size, WARM_UP + count))
        return asyncio.run(main())


# The baselines.


def push_producer(address: str, size: int, count: int) -> None:
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.set(zmq.SNDHWM, DEPTHS[size])
        socket.set(zmq.LINGER, 10_000)
        socket.connect(address)
        body = os.urandom(size)
        for _ in range(count):
            socket.send(body, 0, size < 64 << 10)


def push_pull(size: int, count: int, directory: Path) -> float:
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        socket.set(zmq.RCVHWM, DEPTHS[size])
        socket.set(zmq.LINGER, 0)
        address = f"ipc://{directory}/pull"
        socket.bind(address)
        with started(push_producer, address, size, WARM_UP + count):
            return drain(partial(socket.recv, copy=size < 64 << 10), count)


def queue_producer(queue: multiprocessing.queues.Queue[bytes], size: int, count: int) -> None:
    body = os.urandom(size)
    for _ in range(count):
        queue.put(body)


def process_queue(size: int, count: int, directory: Path) -> float:
    queue: multiprocessing.queues.Queue[bytes] = SPAWN.Queue(DEPTHS[size])
    with started(queue_producer, queue, size, WARM_UP + count):
        return drain(queue.get, count)


def ray_queue(size: int, count: int, directory: Path) -> float:
    import ray
    from ray.util.queue import Queue

    queue = Queue(maxsize=DEPTHS[size])
    count = min(count, 2000)  # one actor call per item: more would only take longer

    def produce() -> None:
        body = os.urandom(size)
        for _ in range(WARM_UP + count):
            queue.put(body)

    producing = ray.remote(produce).remote()
    figure = drain(queue.get, count)
    ray.get(producing)
    queue.shutdown()
    return figure


@contextmanager
def started(target: Callable[..., None], *args: object) -> Iterator[None]:
    """A spawned process that ends by itself; it is killed if the block fails."""
    process = SPAWN.Process(target=target, args=args, daemon=True)
    process.start()
    try:
        yield
    except BaseException:
        process.kill()
        raise
    process.join(10)


Contender = Callable[[int, int, Path], float]


def contenders() -> dict[str, tuple[Contender, str]]:
    found: dict[str, tuple[Contender, str]] = {
        "stream, hub with consumer": (partial(hop, apart=False), "acks, credit, leases, dedup; 2 processes"),
        "stream, hub apart": (partial(hop, apart=True), "the same; 3 processes"),
        BASELINE: (push_pull, "blocking sockets; no acks, a killed consumer loses messages"),
        "multiprocessing.Queue": (process_queue, "blocking; no acks, one machine"),
    }
    try:
        import ray
    except ImportError:
        print("ray is not installed: ray.util.queue is left out")
    else:
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        found["ray.util.queue"] = (ray_queue, "one actor call per item")
    return found


def main() -> None:
    options = arguments(__doc__, "transport", "3 rounds with fewer messages instead of 5").parse_args()
    rounds = options.rounds or (3 if options.quick else 5)
    about = machine(["pyzmq", "msgspec", "ray"])
    values: dict[tuple[str, str], list[float]] = {}
    runners = contenders()
    with tempfile.TemporaryDirectory(prefix="bench") as directory:
        for number in range(rounds):
            print(f"round {number + 1} of {rounds}", flush=True)
            for setting, size in SIZES.items():
                count = COUNTS[setting][options.quick]
                for name, (run, _) in runners.items():
                    values.setdefault((setting, name), []).append(run(size, count, Path(directory)))
    series = [
        Series(setting, name, "messages/s", values[setting, name], f"({runners[name][1]})")
        for setting in SIZES
        for name in runners
    ]
    remarks = [
        f"{rounds} interleaved rounds; ratios below 1.5x are noise on a machine that is not idle",
        f"{about.load}; producer and consumer share them",
        "ipc on one machine: this is no measurement of a network",
    ]
    finish(options.output, about, remarks, series, baseline=BASELINE)


if __name__ == "__main__":
    main()
