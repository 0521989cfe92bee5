"""What each process of a run needs of a Ray cluster, and whether its nodes have that. Pure, no Ray.

Invariants:
- the train stage, and rank 0 of a trainer group, are on the controller's node: checkpoints and journal are written
  there, and rank 0 meets the stage at a socket; so is the evaluate stage, which reads the held-out data;
- engines whose weights come through memory or files of their host are on one node, together with the engines stage,
  which brings the weights there;
- what is refused here can never start on these nodes: what only has to wait for others is not refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final, Literal

from msgspec import Struct

from configs.graph import engine_count, frozen_engines, is_address, replicas
from configs.rules.ray import Labels, alternatives
from configs.schema import Config
from models.train.trainer_group.rank_spec import needs_trainer_group, processes_of
from pipeline.errors import UsageError

Role = Literal["train", "rollout", "cpu"]
Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
ANY: Final = "*"  # a value that all nodes of a group share, whichever it is
NODE_ID: Final = "ray.io/node-id"  # label that every node has
_DEFAULT_CPUS: Final[Mapping[str, int]] = {"train": 1, "rollout": 1, "cpu": 0}
_ROLES: Final[tuple[tuple[re.Pattern[str], Role], ...]] = (
    (re.compile(r"train-(rank-)?\d+|evaluate-\d+"), "train"),
    (re.compile(r"engines?-\d+|frozen-.*"), "rollout"),
)
_THROUGH_THE_HOST: Final = ("disk", "tensor")  # routes of the weights that engines of one host share


class Node(Struct, frozen=True):
    """A node of the cluster that is alive. `free`: what nobody has taken of `total`; `here`: the controller's."""

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
    """Equal bundles that are placed at once or not at all. `here`: the first is on the controller's node."""

    name: str
    role: Role
    bundle: ResourceNeeds
    bundles: int
    strategy: Strategy
    here: bool = False


class ActorPlacement(Struct, frozen=True):
    """Of one process: what it needs, and where. `group`: of which it takes a part of a bundle; empty: of none."""

    role: Role
    needs: ResourceNeeds
    group: str = ""
    bundle: int = 0
    here: bool = False


def role_of(name: str) -> Role:
    return next((role for pattern, role in _ROLES if pattern.fullmatch(name)), "cpu")


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
        if self._ranks:
            bundle = ResourceNeeds(self._rank.cpus * self._per_node, self._rank.gpus * self._per_node)
            found.append(
                PlacementGroup("trainer", "train", bundle, self._ranks // self._per_node, "STRICT_SPREAD", here=True)
            )
        if self._engines:
            bundle = ResourceNeeds(self._engine.cpus + (self._rank.cpus if self.shared else 0), self._engine.gpus)
            together = self.config.update.update_weight_transport in _THROUGH_THE_HOST
            strategy: Strategy = "PACK" if self.config.ray.ray_placement == "pack" else "SPREAD"
            found.append(
                PlacementGroup(
                    "engines", "rollout", bundle, self._engines, "STRICT_PACK" if together else strategy, self.shared
                )
            )
        return found

    def of(self, name: str) -> ActorPlacement:
        """Of the process of that name."""
        role, number = role_of(name), int(name.rpartition("-")[2]) if name[-1].isdigit() else 0
        if role == "train":
            if name.startswith("evaluate-"):
                return ActorPlacement(role, self._cpu, here=True)
            if name.startswith("train-rank-"):
                return ActorPlacement(role, self._rank, "trainer", number // self._per_node)
            if self._ranks:
                return ActorPlacement(role, ResourceNeeds(), here=True)
            if self.shared:
                return ActorPlacement(role, ResourceNeeds(self._rank.cpus, 0.5), "engines")
            return ActorPlacement(role, self._rank, here=True)
        if role == "rollout" and not name.startswith("frozen-") and self._engines:
            if name.startswith("engines-"):
                return ActorPlacement(role, ResourceNeeds(), "engines")
            need = ResourceNeeds(self._engine.cpus, 0.5) if self.shared else self._engine
            # One that came later has no bundle of its own, but the node of the others.
            return ActorPlacement(role, need, "engines", number if number < self._engines else -1)
        return ActorPlacement(role, self._engine if role == "rollout" else self._cpu)

    def names(self) -> list[str]:
        """Processes that the run starts with."""
        counts = {name: count for name, count in replicas(self.config).items() if name != "prompts"}
        if self.config.sglang.rollout_external_engine_addrs:
            counts.pop("engine", None)
        found = [f"{name}-{i}" for name, count in counts.items() for i in range(count)]
        found += [f"train-rank-{rank}" for rank in range(self._ranks)]
        frozen = frozen_engines(self.config).items()
        return found + [f"frozen-{name}" for name, place in frozen if not is_address(place)]

    @property
    def total(self) -> ResourceNeeds:
        """Of all processes of the run's start together."""
        needs = [self.of(name).needs for name in self.names()]
        return ResourceNeeds(sum(need.cpus for need in needs), sum(need.gpus for need in needs))

    def check(self, nodes: Sequence[Node]) -> list[str]:
        """What the user should know of the placement. Raises UsageError for what these nodes can never hold."""
        notes = []
        for group in self.groups.values():
            chosen = choose(self.config, group.role, group, nodes)
            notes += _note(self.config, group.role, chosen)
        for name in self.names():
            placement = self.of(name)
            if not placement.group:
                alone = PlacementGroup(name, placement.role, placement.needs, 1, "PACK", placement.here)
                notes += _note(self.config, placement.role, choose(self.config, placement.role, alone, nodes))
        have = {kind: sum(node.total.get(kind, 0) for node in nodes) for kind in ("CPU", "GPU")}
        if not self.total.within(have):
            raise UsageError(
                f"--runner ray: all processes of the run together need {self.total.words()}, but the cluster has "
                f"{_inventory(nodes)}; {_CURE}"
            )
        return list(dict.fromkeys(notes))


_CURE: Final = (
    "join more nodes (ray start --address), or lower --ray-cpus, --actor-num-gpus-per-node, --rollout-num-gpus or "
    "--scale"
)


def choose(config: Config, role: Role, group: PlacementGroup, nodes: Sequence[Node]) -> Labels:
    """The labels to ask for: the first alternative that free nodes can hold, else the first that the nodes can hold
    once others have given back what they took. `*` stands for one value that all nodes of the group have, such as an
    NVLink domain. Raises UsageError if none of them can."""
    wanted = alternatives(config, role)
    for kind in ("free", "total"):
        for labels in (one for alternative in wanted for one in _with_values(alternative, nodes, kind)):
            if fits(group, [node for node in nodes if matches(node.labels, labels)], kind):
                return labels
    on = " or ".join(_text(labels) for labels in wanted if labels)
    raise UsageError(
        f"--runner ray: {group.name} needs {_wanted(group)}{f' with {on}' if on else ''}, but the cluster has "
        f"{_inventory(nodes)}; {_CURE}{', or change --ray-labels' if on else ''}"
    )


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
    return [wanted | dict(zip(keys, values, strict=True)) for values in sorted(room, key=lambda one: (room[one], one))]


def _wanted(group: PlacementGroup) -> str:
    if group.bundles == 1:
        return group.bundle.words() + (" on the controller's node" if group.here else "")
    where = {"STRICT_PACK": ", all on one node", "STRICT_SPREAD": ", each on a node of its own"}
    here = ", the first on the controller's" if group.here else ""
    return f"{group.bundles} x {group.bundle.words()}{where.get(group.strategy, '')}{here}"


def matches(labels: Labels, wanted: Labels) -> bool:
    """A value with ! before it is one that the node must not have."""
    return all(
        labels.get(key) != value[1:] if value.startswith("!") else labels.get(key) == value
        for key, value in wanted.items()
    )


def fits(group: PlacementGroup, nodes: Sequence[Node], kind: str) -> bool:
    """Whether the nodes can hold the group, by what is necessary for it; Ray decides what is sufficient."""
    have = [getattr(node, kind) for node in nodes]
    need, count = group.bundle, group.bundles
    if group.here and not any(node.here and need.within(getattr(node, kind)) for node in nodes):
        return False
    match group.strategy:
        case "STRICT_PACK":
            return any(need.within(there, count) for there in have)
        case "STRICT_SPREAD":
            return sum(need.within(there) for there in have) >= count
    if not (need.cpus or need.gpus):
        return bool(have)
    return sum(_times(need, there) for there in have) >= count


def _times(need: ResourceNeeds, there: Mapping[str, float]) -> int:
    """How many of them a node holds."""
    pairs = ((need.cpus, there.get("CPU", 0)), (need.gpus, there.get("GPU", 0)))
    return min(int(have / each) for each, have in pairs if each)


def _note(config: Config, role: Role, chosen: Labels) -> list[str]:
    wanted = alternatives(config, role)
    first = {key: chosen.get(key, ANY) if value == ANY else value for key, value in wanted[0].items()}
    if chosen == first:
        return []
    return [f"--ray-labels: no room for {role} on {_text(wanted[0])}; using {_text(chosen)}"]


def _text(labels: Labels) -> str:
    return ",".join(f"{key}={value}" for key, value in labels.items())


def _inventory(nodes: Sequence[Node]) -> str:
    several = f"{len(nodes)} nodes: " if len(nodes) != 1 else ""
    return several + ", ".join(node.words() for node in nodes)
