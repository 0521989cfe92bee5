"""Nodes of a Ray cluster, and which of them have room for what belongs together. Pure, no Ray.

Invariant: labels are asked for in the order in which the user named them, and what is free before what others have to
give back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal

from msgspec import Struct

from configs.rules.placement import Labels, alternatives
from configs.schema import Config
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


def choose(
    config: Config, role: Role, group: PlacementGroup, nodes: Sequence[Node], others: Sequence[Node] = ()
) -> Seat:
    """By the first alternative of labels that free nodes can hold, else the first that the nodes can hold once others
    have given back what they took. Raises UsageError if none of them can."""
    for kind in ("free", "total"):
        if (seat := seat_with_room(config, role, group, nodes, kind, others)) is not None:
            return seat
    on = wanted_labels(config, role)
    raise UsageError(
        f"--runner ray: {group.name} needs {_wanted(group)}{on}, but the cluster has "
        f"{inventory(nodes)}; {CURE}{', or change --ray-labels' if on else ''}"
    )


def seat_with_room(
    config: Config,
    role: Role,
    group: PlacementGroup,
    nodes: Sequence[Node],
    kind: str,
    others: Sequence[Node] = (),
    before: str = "",
) -> Seat | None:
    """By the first alternative of labels that nodes can hold by what is free, or is there in total. `*` stands for one
    value that all nodes of a group have, such as an NVLink domain; `others`: those where parts of it are already. What
    goes near the controller goes to the node `before` where it was before, else to the controller's, else to the one
    with the least room."""

    def rank(node: Node) -> tuple[bool, bool, float, float]:
        there: Mapping[str, float] = getattr(node, kind)
        return node.id != before, not node.here, there.get("GPU", 0), there.get("CPU", 0)

    for wanted in alternatives(config, role):
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


def wanted_labels(config: Config, role: Role) -> str:
    """In words, empty for any."""
    on = " or ".join(_text(labels) for labels in alternatives(config, role) if labels)
    return f" with {on}" if on else ""


def divide(group: PlacementGroup, nodes: Sequence[Node]) -> list[Node] | None:
    """The node of each bundle, by what is free; None if there is not the room. Packed: all on the one with the least
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
    return [wanted | dict(zip(keys, values, strict=True)) for values in sorted(room, key=lambda one: (room[one], one))]


def _wanted(group: PlacementGroup) -> str:
    if group.bundles == 1:
        return group.bundle.words()
    apart = ", each on a node of its own" if group.strategy == "STRICT_SPREAD" else ""
    return f"{group.bundles} x {group.bundle.words()}{apart}"


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
    if group.strategy == "STRICT_SPREAD":
        return sum(need.within(there) for there in have) >= count
    return sum(_times(need, there) for there in have) >= count


def _times(need: ResourceNeeds, there: Mapping[str, float]) -> int:
    """How many of them a node holds."""
    pairs = ((need.cpus, there.get("CPU", 0)), (need.gpus, there.get("GPU", 0)))
    return min((int(have / each) for each, have in pairs if each), default=_MANY)


def note(config: Config, role: Role, chosen: Labels) -> list[str]:
    """What to tell of labels that are not those of the first alternative."""
    wanted = alternatives(config, role)
    first = {key: chosen.get(key, ANY) if value == ANY else value for key, value in wanted[0].items()}
    if chosen == first:
        return []
    return [f"--ray-labels: no room for {role} on {_text(wanted[0])}; using {_text(chosen)}"]


def _text(labels: Labels) -> str:
    return ",".join(f"{key}={value}" for key, value in labels.items())


def inventory(nodes: Sequence[Node]) -> str:
    """In words."""
    several = f"{len(nodes)} nodes: " if len(nodes) != 1 else ""
    return several + ", ".join(node.words() for node in nodes)
