"""The graph of a run: the stages of configs/graph.py with their classes, and who is joined to which stream. Pure;
configs.rules.validate has listed its faults.

The engines stage stands beside the flow: it has no stream, and the others know the engines from what it publishes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from configs.graph import Stream, evaluates, loops, path, replicas, streams
from configs.schema import Config, StageConfig

STAGES = {
    "engines": "stages.engines.stage:EnginesStage",
    "fetcher": "stages.engines.stage:FetcherStage",  # in no graph: one on each node with engines
    "generate": "stages.generate.stage:GenerateStage",
    "tools": "stages.tools.stage:ToolStage",
    "agents": "stages.agents.stage:AgentsStage",
    "reward": "stages.reward.stage:RewardStage",
    "teacher": "stages.teacher:TeacherStage",
    "group": "stages.group.stage:GroupStage",
    "train": "stages.train.stage:TrainStage",
    "evaluate": "stages.evaluate:EvaluateStage",
}
# Slices in work at once, where it is not the usual number: a teacher answers late and a multi-turn sample comes alone.
CONCURRENCY = {"teacher": 32}


@dataclass(frozen=True)
class Node:
    """One stage."""

    name: str
    path: str
    replicas: int = 1
    concurrency: int = 8
    options: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Graph:
    nodes: tuple[Node, ...]
    streams: tuple[Stream, ...]
    loops: tuple[str, ...]  # "name=import path", in the order generate asks them

    def node(self, name: str) -> Node:
        return next(n for n in self.nodes if n.name == name)

    def inlets(self, stage: str) -> dict[str, Stream]:
        return {s.consumer[1]: s for s in self.streams if s.consumer[0] == stage}

    def outlets(self, stage: str) -> dict[str, Stream]:
        return {outlet: s for s in self.streams for producer, outlet in s.producers if producer == stage}

    @property
    def loop(self) -> tuple[Stream, ...]:
        """Streams in which a rollout may go round between generate and the stages that return it."""
        fed = {s.consumer[0] for s in self.streams if s.feedback}
        return tuple(s for s in self.streams if s.consumer[0] in fed)

    def ends(self) -> tuple[Stream, ...]:
        """Streams in the order in which they may end: feedback first, then downstream, the settle stream last."""
        order = [node.name for node in self.nodes] + ["prompts"]  # nodes are listed in the order of the flow
        return tuple(sorted(self.streams, key=lambda s: (not s.feedback, order.index(s.consumer[0]))))


def build(config: Config) -> Graph:
    """The graph that a checked configuration describes."""
    names = [name for name in path(config) if name != "prompts"]
    engines = ["engines"] if "generate" in names else []  # of no stream: it holds the engines that the others ask
    nodes = [*engines, *names, *loops(config), *(["evaluate"] if evaluates(config) else [])]
    customs = {stage.name: stage for stage in config.stage}
    counts = replicas(config)
    return Graph(
        nodes=tuple(_node(name, customs.get(name), counts[name]) for name in nodes),
        streams=streams(config),
        loops=tuple(f"{name}={customs[name].path if name in customs else STAGES[name]}" for name in loops(config)),
    )


def _node(name: str, custom: StageConfig | None, count: int) -> Node:
    if custom is None:
        return Node(name, STAGES[name], count, CONCURRENCY.get(name, Node.concurrency))
    return Node(name, custom.path, count, custom.concurrency, dict(custom.options))
