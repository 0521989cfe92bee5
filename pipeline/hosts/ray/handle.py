"""A process of a run on a node of a Ray cluster: the actor that owns it there, and the handle that follows it.

Invariants: a process whose actor is gone counts as killed; what its node lacks is brought there before it starts; its
log is readable here while it runs.
"""

from __future__ import annotations

import asyncio
import contextlib
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec

from pipeline.hosts.launcher import ProcessSpec, ProcessState
from pipeline.hosts.local_launcher import last_error, last_line
from pipeline.hosts.ray.actor import CHUNK_BYTES

ANSWER_TIMEOUT_S: Final = 30.0  # without an answer of an actor, after which its process counts as lost
KILLED: Final = -9


@cache
def gone() -> tuple[type[BaseException], ...]:
    """What Ray raises where an actor is not there any more, or not heard of; and our own timeout."""
    from ray.exceptions import RayActorError, WorkerCrashedError

    return RayActorError, WorkerCrashedError, TimeoutError


class PlacedActor:
    """An actor on its node."""

    def __init__(self, actor: Any, node: str, address: str) -> None:
        self.actor, self.node, self.address = actor, node, address
        self.lost = False
        self.silent = False  # lost since nothing was heard of it, so that its node may be gone as well
        self.missed = False  # lost, and its node was asked to take the next one

    def end(self) -> None:
        """At once, together with its process."""
        import ray

        self.lost = True
        with contextlib.suppress(Exception):  # it may be gone in any way
            ray.kill(self.actor, no_restart=True)


class RayHandle:
    """A process somewhere in the cluster. Implements `Handle`."""

    def __init__(self, spec: ProcessSpec, placed: PlacedActor, log: Path) -> None:
        self.spec, self.log, self._placed = spec, log, placed
        log.touch()
        self._start = log.stat().st_size
        self._offset = 0  # of the log there: what has been copied
        self._code: int | None = None
        self._turn = asyncio.Lock()

    async def start(self) -> int:
        """Start it; its number there, 0 if its actor is gone."""
        actor = self._placed.actor
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await _copy_files(actor, self.spec.files)
                number, self._offset = await actor.spawn.remote(msgspec.msgpack.encode(self.spec))
                return int(number)
        except gone() as error:
            self._lose(error)
            return 0

    @property
    def alive(self) -> bool:
        return self._code is None

    @property
    def host_lost(self) -> bool:
        return self._placed.lost

    async def wait(self) -> int:
        """See the Protocol. Whoever waits copies the log."""
        while self._code is None:
            async with self._turn:
                if self._code is None:
                    await self._follow()
        return self._code

    async def _follow(self) -> None:
        """One answer of the actor: what was printed since, and perhaps the end."""
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                content, code = await self._placed.actor.output.remote(self._offset)
        except gone() as error:
            self._lose(error)
            return
        if content:
            with self.log.open("ab") as file:
                file.write(content)
        self._offset += len(content)
        self._code = code

    def _lose(self, error: BaseException) -> None:
        why = next(iter(str(error).strip().splitlines()), "") or f"no answer for {ANSWER_TIMEOUT_S:g} s"
        with self.log.open("a") as file:
            file.write(f"the Ray actor of {self.spec.name} is gone: {why}\n")
        self._placed.silent = isinstance(error, TimeoutError)
        self._placed.end()
        self._code = KILLED

    async def kill(self) -> int:
        await self._ask("kill")
        return await self.wait()

    async def stop(self) -> None:
        """Waits for the end, which the actor brings about after the grace at the latest."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._ask("stop"))
            tasks.create_task(self._ended())

    async def _ended(self) -> None:
        await self.wait()

    async def _ask(self, method: str) -> None:
        if self._placed.lost:
            return
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S + self.spec.grace_s):
                await getattr(self._placed.actor, method).remote()
        except gone() as error:
            if self._code is None:
                self._lose(error)

    def remember_shared(self) -> None:
        if self.alive:
            self._placed.actor.remember_shared.remote()

    def state(self) -> ProcessState | None:
        return None  # what it computes is not seen from here

    def last_line(self) -> str:
        return last_line(self.log, self._start)

    def last_error(self) -> str:
        return last_error(self.log, self._start)


async def _copy_files(actor: Any, files: tuple[str, ...]) -> None:
    """Copy to the actor's node what is not seen there."""
    there = [path for path in files if Path(path).exists()]
    for path in await actor.missing.remote(there) if there else []:
        home = Path(path)
        for file in sorted(home.rglob("*")) if home.is_dir() else [home]:
            if file.is_file():
                inside = str(file.relative_to(home)) if home.is_dir() else ""
                mode = file.stat().st_mode & 0o777
                with file.open("rb") as opened:
                    await actor.copy_file.remote(path, inside, opened.read(CHUNK_BYTES), mode)
                    while content := opened.read(CHUNK_BYTES):
                        await actor.copy_file.remote(path, inside, content, mode)
