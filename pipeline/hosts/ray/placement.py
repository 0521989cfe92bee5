"""Which resources each process of a run needs in a Ray cluster, and which nodes have room. No Ray, no I/O, no clock.

Invariants:
- the train stage and rank 0 of a trainer group are on one node, since they meet at a socket; the controller's node if
  that has room for them. All that train see the run directory, where checkpoints are written;
- the evaluate stage, which reads the held-out data, and the engines stage are on the controller's node; engines may be
  on any node, a fetcher brings the weights there;
- labels are tried in the order in which the user named them, free resources before those that must be released;
- a refused run can never start on these nodes; a run that only has to wait for others is not refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final, Literal

from msgspec import Struct

from configs.graph import engine_count, evaluation_engines, frozen_engines, is_address, joined_to, replicas
from configs.rules.placement import Labels, alternatives
from configs.schema import Config
from models.train.trainer_group.rank_spec import needs_trainer_group, processes_of
from pipeline.errors import UsageError

Role = Literal["train", "rollout", "cpu"]
Strategy = Literal["PACK", "SPREAD", "STRICT_SPREAD"]
ANY: Final = "*"  # a value that all nodes of a group share, whichever it is
_MANY: Final = 1 << 20
CURE: Final = (
    "join more nodes (ray start --address), or lower --ray-cpus, --actor-num-gpus-per-node, --rollout-num-gpus or "
    "--scale"
)


class Node(Struct, frozen=True):
    """A node of the cluster that is alive. `free`: the untaken part of `total`; `here`: the controller's."""

    id: str
    address: str
    total: Mapping[str, float]
    free: Mapping[str, float]
    labels: Labels
    here: bool = False

    def words(self) -> str:
        labels = "".join(f", {key}={value}" for key, value in sorted(self.labels.items()) if "ray.io/" not in key)
        return f"{self.address} ({self.total.get('CPU', 0):g} CPU, {self.total.get('GPU', 0):g} GPU{labels})"


class ResourceNeeds(Struct, frozen=True):
    """Of one process, or of all processes in one bundle of a group."""

    cpus: float = 0
    gpus: float = 0

    def within(self, there: Mapping[str, float], times: int = 1) -> bool:
        return self.cpus * times <= there.get("CPU", 0) and self.gpus * times <= there.get("GPU", 0)

    def words(self) -> str:
        parts = [f"{count:g} {kind}" for count, kind in ((self.cpus, "CPU"), (self.gpus, "GPU")) if count]
        return " and ".join(parts) or "nothing"


class PlacementGroup(Struct, frozen=True):
    """Equal bundles that are placed at once or not at all. `near`: the first is the trainer's, on the controller's node
    where that has room for it."""

    name: str
    role: Role
    bundle: ResourceNeeds
    bundles: int
    strategy: Strategy
    near: bool = False


class Seat(Struct, frozen=True):
    """Labels that nodes with room for a group have, and the node on which it begins."""

    labels: Labels
    node: Node


def divide(group: PlacementGroup, nodes: Sequence[Node]) -> list[Node] | None:
    """The node of each bundle, by free resources; None if there is no room. Packed: all on the one with the least
    room that holds them, else on as few as have it; spread: on as many as there are."""
    room = {node.id: min(_times(group.bundle, node.free), group.bundles) for node in nodes}
    if sum(room.values()) < group.bundles:
        return None
    order = sorted(nodes, key=lambda node: (node.free.get("GPU", 0), node.free.get("CPU", 0), not node.here))
    if group.strategy != "SPREAD":
        whole = [node for node in order if room[node.id] == group.bundles]
        order = whole or sorted(order, key=lambda node: -room[node.id])
        return [node for node in order for _ in range(room[node.id])][: group.bundles]
    rounds = [(turn, node) for turn in range(group.bundles) for node in reversed(order) if turn < room[node.id]]
    return [node for _, node in rounds][: group.bundles]


def _with_values(wanted: Labels, nodes: Sequence[Node], kind: str) -> list[Labels]:
    """The labels with each value that could stand for their `*`, the one with the least room first: what is left over
    elsewhere stays whole for others."""
    keys = [key for key, value in wanted.items() if value == ANY]
    if not keys:
        return [wanted]
    room: dict[tuple[str, ...], tuple[float, float]] = {}
    for node in nodes:
        if all(key in node.labels for key in keys):
            there: Mapping[str, float] = getattr(node, kind)
            values = tuple(node.labels[key] for key in keys)
            gpus, cpus = room.get(values, (0.0, 0.0))
            room[values] = gpus + there.get("GPU", 0), cpus + there.get("CPU", 0)
    by_room = sorted(room, key=lambda values: (room[values], values))
    return [wanted | dict(zip(keys, values, strict=True)) for values in by_room]


def matches(labels: Labels, wanted: Labels) -> bool:
    """A value with ! before it is one that the node must not have."""
    return all(
        labels.get(key) != value[1:] if value.startswith("!") else labels.get(key) == value
        for key, value in wanted.items()
    )


def fits(group: PlacementGroup, nodes: Sequence[Node], kind: str) -> bool:
    """Whether the nodes can hold the group, by necessary conditions; Ray decides on sufficient ones."""
    have = [getattr(node, kind) for node in nodes]
    need, count = group.bundle, group.bundles
    if group.strategy == "STRICT_SPREAD":
        return sum(need.within(there) for there in have) >= count
    return sum(_times(need, there) for there in have) >= count


def _times(need: ResourceNeeds, there: Mapping[str, float]) -> int:
    """How many of them a node holds."""
    pairs = ((need.cpus, there.get("CPU", 0)), (need.gpus, there.get("GPU", 0)))
    return min((int(have / each) for each, have in pairs if each), default=_MANY)


def _text(labels: Labels) -> str:
    return ",".join(f"{key}={value}" for key, value in labels.items())


def inventory(nodes: Sequence[Node]) -> str:
    several = f"{len(nodes)} nodes: " if len(nodes) != 1 else ""
    return several + ", ".join(node.words() for node in nodes)


NODE_ID: Final = "ray.io/node-id"  # label that every node has
_DEFAULT_CPUS: Final[Mapping[str, int]] = {"train": 1, "rollout": 1, "cpu": 0}


class ActorPlacement(Struct, frozen=True):
    """Needs and place of one process. `group`: the group whose bundle it shares; empty: none. `here`:
    on the controller's node; `near`: there if that has room for it."""

    role: Role
    needs: ResourceNeeds
    group: str = ""
    bundle: int = 0
    here: bool = False
    near: bool = False

    def alone(self, name: str, strategy: Strategy = "PACK") -> PlacementGroup:
        """The process as a group of its own."""
        return PlacementGroup(name, self.role, self.needs, 1, strategy, self.near)


class RayPlacement:
    """Of all processes of a run. `gpus`: whether the cluster has any; `auto` takes one only then."""

    def __init__(self, config: Config, *, gpus: bool) -> None:
        self.config = config
        cpus = {**_DEFAULT_CPUS, **config.ray.ray_cpus}
        self._cpu = ResourceNeeds(cpus["cpu"])
        self._rank = ResourceNeeds(cpus["train"], 1 if self._trains_on_gpu(gpus) else 0)
        self._engine = ResourceNeeds(cpus["rollout"], self._engine_gpus(gpus))
        self._ranks = processes_of(config.parallel) if needs_trainer_group(config) else 0
        self._engines = engine_count(config) if not config.sglang.rollout_external_engine_addrs else 0
        self._per_node = config.parallel.actor_num_gpus_per_node
        self.shared = bool(config.asynchrony.colocate and self._rank.gpus and self._engine.gpus)
        self.groups = {group.name: group for group in self._groups()}

    def choose(self, group: PlacementGroup, nodes: Sequence[Node], others: Sequence[Node] = ()) -> Seat:
        """By the first alternative of labels that free nodes can hold, else the first that nodes can hold once others
        have given back what they took. Raises UsageError if none of them can."""
        for kind in ("free", "total"):
            if (seat := self.seat_with_room(group, nodes, kind, others)) is not None:
                return seat
        on, apart = (
            self.wanted_labels(group.role),
            ", each on a node of its own" if group.strategy == "STRICT_SPREAD" else "",
        )
        needed = group.bundle.words() if group.bundles == 1 else f"{group.bundles} x {group.bundle.words()}{apart}"
        raise UsageError(
            f"--runner ray: {group.name} needs {needed}{on}, but the cluster has "
            f"{inventory(nodes)}; {CURE}{', or change --ray-labels' if on else ''}"
        )

    def seat_with_room(
        self, group: PlacementGroup, nodes: Sequence[Node], kind: str, others: Sequence[Node] = (), before: str = ""
    ) -> Seat | None:
        """By the first alternative of labels that nodes can hold, by free or by total resources. `*` stands for one
        value that all nodes of a group have, such as an NVLink domain; `others`: those where parts of it are already.
        What goes near the controller goes to the node `before` where it was before, else to the controller's, else to
        the one with the least room."""

        def rank(node: Node) -> tuple[bool, bool, float, float]:
            there: Mapping[str, float] = getattr(node, kind)
            return node.id != before, not node.here, there.get("GPU", 0), there.get("CPU", 0)

        for wanted in alternatives(self.config, group.role):
            fixed = {k: others[0].labels.get(k, v) if v == ANY and others else v for k, v in wanted.items()}
            seats = []
            for labels in _with_values(fixed, nodes, kind):
                found = [node for node in nodes if matches(node.labels, labels)]
                if fits(group, found, kind):
                    room = [node for node in found if group.bundle.within(getattr(node, kind))]
                    seats.append(Seat(labels, min(room, key=rank)))
            if seats:
                return min(seats, key=lambda seat: rank(seat.node)[:2]) if group.near else seats[0]
        return None

    def wanted_labels(self, role: Role) -> str:
        """In words, empty for any."""
        on = " or ".join(_text(labels) for labels in alternatives(self.config, role) if labels)
        return f" with {on}" if on else ""

    def _note(self, role: Role, chosen: Labels) -> list[str]:
        """The notice about labels that are not those of the first alternative."""
        wanted = alternatives(self.config, role)
        first = {key: chosen.get(key, ANY) if value == ANY else value for key, value in wanted[0].items()}
        if chosen == first:
            return []
        return [f"--ray-labels: no room for {role} on {_text(wanted[0])}; using {_text(chosen)}"]

    def _trains_on_gpu(self, gpus: bool) -> bool:
        train = self.config.train
        wanted = train.train_device == "cuda" or (train.train_device == "auto" and gpus)
        return wanted and train.train_backend != "simulated"

    def _engine_gpus(self, gpus: bool) -> int:
        engine, sglang = self.config.engine, self.config.sglang
        if engine.engine == "sglang":
            return sglang.rollout_num_gpus_per_engine if gpus or sglang.rollout_num_gpus is not None else 0
        device = engine.engine_device
        return 1 if engine.engine == "embedded" and (device == "cuda" or (device == "auto" and gpus)) else 0

    def _groups(self) -> list[PlacementGroup]:
        found = []
        if ranks := self._ranks or int(self.shared):
            engines = self._per_node // self._engine.gpus if self.shared else 0
            cpus = self._rank.cpus * self._per_node + self._engine.cpus * engines
            bundle = ResourceNeeds(cpus, self._rank.gpus * self._per_node)
            nodes = ranks // self._per_node
            found.append(PlacementGroup("trainer", "train", bundle, nodes, "STRICT_SPREAD", near=True))
        count = self._engines + evaluation_engines(self.config).count("")
        if count and not self.shared:
            strategy: Strategy = "PACK" if self.config.ray.ray_placement == "pack" else "SPREAD"
            found.append(PlacementGroup("engines", "rollout", self._engine, count, strategy))
        return found

    def of(self, name: str) -> ActorPlacement:
        """Of the process of that name."""
        rollout: Role = "rollout" if re.fullmatch(r"(eval-)?engine-\d+|frozen-.*", name) else "cpu"
        role: Role = "train" if re.fullmatch(r"train-(rank-)?\d+", name) else rollout
        number = int(name.rpartition("-")[2]) if name[-1].isdigit() else 0
        if name.startswith("evaluate-"):
            return ActorPlacement(role, self._cpu, here=True)
        if name.startswith("engines-"):
            return ActorPlacement(role, ResourceNeeds(), here=True)
        if name.startswith("train-rank-"):
            return ActorPlacement(role, self._rank, "trainer", number // self._per_node)
        if role == "train":
            if self._ranks:  # beside rank 0
                return ActorPlacement(role, ResourceNeeds(), "trainer")
            if self.shared:
                return ActorPlacement(role, self._rank, "trainer")
            return ActorPlacement(role, self._rank, near=True)
        frozen, evaluates = name.startswith("frozen-"), name.startswith("eval-")
        if role == "rollout" and not frozen and (evaluates or number < self._engines):
            if self.shared:
                node = number * int(self._engine.gpus) // self._per_node
                return ActorPlacement(role, ResourceNeeds(self._engine.cpus), "trainer", node)
            return ActorPlacement(role, self._engine, "engines")  # a later process has no bundle
        return ActorPlacement(role, self._engine if role == "rollout" else self._cpu)

    def lenders(self, name: str) -> list[str]:
        """Processes of the trainer whose GPUs an engine has in turns with them: Ray counts each GPU once, as theirs."""
        if not (self.shared and self.of(name).group and self.of(name).role == "rollout"):
            return []
        gpus, number = int(self._engine.gpus), int(name.rpartition("-")[2])
        return [f"train-rank-{number * gpus + i}" for i in range(gpus)] if self._ranks else ["train-0"]

    def names(self) -> list[str]:
        """Processes that the run starts with."""
        counts = replicas(self.config)
        elsewhere = {"prompts", *joined_to(self.config, counts)}
        elsewhere |= {"engine"} if self.config.sglang.rollout_external_engine_addrs else set()
        found = [f"{name}-{i}" for name, count in counts.items() if name not in elsewhere for i in range(count)]
        found += [f"train-rank-{rank}" for rank in range(self._ranks)]
        frozen = frozen_engines(self.config).items()
        found += [f"eval-engine-{i}" for i, place in enumerate(evaluation_engines(self.config)) if not place]
        return found + [f"frozen-{name}" for name, place in frozen if not is_address(place)]

    @property
    def total(self) -> ResourceNeeds:
        """Of all processes of the run's start together."""
        needs = [self.of(name).needs for name in self.names()]
        return ResourceNeeds(sum(need.cpus for need in needs), sum(need.gpus for need in needs))

    def check(self, nodes: Sequence[Node]) -> list[str]:
        """What the user should know of the placement. Raises UsageError for what these nodes can never hold."""
        notes = []
        if self.shared and alternatives(self.config, "rollout") not in (({},), alternatives(self.config, "train")):
            raise UsageError(
                "--ray-labels gives other nodes to rollout than to train, but with --colocate the engine has the "
                "trainer's GPU; leave rollout out"
            )
        for group in self.groups.values():
            notes += self._note(group.role, self.choose(group, nodes).labels)
        for name in self.names():
            placement = self.of(name)
            if placement.here:
                self._check_here(name, placement.needs, nodes)
            elif not placement.group:
                alone = placement.alone(name)
                notes += self._note(alone.role, self.choose(alone, nodes).labels)
        have = {kind: sum(node.total.get(kind, 0) for node in nodes) for kind in ("CPU", "GPU")}
        if not self.total.within(have):
            raise UsageError(
                f"--runner ray: all processes of the run together need {self.total.words()}, but the cluster has "
                f"{inventory(nodes)}; {CURE}"
            )
        return list(dict.fromkeys(notes))

    def _check_here(self, name: str, needs: ResourceNeeds, nodes: Sequence[Node]) -> None:
        if not any(node.here and needs.within(node.total) for node in nodes):
            raise UsageError(
                f"--runner ray: {name} needs {needs.words()} on the controller's node, but the cluster has "
                f"{inventory(nodes)}; lower --ray-cpus, or start the run on another node"
            )

    @property
    def trainer(self) -> PlacementGroup:
        """What is placed with the trainer at once."""
        if "trainer" in self.groups:
            return self.groups["trainer"]
        return PlacementGroup("train-0", "train", self._rank, 1, "PACK", near=True)
