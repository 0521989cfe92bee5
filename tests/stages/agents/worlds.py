"""Environments of the tests: they count turns, and fail where the task says so. Imported by worker processes."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from stages.agents.environment import InfrastructureError, Start, Step, Task, Turn
from stages.chat.messages import Message
from stages.records.once import Once, Uncertain

KEPT: list[bytearray] = []


def _infrastructure() -> None:
    raise InfrastructureError("the sandbox is away")


def _error() -> None:
    raise RuntimeError("a move that this world cannot make")


FAULTS: dict[str, Callable[[], object]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda: os._exit(3),
    "block": lambda: time.sleep(600),
    "eat": lambda: KEPT.extend(bytearray(1 << 24) for _ in itertools.count()),
    "infrastructure": _infrastructure,
    "error": _error,
    "print": lambda: sys.stdout.write("x" * (2 << 20)) and sys.stdout.flush(),
    "answer": lambda: Message("user", "x" * (17 << 20)),
}


class World:
    """Says how many turns there were: `5:` at first, then `[1]`, `[2]`; over after `task.metadata["turns"]`.

    `fault` of the metadata happens in turn `at` (-1: in reset), `once` names a file: only if it is not there yet.
    """

    def __init__(self, prompt: str = "5:") -> None:
        self.prompt, self.turns, self.closed = prompt, 0, False

    @classmethod
    def tasks(cls, split: str, seed: int, prompt: str = "") -> Iterator[Mapping[str, Any]]:
        for number in range(40):
            yield {"turns": 1 + number % 3, "split": split, "seed": seed, "prompt": prompt}

    async def reset(self, task: Task) -> Start:
        self.task = task
        await self._fail(-1)
        return Start((Message("user", self.prompt),), tuple(task.metadata.get("tools", ())))

    async def step(self, turn: Turn) -> Step:
        assert turn.number == self.turns, f"turn {turn.number} after {self.turns} turns"
        self.turns += 1
        if (answer := await self._fail(turn.number)) is not None:
            return Step((answer,))
        note = self.task.metadata.get("note")
        if note is not None:
            with Path(note).open("a") as file:
                file.write(f"{self.task.episode} {turn.number} {os.getpid()} {turn.text!r} {turn.last}\n")
        answer = self.task.metadata.get("answer")
        if self.turns == self.task.metadata.get("turns", 2):
            return Step(reward=1.0, done=True, metrics={"length": float(len(turn.text))}, answer=answer)
        return Step((Message("user", self._answer()),), reward=0.25, answer=answer)

    async def close(self) -> None:
        assert not self.closed
        self.closed = True

    def _answer(self) -> str:
        return f"[{self.turns}]"

    async def _fail(self, at: int) -> Message | None:
        metadata = self.task.metadata
        if "fault" not in metadata or metadata.get("at", 0) != at:
            return None
        if (once := metadata.get("once")) is not None:
            try:
                Path(once).touch(exist_ok=False)
            except FileExistsError:
                return None
        if metadata["fault"] == "wait":
            await asyncio.sleep(600)
        if metadata["fault"] == "away":
            if not Path(metadata["file"]).exists():
                return None
            _infrastructure()
        answer = FAULTS[metadata["fault"]]()
        return answer if isinstance(answer, Message) else None


class Forgetful(World):
    """Answers otherwise each time."""

    def _answer(self) -> str:
        return f"[{time.monotonic_ns()}]"


class Saved(Forgetful):
    """The same, with its state in snapshots."""

    def snapshot(self) -> bytes:
        return str(self.turns).encode()

    def restore(self, task: Task, state: bytes) -> None:
        self.task, self.turns = task, int(state)


class Alone(World):
    """Counts the packages of the run that its interpreter has."""

    async def reset(self, task: Task) -> Start:
        found = sum(importlib.util.find_spec(name) is not None for name in ("numpy", "torch", "zmq", "xxhash"))
        return Start((Message("user", str(found)),))


class Counter(World):
    """Writes a line into the file `counter` at each turn, and is killed behind it where `fault` says so."""

    once: Once

    async def step(self, turn: Turn) -> Step:
        try:
            said = await self.once(self._count, turn.number, turn.text)
        except Uncertain:
            said = 0
        step = await super().step(turn)
        return step if step.done else Step((Message("user", f"[{said}]"),), step.reward)

    async def _count(self, number: int, text: str) -> int:
        with Path(self.task.metadata["counter"]).open("a") as file:
            file.write(f"{self.task.episode} {number} {text!r}\n")
        if self.task.metadata.get("within"):
            await self._fail(number)
        return number + 1


class Slow(World):
    """Takes 0.4 s for each turn, and says how many were taken at a time, at the most, in its process."""

    inside = most = 0

    async def step(self, turn: Turn) -> Step:
        Slow.inside += 1
        Slow.most = max(Slow.most, Slow.inside)
        await asyncio.sleep(0.4)
        Slow.inside -= 1
        return await super().step(turn)

    def _answer(self) -> str:
        return f"[{Slow.most}]"


class Sync:
    """No environment: its step is not async."""

    async def reset(self, task: Task) -> Start:
        return Start(())

    def step(self, turn: Turn) -> Step:
        return Step(done=True)
