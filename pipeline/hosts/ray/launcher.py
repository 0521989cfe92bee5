"""Processes of a run on the nodes of a Ray cluster: each is the child of an actor, which Ray places and ends.

Invariants: an actor is ended before another takes its name; a process that was lost with its node is placed again by
the labels of its role as soon as a node has room for it, and reports once that it waits; tokens and weights never pass
through Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from pipeline.errors import UsageError
from pipeline.facts.run_directory import RunDir
from pipeline.hosts.launcher import HostGone, Launcher, ProcessSpec, SharedFiles
from pipeline.hosts.machine import PortInUse
from pipeline.hosts.ray.actor import ANSWER_TIMEOUT_S, PlacedActor, RayHandle, gone
from pipeline.hosts.ray.cluster import NotStarted, lacking, start_actor
from pipeline.hosts.ray.placement import NODE_ID, ActorPlacement, Node, PlacementGroup, RayPlacement, divide, matches

PLACEMENT_TIMEOUT_S: Final = 120.0  # time in which Ray starts an actor; longer waits are for what others hold
AGAIN_TIMEOUT_S: Final = 30.0  # the same where a node seemed to have room: it may be gone, or taken
ROOM_POLL_S: Final = 2.0  # between two looks for room
LENDER_POLL_S: Final = 0.1  # between two looks for the process that has a GPU first


class RayLauncher(Launcher):
    """Actors end with the driver, so nothing is left to a next start of the run. `nodes`: lists those of the cluster;
    `threads`: how many each process may use."""

    def __init__(
        self, placements: RayPlacement, nodes: Callable[[], list[Node]], rundir: RunDir, threads: int = 1
    ) -> None:
        self.placements, self._nodes, self.rundir = placements, nodes, rundir
        self._here = next(node for node in nodes() if node.here)
        self.controller = self._here.address
        self.say = lambda line: None
        self.waiting: dict[str, str] = {}
        self._threads = os.environ.get("OMP_NUM_THREADS", str(threads))
        self._placed: dict[str, PlacedActor] = {}
        self._groups: dict[str, Any] = {}
        self._planned: dict[str, str] = {}  # process of a group -> the node that it is to begin on
        self._silent: set[str] = set()  # nodes without an answer; Ray reports their loss later
        self._sees: dict[str, SharedFiles] = {}  # what must be on a process's node
        self._unfit: set[str] = set()  # nodes that have not what must be there
        self._placing = asyncio.Lock()
        self._expected: set[str] = set()
        self._began = False  # an actor was lost, so that others may be placed for the first time in a run that goes on
        self.handles: dict[str, RayHandle] = {}

    def address(self, name: str) -> str:
        return self._placed[name].address

    @contextlib.contextmanager
    def held_port(self, name: str, port: int = 0) -> Iterator[int]:
        import ray

        actor = self._placed[name].actor
        try:
            answer = ray.get(actor.hold_port.remote(port), timeout=ANSWER_TIMEOUT_S)  # a millisecond
        except gone():
            yield port or 1  # the start finds out that the actor is gone
            return
        if isinstance(answer, str):
            raise PortInUse(errno.EADDRINUSE, answer)
        try:
            yield answer
        finally:
            actor.release_port.remote(answer)

    async def place(self, name: str, beside: str = "", sees: SharedFiles | None = None) -> None:
        """See the Protocol. Waits for Ray to start the actor, `PLACEMENT_TIMEOUT_S` at most; without a limit in a run
        that has begun, where an actor was lost or is added."""
        while not self._placed.keys() >= set(self.placements.lenders(name)):  # noqa: ASYNC110  (others place them)
            await asyncio.sleep(LENDER_POLL_S)
        placement = self.placements.of(name)
        self._began |= any(placed.lost for placed in self._placed.values())
        again = (self._began or name in self._expected) and not self._at_once(placement)
        if sees is not None:
            self._sees[name] = sees
        # A placement must see the room that the previous one took; one that takes no room does not wait.
        takes = placement.needs.cpus or placement.needs.gpus or placement.group
        turn = self._placing if takes else contextlib.nullcontext()
        while True:
            async with turn:
                placed = self._placed.get(name)
                if placed is not None and not placed.lost:
                    break
                if placed is not None and placed.silent:
                    self._silent.add(placed.node)
                    placed.silent = False
                try:
                    options = await self._where(name, placement, beside, again=again)
                    if options is not None and await self._started(name, placement, options, again=again):
                        break
                except NotStarted as error:
                    if not again and not beside:
                        raise self._waited(name, placement, str(error)) from None
            await asyncio.sleep(ROOM_POLL_S)
        self._expected.discard(name)
        address, waited = self._placed[name].address, self.waiting.pop(name, None) is not None
        if waited or (name.startswith("train-") and self._placed[name] is not placed and address != self.controller):
            self.say(f"{name}: placed on {address}")

    async def _started(self, name: str, placement: ActorPlacement, options: dict[str, Any], *, again: bool) -> bool:
        """Whether there is an actor now, on a node that sees its files. Raises NotStarted, and UsageError for a node
        that does not, unless the process was elsewhere before and can wait for another one."""
        limit_s = AGAIN_TIMEOUT_S if again else PLACEMENT_TIMEOUT_S
        placed = await start_actor(name, placement.needs, options, limit_s, self._threads, self._nodes)
        self._silent.discard(placed.node)
        sees, lack = self._sees.get(name), None
        if sees is not None and placed.node != self._here.id:
            lack = await lacking(placed, sees)
        if lack is None:
            self._placed[name] = placed
            return True
        await self._close(placed)
        if not again:
            raise UsageError(
                f"--runner ray: {name} is to run on node {placed.address}, which {lack}; put run directory and model "
                "on a file system that the nodes have at the same path, or choose nodes that have them with "
                "--ray-labels train=KEY:VALUE"
            )
        self._unfit.add(placed.node)
        self.say(f"{name}: node {placed.address} {lack}, it goes to another one")
        return False

    def _wait(self, name: str, placement: ActorPlacement) -> None:
        """Say once that a process waits for room."""
        if name in self.waiting:
            return
        left_out = self._silent | (self._unfit if name in self._sees else set())
        heard_of = [node for node in self._nodes() if node.id not in left_out]
        self.waiting[name] = lack = self._lack(placement, heard_of)
        kind = name.rpartition("-")[0]
        alive = sum(peer.rpartition("-")[0] == kind and not actor.lost for peer, actor in self._placed.items())
        goes_on = f"{alive} of its kind go{'' if alive > 1 else 'es'} on" if alive else "none of its kind is left"
        self.say(
            f"{name}: no node has room for it ({lack}); {goes_on}. It is placed as soon as a node joins (ray start "
            "--address) or what others use is free"
        )

    def _node_of(self, name: str) -> str:
        """The node that a process was placed on. Raises HostGone."""
        placed = self._placed.get(name)
        if placed is None or placed.lost or placed.node not in {node.id for node in self._nodes()}:
            raise HostGone(name)
        return placed.node

    def expect(self, name: str) -> None:
        """See the Protocol."""
        placement = self.placements.of(name)
        times = 1 + sum(self.placements.of(other).needs == placement.needs for other in self._expected)
        nodes = self._nodes()
        if not any(placement.needs.within(node.free, times) for node in nodes):
            raise UsageError(f"there is no room for {name}: {self._lack(placement, nodes)}; end another process first")
        self._expected.add(name)

    async def release(self, name: str) -> None:
        """See the Protocol. Others may have what the actor held; a group that is placed at once goes with its last
        process, so that it is placed again."""
        import ray

        self.handles.pop(name, None)
        self.waiting.pop(name, None)
        if (placed := self._placed.pop(name, None)) is not None:
            if placed.silent:
                self._silent.add(placed.node)
            await self._close(placed)
        group = self.placements.of(name).group
        at_once = group in self._groups and self.placements.groups[group].near
        if at_once and not any(self.placements.of(other).group == group for other in self._placed):
            ray.util.remove_placement_group(self._groups.pop(group))

    async def spawn(self, spec: ProcessSpec) -> RayHandle:
        await self.place(spec.name)
        if lenders := self.placements.lenders(spec.name):
            gpus = tuple(filter(None, (self._placed[lender].gpus for lender in lenders)))
            spec = msgspec.structs.replace(spec, gpus=gpus)
        log = self.rundir.logs / f"{spec.name}.log"
        handle = self.handles[spec.name] = RayHandle(spec, self._placed[spec.name], log)
        self.rundir.write_pid(spec.name, await handle.start())
        return handle

    async def stop_all(self) -> None:
        import ray

        await super().stop_all()
        for placed in self._placed.values():
            await self._close(placed)
        self._placed.clear()
        for group in self._groups.values():
            ray.util.remove_placement_group(group)
        self._groups.clear()

    async def _close(self, placed: PlacedActor) -> None:
        if not placed.lost:
            with contextlib.suppress(*gone()):  # the next launcher there removes its files
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    await placed.actor.close.remote()
        placed.end()

    def _at_once(self, placement: ActorPlacement) -> bool:
        """Whether it belongs to a group that is placed at once or not at all: with the trainer on its node."""
        return bool(placement.group) and self.placements.groups[placement.group].near

    async def _where(self, name: str, placement: ActorPlacement, beside: str, *, again: bool) -> dict[str, Any] | None:
        """What to ask of Ray so that a process comes where it is to be. None: no node has room for it now."""
        config = self.placements.config
        if beside:
            return {"label_selector": {NODE_ID: self._node_of(beside)}}
        if self._at_once(placement):
            return {"scheduling_strategy": await self._bundle(self.placements.groups[placement.group], placement)}
        if placement.here:
            return {"label_selector": {NODE_ID: self._here.id}}
        if placement.group and not again:
            return {"label_selector": {NODE_ID: await self._plan(name, self.placements.groups[placement.group])}}
        if again:
            node = self._room(name, placement)
            if node is None or node in self._silent:  # try a silent node anyway: maybe only the process died
                self._wait(name, placement)
            return None if node is None else {"label_selector": {NODE_ID: node}}
        found = self._nodes()
        seat = self.placements.choose(placement.alone(name), found, self._of_its_kind(name, found))
        if placement.near:
            return {"label_selector": {NODE_ID: seat.node.id}}
        spread = {"scheduling_strategy": "SPREAD"} if config.ray.ray_placement == "spread" else {}
        return {"label_selector": seat.labels, **spread}

    def _room(self, name: str, placement: ActorPlacement) -> str | None:
        """A node with room for a process that was lost, if possible one that is heard of."""
        config, found = self.placements.config, self._nodes()
        pack = config.ray.ray_placement == "pack" and (placement.needs.cpus or placement.needs.gpus)
        alone = placement.alone(name, "PACK" if pack else "SPREAD")
        self._silent &= {node.id for node in found}
        fit = [node for node in found if not (name in self._sees and node.id in self._unfit)]
        lost = self._placed.get(name)
        before = lost.node if lost is not None else ""
        if placement.near and lost and not lost.missed and before in {node.id for node in fit} - self._silent:
            lost.missed = True  # it waits for the resources of the lost actor: Ray frees them a little later
            return before
        for nodes in ([node for node in fit if node.id not in self._silent], fit):
            seat = self.placements.seat_with_room(alone, nodes, "free", self._of_its_kind(name, found), before)
            if seat is not None and placement.near:
                return seat.node.id
            if seat is not None and (places := divide(alone, [n for n in nodes if matches(n.labels, seat.labels)])):
                return places[0].id
        return None

    def _of_its_kind(self, name: str, found: list[Node]) -> list[Node]:
        """Nodes of the other engines, if it is one."""
        kinds = ("engine", "eval-engine")
        if name.rpartition("-")[0] not in kinds:
            return []
        actors = [actor for peer, actor in self._placed.items() if peer.rpartition("-")[0] in kinds]
        used = {actor.node for actor in actors if not actor.lost}
        return [node for node in found if node.id in used]

    async def _plan(self, name: str, group: PlacementGroup) -> str:
        """The node on which a process of a group begins; planned for all with the first. Waits for what others hold."""
        if name not in self._planned:
            deadline = asyncio.get_running_loop().time() + PLACEMENT_TIMEOUT_S
            while True:
                found = self._beside_the_trainer()
                labels = self.placements.choose(group, found).labels
                places = divide(group, [node for node in found if matches(node.labels, labels)])
                if places is not None:
                    break
                if asyncio.get_running_loop().time() > deadline:
                    raise NotStarted
                await asyncio.sleep(ROOM_POLL_S)
            names = [other for other in self.placements.names() if self.placements.of(other).group == group.name]
            self._planned |= {other: node.id for other, node in zip(names, places, strict=True)}
        return self._planned[name]

    def _beside_the_trainer(self) -> list[Node]:
        """The nodes, less what the trainer takes of one of them as soon as it is placed."""
        found, trainer = self._nodes(), self.placements.trainer
        if trainer.name in self._groups or trainer.name in self._placed:
            return found
        seat = self.placements.seat_with_room(trainer, found, "free")
        if seat is None or "train-0" not in self.placements.names():
            return found
        taken = {"CPU": trainer.bundle.cpus, "GPU": trainer.bundle.gpus}
        free = {kind: seat.node.free.get(kind, 0) - count for kind, count in taken.items()}
        left = msgspec.structs.replace(seat.node, free=free)
        return [left if node.id == left.id else node for node in found]

    async def _bundle(self, group: PlacementGroup, placement: ActorPlacement) -> Any:
        """Where in its group a process goes; the group is made for the first of its processes."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if group.name not in self._groups:
            nodes = [node for node in self._nodes() if node.id not in self._silent]
            seat = self.placements.choose(group, nodes)
            need = {"CPU": group.bundle.cpus or 0.001, **({"GPU": group.bundle.gpus} if group.bundle.gpus else {})}
            selectors = [{NODE_ID: seat.node.id}, *(dict(seat.labels) for _ in range(group.bundles - 1))]
            bundles = [need] * group.bundles
            made = ray.util.placement_group(bundles, strategy=group.strategy, bundle_label_selector=selectors)
            if not await asyncio.to_thread(made.wait, PLACEMENT_TIMEOUT_S):
                ray.util.remove_placement_group(made)
                raise self._waited(group.name, placement)
            self._groups[group.name] = made
        return PlacementGroupSchedulingStrategy(self._groups[group.name], placement.bundle)

    def _waited(self, name: str, placement: ActorPlacement, why: str = "") -> UsageError:
        return UsageError(
            f"--runner ray: Ray started no actor for {name} within {PLACEMENT_TIMEOUT_S:g} s{why and f' ({why})'}: "
            f"{self._lack(placement, self._nodes())}; wait for what others use, or join more nodes (ray start "
            "--address)"
        )

    def _lack(self, placement: ActorPlacement, nodes: list[Node]) -> str:
        needs = placement.needs
        what = needs.words() if needs.cpus or needs.gpus else "a node"
        free = ", ".join(f"{node.address} ({node.free['CPU']:g} CPU, {node.free['GPU']:g} GPU)" for node in nodes)
        free = free or "none"
        return f"it needs {what}{self.placements.wanted_labels(placement.role)}, and free are {free}"
