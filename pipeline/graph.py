"""The graph of a run: which stages there are, which streams join them. Pure; configs.rules.validate has listed its
faults.

    prompts -> generate -> [custom after generate] -> reward -> [custom after reward] -> (teacher) -> group -> train
                  ^  |                                                                                  |
                  |  v  loop stages (tools, agents): own inlet back into generate                       v
               evaluate  <------------------------------------------------------------------------ evaluate

Every stream has one consuming stage and is named `<stage>` or `<stage>.<inlet>`. The engines stage stands beside the
flow: it has no stream, and the others know the engines from what it publishes.

Invariant: the only cycles are the ones through a loop stage or the evaluation, which have inlets of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from configs.graph import evaluates, loops, path, replicas
from configs.schema import Config, StageConfig
from transport.spec import Routing

STAGES = {
    "engines": "stages.engines.stage:EnginesStage",
    "generate": "stages.generate.stage:GenerateStage",
    "tools": "stages.tools.stage:ToolStage",
    "reward": "stages.reward.stage:RewardStage",
    "teacher": "stages.teacher.stage:TeacherStage",
    "group": "stages.group.stage:GroupStage",
    "train": "stages.train.stage:TrainStage",
    "evaluate": "stages.evaluate.stage:EvaluateStage",
}
# Slices in work at once, where it is not the usual number: a teacher answers late and a multi-turn sample comes alone.
CONCURRENCY = {"teacher": 32}
SLICE = "stages.messages:RolloutSlice"
PROMPT = "stages.messages:PromptGroup"
REPORT = "stages.messages:Report"


@dataclass(frozen=True)
class Stream:
    """One edge: `producers` (stage, outlet) put messages of `schema` in, `consumer` (stage, inlet) takes them."""

    name: str
    schema: str
    consumer: tuple[str, str]
    producers: tuple[tuple[str, str], ...]
    feedback: bool = False
    routing: Routing = "least_loaded"


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

    def ends(self) -> tuple[Stream, ...]:
        """Streams in the order in which they may end: feedback first, then downstream, the settle stream last."""
        order = [node.name for node in self.nodes] + ["prompts"]  # nodes are listed in the order of the flow
        return tuple(sorted(self.streams, key=lambda s: (not s.feedback, order.index(s.consumer[0]))))


def build(config: Config) -> Graph:
    """The graph that a checked configuration describes."""
    names = [name for name in path(config) if name != "prompts"]
    if names == ["train"]:
        return _supervised()
    loop_names = list(loops(config))
    chain = names[: names.index("group") + 1]
    streams = [Stream("generate", PROMPT, ("generate", "in"), (("prompts", "out"),))]
    streams += [Stream(b, SLICE, (b, "in"), ((a, "out"),)) for a, b in pairwise(chain)]
    for name in loop_names:  # turns of a rollout go to one replica, which may keep what belongs to it in a cache
        turns = (("generate", f"loop.{name}"),)
        streams.append(Stream(name, SLICE, (name, "in"), turns, feedback=True, routing="sticky"))
    if loop_names:
        back = tuple((name, "out") for name in loop_names)
        streams.append(Stream("generate.return", SLICE, ("generate", "return"), back, feedback=True))
    streams.append(Stream("train", SLICE, ("train", "in"), (("group", "out"),)))
    reporters = [("group", "settle"), ("train", "settle")]
    nodes = ["engines", *names, *loop_names]  # of no stream: it holds the engines that the others ask
    if evaluates(config):
        nodes.append("evaluate")
        streams.append(Stream("generate.eval", PROMPT, ("generate", "eval"), (("evaluate", "out"),), feedback=True))
        streams.append(Stream("evaluate", SLICE, ("evaluate", "in"), (("group", "eval"),)))
        reporters.append(("evaluate", "settle"))
    streams.append(Stream("settle", REPORT, ("prompts", "settle"), tuple(reporters)))

    customs = {stage.name: stage for stage in config.stage}
    counts = replicas(config)
    return Graph(
        nodes=tuple(_node(name, customs.get(name), counts[name]) for name in nodes),
        streams=tuple(streams),
        loops=tuple(f"{name}={customs[name].path if name in customs else STAGES[name]}" for name in loop_names),
    )


def _node(name: str, custom: StageConfig | None, count: int) -> Node:
    if custom is None:
        return Node(name, STAGES[name], count, CONCURRENCY.get(name, Node.concurrency))
    return Node(name, custom.path, count, custom.concurrency, dict(custom.options))


def _supervised() -> Graph:
    """Supervised training is the same machine without engines: prompts -> train."""
    return Graph(
        nodes=(Node("train", STAGES["train"]),),
        streams=(
            Stream("train", SLICE, ("train", "in"), (("prompts", "out"),)),
            Stream("settle", REPORT, ("prompts", "settle"), (("train", "settle"),)),
        ),
        loops=(),
    )
