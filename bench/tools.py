"""Executions of a model's Python per second, in the sandbox and without one: `python -m bench.tools`.

    python -m bench.tools [--quick] [--rounds N] [--at-once N] [--output FILE]

The baseline is a plain subprocess for each piece of code (`python -I -S -c CODE`), with no isolation or state. Beside
it are the one-shot jail of the grader `code`, and the interpreters of the pack `python_tool`: an episode for each piece
of code, and one episode for all; below bubblewrap too where that is installed. All contenders run in each round.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from bench.report import Series, arguments, finish, machine
from stages.agents.packs.python_tool import Interpreter, Interpreters
from stages.sandbox.run import Limits, StdinCase, run_cases

CODE = "print(sum(n * n for n in range(1000)))"
PRINTED = "332833500\n"
BASELINE = "subprocess"
DEADLINE_S = 60.0

Execution = Callable[[], Awaitable[str]]


async def in_subprocess() -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", "-c", CODE, stdout=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.DEVNULL
    )
    return (await process.communicate())[0].decode()


async def in_one_shot_jail() -> str:
    (result,) = await asyncio.to_thread(run_cases, CODE, [StdinCase("")], Limits(DEADLINE_S, DEADLINE_S))
    return result.stdout


async def in_an_episode(interpreters: Interpreters) -> str:
    interpreter = await interpreters.open()
    try:
        return (await interpreter.run(CODE, DEADLINE_S)).output
    finally:
        await interpreter.close()


async def per_second(seconds: float, execute: Sequence[Execution]) -> float:
    """Executions per second of so many loops side by side. Raises RuntimeError at a wrong output."""
    for execution in execute:  # set-up is not counted
        await execution()
    began, count = time.perf_counter(), 0

    async def loop(execution: Execution) -> None:
        """Executes until the time is over; waits for one execution after the other."""
        nonlocal count
        while time.perf_counter() - began < seconds:
            if await execution() != PRINTED:
                raise RuntimeError("an execution printed something else")
            count += 1

    async with asyncio.TaskGroup() as tasks:
        for execution in execute:
            tasks.create_task(loop(execution))
    return count / (time.perf_counter() - began)


async def in_one_episode(seconds: float, at_once: int, interpreters: Interpreters) -> float:
    async def call(interpreter: Interpreter) -> str:
        return (await interpreter.run(CODE, DEADLINE_S)).output

    opened = [await interpreters.open() for _ in range(at_once)]
    try:
        return await per_second(seconds, [partial(call, interpreter) for interpreter in opened])
    finally:
        for interpreter in opened:
            await interpreter.close()


async def one_round(seconds: float, at_once: int) -> dict[str, float]:
    rates = {
        BASELINE: await per_second(seconds, [in_subprocess] * at_once),
        "grader's jail": await per_second(seconds, [in_one_shot_jail] * at_once),
    }
    for sandbox in ("jail", "bubblewrap"):
        if sandbox == "bubblewrap" and shutil.which("bwrap") is None:
            continue
        interpreters = Interpreters(sandbox="jail" if sandbox == "jail" else "bubblewrap")
        try:
            each = [partial(in_an_episode, interpreters)] * at_once
            rates[f"{sandbox}, episode each"] = await per_second(seconds, each)
            rates[f"{sandbox}, one episode"] = await in_one_episode(seconds, at_once, interpreters)
        finally:
            interpreters.close()
    return rates


def main() -> None:
    parser = arguments(__doc__, "tools", "1 round of 1 s for each contender, not 5 of 4 s")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 8], help="executions side by side")
    options = parser.parse_args()
    rounds, seconds = options.rounds or (1 if options.quick else 5), 1.0 if options.quick else 4.0
    about = machine(["msgspec"])
    values: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds):
        for at_once in options.at_once:
            print(f"round {number + 1} of {rounds}: {at_once} at once", flush=True)
            for name, rate in asyncio.run(one_round(seconds, at_once)).items():
                values.setdefault((f"{at_once} at once", name), []).append(rate)
    series = [Series(setting, name, "executions/s", found) for (setting, name), found in values.items()]
    remarks = [
        f"{rounds} rounds of {seconds:g} s, contenders alternate; the code: {CODE}",
        about.load,
        "bubblewrap: " + ("measured" if shutil.which("bwrap") else "not installed here, so not measured"),
    ]
    finish(options.output, about, remarks, series, baseline=BASELINE)


if __name__ == "__main__":
    main()
