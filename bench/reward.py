"""Graded samples per second of the reward stage, by grader processes and by replicas: `python -m bench.reward`.

    python -m bench.reward [--quick] [--rounds N] [--workers 1 2] [--replicas 1 2] [--output FILE]

Real replicas in processes of their own, real grader processes, the streams of a run (ipc): groups are sent into one
stream without end and received graded from the next; those of a fixed time are counted. All contenders of a
grader run in the same round; the baseline is one replica with one grader process.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import multiprocessing.process
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.report import Series, arguments, finish, machine
from bench.transport import fail_on_letter
from configs.schema import Config, ObserveConfig
from configs.schema.data import RewardConfig
from pipeline.hosts.worker import PortSpec, ReplicaSpec, run_replica
from stages.messages import Float32Array, Int32Array, PromptGroup, RolloutSlice, Sample, UInt8Array, VersionRun, wire
from transport import Node, StreamSpec

SPAWN = multiprocessing.get_context("spawn")
MEMBERS = 8  # samples of a group
PROMPT, TOKENS = 32, 64
SENDERS = 64
CONCURRENCY = 8  # groups that a replica has in work, as in a run
WARM_UP_S = 5.0  # from the first grade to the start of the clock: all grader processes have started and imported
SLICE = "stages.messages:RolloutSlice"


def math_text(number: int) -> tuple[str, str]:
    top, bottom = number % 97 + 1, number % 89 + 2
    return f"so it is \\boxed{{\\frac{{{3 * top}}}{{{3 * bottom}}}}}", f"\\frac{{{top}}}{{{bottom}}}"


GRADERS: dict[str, Callable[[int], tuple[str, str]]] = {  # a number -> response and label
    "gsm8k": lambda n: (f"{n} and {n} make {2 * n}.\n#### {2 * n - n % 2}", f"so it is\n#### {2 * n}"),
    "math:verify": math_text,
    "sleep:0.05": lambda n: (f"answer {n}", str(n)),
}


def make_slice(grader: str, number: int) -> RolloutSlice:
    """A group of finished rollouts, each with a response of its own."""
    response, label = GRADERS[grader](number)
    group = PromptGroup(number, number, 0, "?", wire([], Int32Array), label, MEMBERS, seed=number * MEMBERS)
    samples = tuple(
        Sample(
            index=index,
            status="completed",
            response=f"try {index}: {response}",
            token_ids=wire([1] * PROMPT + [7] * TOKENS, Int32Array),
            prompt_length=PROMPT,
            loss_mask=wire([0] * PROMPT + [1] * TOKENS, UInt8Array),
            log_probs=wire([0.0] * PROMPT + [-0.5] * TOKENS, Float32Array),
            version_runs=(VersionRun(-1, PROMPT), VersionRun(0, TOKENS)),
            turns=1,
        )
        for index in range(MEMBERS)
    )
    return RolloutSlice(group, samples)


def replica(spec: ReplicaSpec, config: Config) -> None:
    """One reward replica in this process, until it is killed."""

    async def main() -> None:
        async with Node("bench", spec.replica) as node:
            await run_replica(spec, node, await node.topic(f"ipc://{spec.run_dir}/topic"), config)

    asyncio.run(main())


@contextmanager
def replicas(count: int, directory: Path, config: Config) -> Iterator[None]:
    """Processes of their own; ended with the block, and their grader processes with them."""
    processes: list[multiprocessing.process.BaseProcess] = []
    for index in range(count):
        spec = ReplicaSpec(
            stage="reward",
            replica=f"reward-{index}",
            path="stages.reward.stage:RewardStage",
            index=index,
            replicas=count,
            concurrency=CONCURRENCY,
            run_dir=str(directory),
            inlets={"in": PortSpec("reward", f"ipc://{directory}/reward", SLICE)},
            outlets={"out": PortSpec("group", f"ipc://{directory}/group", SLICE)},
        )
        processes.append(SPAWN.Process(target=replica, args=(spec, config)))
    try:
        for process in processes:
            process.start()
        yield
    finally:
        for process in processes:
            process.kill()  # a grader process ends with the replica that started it
            process.join()


async def flow(directory: Path, grader: str, seconds: float) -> float:
    """Samples per second through the stage, after the warm-up. Raises RuntimeError if one is not graded."""
    async with Node("bench", "bench") as node:
        for name in ("reward", "group"):
            await node.hub(StreamSpec(name, f"ipc://{directory}/{name}", capacity_items=256), fail_on_letter)
        await node.topic_server(f"ipc://{directory}/topic")
        feed = await node.outlet(f"ipc://{directory}/reward", "reward", RolloutSlice)
        inlet = await node.inlet(f"ipc://{directory}/group", "group", RolloutSlice, window_items=256)
        numbers = itertools.count()

        async def send() -> None:
            """Sends without end: each send waits for credit and acceptance; cancelled when enough was counted."""
            for number in numbers:
                slice_ = make_slice(grader, number)
                await feed.send(slice_, slice_.key)

        async def take() -> None:
            lease = await inlet.receive()
            if lease is None or any(sample.reward is None for sample in lease.message.samples):
                raise RuntimeError(f"{grader}: a sample came back without a grade")
            lease.done()

        async with asyncio.TaskGroup() as tasks:
            senders = [tasks.create_task(send()) for _ in range(SENDERS)]
            await take()
            began = time.perf_counter()
            while time.perf_counter() - began < WARM_UP_S:
                await take()
            began, groups = time.perf_counter(), 0
            while time.perf_counter() - began < seconds:
                await take()
                groups += 1
            elapsed = time.perf_counter() - began
            for sender in senders:
                sender.cancel()
        return groups * MEMBERS / elapsed


def measure(grader: str, count: int, workers: int, seconds: float) -> float:
    reward = RewardConfig(rm_type=grader, reward_workers=workers)
    config = Config(reward=reward, observe=ObserveConfig(trace=False))
    with tempfile.TemporaryDirectory(prefix="bench") as home, replicas(count, Path(home), config):
        return asyncio.run(flow(Path(home), grader, seconds))


def name_of(count: int, workers: int) -> str:
    return f"{count} replica{'s' if count > 1 else ''} x {workers} worker{'s' if workers > 1 else ''}"


def main() -> None:
    parser = arguments(__doc__, "reward", "1 round of 3 s for each contender, not 5 of 8 s")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="grader processes of one replica")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2], help="replicas with one grader process each")
    options = parser.parse_args()
    rounds, seconds = options.rounds or (1 if options.quick else 5), 3.0 if options.quick else 8.0
    about = machine(["pyzmq", "msgspec", "math-verify", "sympy"])
    contenders = list(dict.fromkeys([(1, n) for n in options.workers] + [(n, 1) for n in options.replicas]))
    values: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds):
        for grader in GRADERS:
            for count, workers in contenders:
                print(f"round {number + 1} of {rounds}: {grader}, {name_of(count, workers)}", flush=True)
                rate = measure(grader, count, workers, seconds)
                values.setdefault((grader, name_of(count, workers)), []).append(rate)
    series = [Series(grader, name, "samples/s", found) for (grader, name), found in values.items()]
    remarks = [
        f"{rounds} rounds of {seconds:g} s, contenders alternate; groups of {MEMBERS}, {CONCURRENCY} in work per "
        f"replica, the first {WARM_UP_S:g} s are not counted",
        f"{about.load}; replicas, grader processes, feeder and taker "
        "share them, so that graders that compute cannot scale beyond the cores",
        "sleep:0.05 has a ceiling of 20 samples/s per grader process; gsm8k is graded in the stage itself",
    ]
    finish(options.output, about, remarks, series, baseline=name_of(1, 1))


if __name__ == "__main__":
    main()
