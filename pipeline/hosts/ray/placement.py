"""What each process of a run needs of a Ray cluster, and whether its nodes have that. Pure, no Ray.

Invariants:
- the train stage and rank 0 of a trainer group are on one node, the controller's where that has room for them: they
  meet at a socket; all that train see the run directory, where checkpoints are written;
- the evaluate stage, which reads the held-out data, and the engines stage are on the controller's node: to other nodes
  a fetcher brings the weights, so that engines may be on any;
- what is refused here can never start on these nodes: what only has to wait for others is not refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import Struct

from configs.graph import engine_count, frozen_engines, is_address, replicas
from configs.rules.placement import alternatives
from configs.schema import Config
from models.train.trainer_group.rank_spec import needs_trainer_group, processes_of
from pipeline.errors import UsageError
from pipeline.hosts.ray.nodes import CURE, Node, PlacementGroup, ResourceNeeds, Role, Strategy, choose, inventory, note

NODE_ID: Final = "ray.io/node-id"  # label that every node has
_DEFAULT_CPUS: Final[Mapping[str, int]] = {"train": 1, "rollout": 1, "cpu": 0}
_ROLES: Final[tuple[tuple[re.Pattern[str], Role], ...]] = (
    (re.compile(r"train-(rank-)?\d+"), "train"),
    (re.compile(r"engine-\d+|frozen-.*"), "rollout"),
)


class ActorPlacement(Struct, frozen=True):
    """Of one process: what it needs, and where. `group`: of which it takes a part of a bundle; empty: of none. `here`:
    on the controller's node; `near`: there if that has room for it."""

    role: Role
    needs: ResourceNeeds
    group: str = ""
    bundle: int = 0
    here: bool = False
    near: bool = False


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
            nodes = self._ranks // self._per_node
            found.append(PlacementGroup("trainer", "train", bundle, nodes, "STRICT_SPREAD", near=True))
        if self._engines:
            bundle = ResourceNeeds(self._engine.cpus + (self._rank.cpus if self.shared else 0), self._engine.gpus)
            strategy: Strategy = "PACK" if self.config.ray.ray_placement == "pack" else "SPREAD"
            role: Role = "train" if self.shared else "rollout"
            found.append(PlacementGroup("engines", role, bundle, self._engines, strategy, near=self.shared))
        return found

    def of(self, name: str) -> ActorPlacement:
        """Of the process of that name."""
        role, number = role_of(name), int(name.rpartition("-")[2]) if name[-1].isdigit() else 0
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
                return ActorPlacement(role, ResourceNeeds(self._rank.cpus, 0.5), "engines")
            return ActorPlacement(role, self._rank, near=True)
        if role == "rollout" and not name.startswith("frozen-") and self._engines:
            need = ResourceNeeds(self._engine.cpus, 0.5) if self.shared else self._engine
            if number < self._engines:
                return ActorPlacement(role, need, "engines", number)
            return ActorPlacement(role, need)  # one that came later has no bundle of its own
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
        if self.shared and alternatives(self.config, "rollout") not in (({},), alternatives(self.config, "train")):
            raise UsageError(
                "--ray-labels asks for other nodes for rollout than for train, but with --colocate the engine has the "
                "trainer's GPU; leave rollout out"
            )
        for group in self.groups.values():
            notes += note(self.config, group.role, choose(self.config, group.role, group, nodes).labels)
        for name in self.names():
            placement = self.of(name)
            role, needs = placement.role, placement.needs
            if placement.here:
                self._check_here(name, needs, nodes)
            elif not placement.group:
                alone = PlacementGroup(name, role, needs, 1, "PACK", placement.near)
                notes += note(self.config, role, choose(self.config, role, alone, nodes).labels)
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
        if self._ranks:
            return self.groups["trainer"]
        if self.shared:
            return self.groups["engines"]
        return PlacementGroup("train-0", "train", self._rank, 1, "PACK", near=True)
