"""Runs whose environment writes a counter at each turn, and what must be true of the counter when all was killed.

The oracle reads three things: the counter, what the environment said its calls gave, and the files of calls that the
run left. It knows nothing of the program but the format of those files (docs/checkpoints.md).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stages.agents.environment import Start, Step, Task, Turn
from stages.chat.messages import Message
from stages.records.once import Once, Uncertain
from tests.chaos.kills import CONTROLLER, RUNNING, TRAIN, Kill
from tests.chaos.oracle import Fault

DIRECTORY = "SLUICE_CHAOS_CALLS"  # in the environment of the run: where the counter is
TURNS = 3
UNSURE = "uncertain"
VICTIMS = ("environment", "environment", "agents-0", "agents-1", "engine-0", "engine-1", "generate-0", TRAIN)

RECIPE = Path(__file__).with_name("counting.toml")


class Counting:
    """Three turns; each writes a line into the counter, once, and says which line it was."""

    once: Once

    @classmethod
    def tasks(cls, split: str, seed: int) -> Iterator[Mapping[str, Any]]:
        for number in range(400):
            yield {"input": f"{number % 10}:", "number": number}

    async def reset(self, task: Task) -> Start:
        self.task = task
        return Start(task.messages)

    async def step(self, turn: Turn) -> Step:
        call = [self.task.episode, self.task.metadata["number"], turn.number, turn.text]
        try:
            said = await self.once(count, call)
        except Uncertain:
            said = UNSURE
        _append("answered", [call, said])
        done = turn.number + 1 == TURNS
        reward = float(len(turn.text) % 2) if done else None
        return Step((Message("user", "+"),), reward=reward, done=done)

    async def close(self) -> None: ...


async def count(call: list[object]) -> int:
    """The call that changes the world, with time to be killed before it and behind it. Gives a name of its line."""
    await asyncio.sleep(random.uniform(0, 0.04))
    name = random.getrandbits(60)
    _append("counter", [call, name])
    await asyncio.sleep(random.uniform(0, 0.04))
    return name


def _append(name: str, line: object) -> None:
    """In one piece, also where several processes do it."""
    file = os.open(Path(os.environ[DIRECTORY], name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(file, json.dumps(line).encode() + b"\n")
    finally:
        os.close(file)


def draw(rng: random.Random, steps: int, kills: int) -> list[Kill]:
    """So many kills at random moments; one in three ends the run, which is then resumed."""
    moments = sorted((rng.randrange(1, steps - 1), rng.uniform(0, 1.0)) for _ in range(kills))
    return [
        Kill(CONTROLLER if rng.random() < 0.3 else rng.choice(VICTIMS), RUNNING, step, delay_s)
        for step, delay_s in moments
    ]


def read(directory: Path, name: str) -> list[Any]:
    path = directory / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def judge_calls(run_dir: Path, directory: Path) -> list[Fault]:
    """Calls that took effect twice, that did not although they were answered, and that nobody reported."""
    lines: dict[str, list[int]] = {}
    for call, name in read(directory, "counter"):
        lines.setdefault(json.dumps(call), []).append(name)
    faults = [Fault("twice", f"{call} took effect {len(names)} times") for call, names in lines.items() if names[1:]]
    begun = left(run_dir)
    for call, said in read(directory, "answered"):
        key = json.dumps(call)
        if said == UNSURE and key not in begun:
            faults.append(Fault("unreported", f"{key} was answered as uncertain, and no file says so"))
        elif said != UNSURE and lines.get(key) != [said]:
            faults.append(Fault("lost", f"{key} was answered with {said}, but the counter has {lines.get(key)}"))
    told = json.loads((run_dir / "summary.json").read_text())["uncertain_calls"]
    if told != len(begun):
        faults.append(Fault("unreported", f"{len(begun)} calls are uncertain, summary.json says {told}"))
    return faults


def left(run_dir: Path) -> dict[str, str]:
    """Calls of which the run's files say that they began, and not how they ended: argument -> file."""
    found = {}
    for path in (run_dir / "episodes").glob("*/*"):
        text = path.read_text(errors="replace")
        if not path.name.startswith((".", "turns")) and text.startswith("{"):
            found[json.dumps(json.loads(text)["key"]["arguments"][0])] = str(path)
    return found


def figures(run_dir: Path, directory: Path) -> str:
    """In one line."""
    answered = Counter(said == UNSURE for _, said in read(directory, "answered"))
    calls = {json.dumps(call) for call, said in read(directory, "answered") if said != UNSURE}
    logs = [path.read_text(errors="replace") for path in run_dir.glob("logs/*")]
    restored = sum(text.count(words) for text in logs for words in (" continues from turn ", " starts again with "))
    return (
        f"{len(read(directory, 'counter'))} effects of {len(calls)} calls that were answered, "
        f"{answered[False] - len(calls)} answers given again, {len(left(run_dir))} calls uncertain, "
        f"{restored} rollouts restored"
    )
