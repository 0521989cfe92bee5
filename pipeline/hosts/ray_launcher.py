"""Processes of a run on the nodes of a Ray cluster: each is the child of an actor, which Ray places and ends.

Invariants: what an actor's node lacks is brought there before the process starts; a process whose actor is gone
counts as killed, and the actor is ended before another takes its name; logs are readable here while it runs. Tokens and
weights never go through Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec

import pipeline
from pipeline.errors import UsageError
from pipeline.hosts.free_port import PortInUse
from pipeline.hosts.launcher import ANYTHING, ProcessSpec, ProcessState, Resources, stop_together
from pipeline.hosts.local_launcher import last_error, last_line
from pipeline.hosts.ray_actor import CHUNK_BYTES, ProcessActor
from pipeline.hosts.ray_placement import NODE_ID, ActorPlacement, Node, PlacementGroup, RayPlacement, choose
from pipeline.record.run_directory import RunDir

ANSWER_TIMEOUT_S: Final = 30.0  # without an answer of an actor, after which its process counts as lost
PLACEMENT_TIMEOUT_S: Final = 120.0  # time in which Ray starts an actor; longer waits are for what others hold
KILLED: Final = -9
ROOT: Final = str(Path(pipeline.__file__).parent.parent)


@cache
def _gone() -> tuple[type[BaseException], ...]:
    """What Ray raises where an actor is not there any more, or not heard of; and our own timeout."""
    from ray.exceptions import RayActorError, WorkerCrashedError

    return RayActorError, WorkerCrashedError, TimeoutError


class PlacedActor:
    """An actor on its node."""

    def __init__(self, actor: Any, node: str, address: str) -> None:
        self.actor, self.node, self.address = actor, node, address
        self.lost = False

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
        except _gone() as error:
            self._lose(error)
            return 0

    @property
    def alive(self) -> bool:
        return self._code is None

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
        except _gone() as error:
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
        except _gone() as error:
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


class RayLauncher:
    """Implements `Launcher`. `nodes`: asks for those of the cluster; `threads`: how many each process may use."""

    def __init__(
        self, placements: RayPlacement, nodes: Callable[[], list[Node]], rundir: RunDir, threads: int = 1
    ) -> None:
        self.placements, self._nodes, self.rundir = placements, nodes, rundir
        self._here = next(node for node in nodes() if node.here)
        self.controller: str | None = self._here.address
        self._threads = os.environ.get("OMP_NUM_THREADS", str(threads))
        self._placed: dict[str, PlacedActor] = {}
        self._groups: dict[str, Any] = {}
        self._placing = asyncio.Lock()
        self._expected: set[str] = set()
        self.handles: dict[str, RayHandle] = {}

    def address(self, name: str) -> str:
        return self._placed[name].address

    @contextlib.contextmanager
    def held_port(self, name: str, port: int = 0) -> Iterator[int]:
        import ray

        actor = self._placed[name].actor
        try:
            answer = ray.get(actor.hold_port.remote(port), timeout=ANSWER_TIMEOUT_S)  # a millisecond
        except _gone():
            yield port or 1  # the start finds out that the actor is gone
            return
        if isinstance(answer, str):
            raise PortInUse(errno.EADDRINUSE, answer)
        try:
            yield answer
        finally:
            actor.release_port.remote(answer)

    async def place(self, name: str) -> None:
        """See the Protocol. Waits for Ray to start the actor. Raises UsageError if no node can hold it."""
        placed = self._placed.get(name)
        if placed is not None and not placed.lost:
            return
        placement = self.placements.of(name)
        async with self._placing:  # the next one must see what this one took
            self._placed[name] = await self._start_actor(name, placement)
            self._expected.discard(name)

    def expect(self, name: str) -> None:
        """See the Protocol."""
        placement, beside = self.placements.of(name), self._beside(name)
        times = 1 + sum(self.placements.of(other).needs == placement.needs for other in self._expected)
        nodes = [node for node in self._nodes() if beside is None or node.id == beside]
        if not any(placement.needs.within(node.free, times) for node in nodes):
            raise UsageError(f"there is no room for {name}: {self._lack(placement, nodes)}; end another process first")
        self._expected.add(name)

    def _beside(self, name: str) -> str | None:
        """The node on which a process must be for which its group has no bundle: that of the others."""
        placement = self.placements.of(name)
        if (
            not placement.group
            or placement.bundle >= 0
            or self.placements.groups[placement.group].strategy != "STRICT_PACK"
        ):
            return None
        return self._placed[f"{name.rpartition('-')[0]}s-0"].node  # of the engines stage

    async def release(self, name: str) -> None:
        """See the Protocol. What the actor holds is others' then."""
        self.handles.pop(name, None)
        if (placed := self._placed.pop(name, None)) is not None:
            await self._close(placed)

    async def spawn(self, spec: ProcessSpec, resources: Resources = ANYTHING) -> RayHandle:
        await self.place(spec.name)
        handle = self.handles[spec.name] = RayHandle(
            spec, self._placed[spec.name], self.rundir.logs / f"{spec.name}.log"
        )
        number = await handle.start()
        self.rundir.write_pid(spec.name, number)
        return handle

    async def stop_all(self) -> None:
        import ray

        await stop_together(self.handles.values())
        for placed in self._placed.values():
            await self._close(placed)
        self._placed.clear()
        for group in self._groups.values():
            ray.util.remove_placement_group(group)
        self._groups.clear()

    async def _close(self, placed: PlacedActor) -> None:
        if not placed.lost:
            with contextlib.suppress(*_gone()):  # what it keeps is removed by the next one there
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    await placed.actor.close.remote()
        placed.end()

    async def _start_actor(self, name: str, placement: ActorPlacement) -> PlacedActor:
        import ray

        options: dict[str, Any] = {
            "num_cpus": placement.needs.cpus,
            "num_gpus": placement.needs.gpus,
            "max_restarts": 0,
        }
        found = self._nodes()
        if (beside := self._beside(name)) is not None:
            options["label_selector"] = {NODE_ID: beside}
        elif placement.group and placement.bundle >= 0:
            options["scheduling_strategy"] = await self._bundle(
                self.placements.groups[placement.group], placement, found
            )
        elif placement.here:
            options["label_selector"] = {NODE_ID: self._here.id}
        else:
            alone = PlacementGroup(name, placement.role, placement.needs, 1, "PACK")
            options["label_selector"] = choose(self.placements.config, placement.role, alone, found)
            if self.placements.config.ray.ray_placement == "spread":
                options["scheduling_strategy"] = "SPREAD"
        if ray.get_runtime_context().runtime_env.get("working_dir"):  # instead of where this program lies
            path = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))
            options["runtime_env"] = {"env_vars": {"PYTHONPATH": path}}
        actor = ray.remote(ProcessActor).options(**options).remote(os.getcwd(), self._threads)
        try:
            async with asyncio.timeout(PLACEMENT_TIMEOUT_S):
                node, address = await actor.ready.remote()
        except TimeoutError:
            ray.kill(actor)
            raise self._waited(name, placement) from None
        except RuntimeError as error:  # how Ray says that an import failed there
            raise UsageError(
                f"--runner ray: the actor of {name} could not be started ({_last(error)}); each node needs this "
                f"project at {ROOT}, and the Python that it is installed for"
            ) from error
        return PlacedActor(actor, node, address)

    async def _bundle(self, group: PlacementGroup, placement: ActorPlacement, found: list[Node]) -> Any:
        """Where in its group a process goes; the group is made for the first of its processes."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if group.name not in self._groups:
            labels = choose(self.placements.config, group.role, group, found)
            need = {"CPU": group.bundle.cpus or 0.001, **({"GPU": group.bundle.gpus} if group.bundle.gpus else {})}
            selectors = [dict(labels) for _ in range(group.bundles)]
            if group.here:
                selectors[0] = {NODE_ID: self._here.id}
            made = ray.util.placement_group(
                [need] * group.bundles, strategy=group.strategy, bundle_label_selector=selectors
            )
            if not await asyncio.to_thread(made.wait, PLACEMENT_TIMEOUT_S):
                ray.util.remove_placement_group(made)
                raise self._waited(group.name, placement)
            self._groups[group.name] = made
        return PlacementGroupSchedulingStrategy(self._groups[group.name], placement.bundle)

    def _waited(self, name: str, placement: ActorPlacement) -> UsageError:
        return UsageError(
            f"--runner ray: Ray started no actor for {name} within {PLACEMENT_TIMEOUT_S:g} s: "
            f"{self._lack(placement, self._nodes())}; wait for what others use, or join more nodes (ray start "
            "--address)"
        )

    def _lack(self, placement: ActorPlacement, nodes: list[Node]) -> str:
        free = ", ".join(f"{node.address} ({node.free['CPU']:g} CPU, {node.free['GPU']:g} GPU)" for node in nodes)
        return f"it needs {placement.needs.words()}, and free are {free}"


def _last(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


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
