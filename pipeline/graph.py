"""The graph of a run: the stages of configs/graph.py with their classes, their streams, and how much a stream holds. No
I/O, no clock; configs.rules.validate has listed its faults.

The engines stage stands beside the flow: it has no stream, and other stages find the engines on the topic.

What is in flight is bounded by the staleness gate, in groups. A hub with a smaller bound of its own, in messages or in
bytes, would stop a run: the stages that join (group, train) hold messages until the last part has come, and the last
part would wait for room that those messages take.

Invariants: a hub takes everything that the gate admits, whatever its size; one message may hold a whole group of the
longest rollouts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from configs.graph import Stream, evaluates, loops, path, replicas, streams
from configs.schema import Config, StageConfig
from stages.staleness_gate import StalenessGate
from transport import StreamSpec
from transport.spec import Routing

STAGES = {
    "engines": "stages.engines.stage:EnginesStage",
    "fetcher": "stages.engines.stage:FetcherStage",  # in no graph: one on each node with engines
    "generate": "stages.generate.stage:GenerateStage",
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
    loops: tuple[str, ...]  # "name=import path", in the order in which generate calls them

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
    engines = ["engines"] if "generate" in names else []  # without a stream: it holds the engines
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


UNBOUNDED_BYTES: Final = 1 << 60
LEAST_MESSAGE_BYTES: Final = 64 << 20
# Of one token of a sample: id, loss mask, log-prob, a teacher's log-prob, and up to four bytes of text twice (response,
# and what a tool adds to the row's metadata).
TOKEN_BYTES: Final = 4 + 1 + 4 + 4 + 8
# Of the extras of one token: the choices of experts of 64 layers with 8 each, int32.
TOKEN_EXTRAS_BYTES: Final = 64 * 8 * 4
SAMPLE_BYTES: Final = 64 << 10  # of one sample beside its tokens, and its part of the prompt's row
SAMPLE_EXTRAS_BYTES: Final = 4 << 20  # of its extras that do not grow with its tokens: an image


def stream_spec(
    config: Config, gate: StalenessGate, name: str, address: str, routing: Routing = "least_loaded"
) -> StreamSpec:
    """The stream `name`, of which every message that the gate lets out may be in one hub."""
    members = config.rollout.n_samples_per_prompt
    return StreamSpec(
        name=name,
        address=address,
        routing=routing,
        # Twice, because a lost replica's work may come a second time before the first is released.
        capacity_items=gate.most_open * members * 2 + 10_000,
        capacity_bytes=UNBOUNDED_BYTES,
        max_message_bytes=message_bytes(members, config.rollout.rollout_max_context_len),
    )


def message_bytes(members: int, context: int | None) -> int:
    """Bytes of a slice that holds a whole group of rollouts as long as the context, extras included; 64 MiB at least,
    and without a context."""
    tokens = (context or 0) * (TOKEN_BYTES + TOKEN_EXTRAS_BYTES)
    return max(LEAST_MESSAGE_BYTES, members * (tokens + SAMPLE_BYTES + SAMPLE_EXTRAS_BYTES))
