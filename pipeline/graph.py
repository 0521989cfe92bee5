"""The graph of a run: its stages with their classes, its streams and how much they hold; then what each process is, as
specifications of replicas and engines. configs.rules.validate has listed the faults of the graph.

The engines stage stands beside the flow: it has no stream, and other stages find the engines on the topic.

What is in flight is bounded by the staleness gate, in groups. A hub with a smaller bound of its own, in messages or in
bytes, would stop a run: the stages that join (group, train) hold messages until the last part has come, and the last
part would wait for room that those messages take.

Invariants: a hub takes everything that the gate admits, whatever its size; one message may hold a whole group of the
longest rollouts; a stage that joins has a window as large as everything that can be out, in items and in bytes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from configs import graph as flow
from configs.graph import Stream
from configs.schema import Config, StageConfig, served_checkpoint
from models.engines.access_token import TokenFile, read_token, run_token
from models.fault_injection import FaultPlan, fault_plan
from models.import_path import import_path
from models.train.trainer_group.rank_spec import needs_trainer_group, processes_of
from pipeline.errors import UsageError
from pipeline.facts.run_directory import EngineSpec, RunDir
from pipeline.hosts.machine import check_trainer_group, engines_gpus, gpus_to_divide
from pipeline.hosts.worker import UNBOUNDED_BYTES, PortSpec, ReplicaSpec
from stages.base import GenerateOptions, StageOptions, TrainOptions
from stages.staleness_gate import StalenessGate
from transport import StreamSpec

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
    names = [name for name in flow.path(config) if name != "prompts"]
    engines = ["engines"] if "generate" in names else []  # without a stream: it holds the engines
    nodes = [*engines, *names, *flow.loops(config), *(["evaluate"] if flow.evaluates(config) else [])]
    customs = {stage.name: stage for stage in config.stage}
    counts = flow.replicas(config)
    return Graph(
        nodes=tuple(_node(name, customs.get(name), counts[name]) for name in nodes),
        streams=flow.streams(config),
        loops=tuple(f"{name}={customs[name].path if name in customs else STAGES[name]}" for name in flow.loops(config)),
    )


def _node(name: str, custom: StageConfig | None, count: int) -> Node:
    if custom is None:
        return Node(name, STAGES[name], count, CONCURRENCY.get(name, Node.concurrency))
    return Node(name, custom.path, count, custom.concurrency, dict(custom.options))


LEAST_MESSAGE_BYTES: Final = 64 << 20
# Of one token of a sample: id, loss mask, log-prob, a teacher's log-prob, and up to four bytes of text twice (response,
# and what a tool adds to the row's metadata).
TOKEN_BYTES: Final = 4 + 1 + 4 + 4 + 8
# Of the extras of one token: the choices of experts of 64 layers with 8 each, int32.
TOKEN_EXTRAS_BYTES: Final = 64 * 8 * 4
SAMPLE_BYTES: Final = 64 << 10  # of one sample beside its tokens, and its part of the prompt's row
SAMPLE_EXTRAS_BYTES: Final = 4 << 20  # of its extras that do not grow with its tokens: an image


def stream_spec(config: Config, gate: StalenessGate, stream: Stream, address: str) -> StreamSpec:
    """The stream, of which every message that the gate lets out may be in one hub."""
    members = config.rollout.n_samples_per_prompt
    return StreamSpec(
        name=stream.name,
        address=address,
        routing=stream.routing,
        producers=frozenset(stage for stage, _ in stream.producers),
        consumers=frozenset({stream.consumer[0]}),
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


_BYTES_A_THREAD = 4 << 20  # a million parameters
_MANY = 1 << 10
JOINERS = ("group", "train", "evaluate")
HOLDERS = (*JOINERS, "agents")  # hold all groups that the gate admits, while they wait for parts, or for environments


class Placement:
    """Addresses and replica specifications of one run on one machine."""

    def __init__(
        self, config: Config, rundir: RunDir, train: TrainOptions, generation: GenerateOptions, host: str | None = None
    ) -> None:
        """`host`: of the controller, for processes on other hosts. Raises UsageError for what does not fit on one
        host."""
        check_trainer_group(config)
        self.config, self.rundir, self.host = config, rundir, host or ""
        graph = self.graph = build(config)
        in_process, remote = config.run.runner == "inprocess", f"tcp://{host}:0"

        def address(place: str, *, tasks: bool) -> str:
            if host is not None:
                return remote
            return f"inproc://{rundir.run_id}-{place}" if tasks else f"ipc://{rundir.sockets / place}.sock"

        # Where they are bound: with port 0, what they report is where they are found.
        self.addresses = {s.name: address(str(i), tasks=in_process) for i, s in enumerate(graph.streams)}
        # Ranks are processes beside the tasks of one process too, and have their work from the topic.
        self.topic = address("topic", tasks=in_process and not needs_trainer_group(config))
        self.schemas: dict[str, Any] = {s.name: import_path(s.schema) for s in graph.streams}
        self.run_generation = train.run_generation
        file = config.sglang.rollout_external_engine_token_file
        self.external_token = read_token(Path(file).expanduser()) if file is not None else None
        engines, beside = _engines(config)
        self.engines = [self._disturbed(self._guarded(spec)) for spec in engines]
        self.beside = [self._guarded(spec) for spec in beside]  # engines that generate no rollouts
        self.built_in: dict[str, StageOptions] = {"train": train, "generate": generation, "agents": generation}

    def processes(self, counts: Mapping[str, int]) -> list[tuple[str, ...]]:
        """The stages of each process for so many replicas of each stage, those first that are slow to start."""
        found = list(flow.chains(self.config, counts))
        alone = [node.name for node in self.graph.nodes if node.name not in sum(found, ())]
        found += [(name,) for name in alone for _ in range(counts[name])]
        order = {"train": 0, "engines": 1, "generate": 2}
        return sorted(found, key=lambda names: order.get(names[0], 3))

    def replica(self, node: Node, index: int, count: int) -> ReplicaSpec:
        """The specification of one replica among `count`."""
        inlets = {name: self._inlet(stream, node) for name, stream in self.graph.inlets(node.name).items()}
        outlets = {name: self.outlet(stream) for name, stream in self.graph.outlets(node.name).items()}
        return ReplicaSpec(
            *(node.name, f"{node.name}-{index}", node.path, index, count, node.concurrency, str(self.rundir.path)),
            *(inlets, outlets, self.graph.loops if node.name == "generate" else ()),
            options=node.options,
            built_in=self.built_in.get(node.name),
            run_generation=self.run_generation,
            host=self.host if node.name == "train" else "",
        )

    def outlet(self, stream: Stream) -> PortSpec:
        return PortSpec(stream.name, self.addresses[stream.name], stream.schema)

    @property
    def room(self) -> int:
        """The number of messages that a stage which joins may hold."""
        most = StalenessGate.widest(self.config).most_open * self.config.rollout.n_samples_per_prompt
        return max(4096, most * 4)

    def lacks_gpus(self, engines: int) -> str | None:
        """Why the GPUs do not suffice for `engines` more engines, None if they do."""
        if not (held := self._held_gpus()):
            return None
        free = [gpu for gpu in gpus_to_divide(self.config) if gpu not in held]
        if len(free) >= engines * self.config.sglang.rollout_num_gpus_per_engine:
            return None
        return (
            f"there is no GPU for another engine: {len(held)} of the visible GPUs have one; end one first, or "
            "resume the run with more in CUDA_VISIBLE_DEVICES"
        )

    def _held_gpus(self) -> set[str]:
        return {gpu for spec in (*self.engines, *self.beside) for gpu in spec.gpus}

    def engine(self, number: int) -> EngineSpec:
        """An engine that is added to a running run. Raises UsageError where no GPU is free for it."""
        if (why := self.lacks_gpus(1)) is not None:
            raise UsageError(why)
        gpus: tuple[str, ...] = ()
        if held := self._held_gpus():
            [gpus] = engines_gpus(self.config, [gpu for gpu in gpus_to_divide(self.config) if gpu not in held], 1)
        # Any free port: the one that follows may be a frozen engine's.
        added = msgspec.structs.replace(
            self.engines[0], name=f"engine-{number}", port=0, seed=self.config.run.seed + number, gpus=gpus
        )
        return self._disturbed(added)

    def run_token(self) -> TokenFile:
        """Of the servers that this run starts."""
        return run_token(self.rundir.servers / "engine-token")

    def _guarded(self, spec: EngineSpec) -> EngineSpec:
        """With the token that requests must carry: the run's token, or that of external engines."""
        token = self.external_token if spec.external else self.run_token()
        return msgspec.structs.replace(spec, token=token, log_level=self.config.observe.log_level)

    def _disturbed(self, spec: EngineSpec) -> EngineSpec:
        return msgspec.structs.replace(spec, faults=self.faults("engine", spec.name))

    def faults(self, stage: str, replica: str) -> FaultPlan | None:
        """Those of `--fault-inject`, None without any."""
        return fault_plan(self.config, stage, replica, run_generation=self.run_generation, run_dir=self.rundir.path)

    def _inlet(self, stream: Stream, node: Node) -> PortSpec:
        rollout, port = self.config.rollout, self.outlet(stream)
        items = node.concurrency * 2
        if node.name in HOLDERS:
            return msgspec.structs.replace(port, window_items=self.room, window_bytes=UNBOUNDED_BYTES)
        if node.name == "generate":
            slots = math.ceil(max(1, len(self.engines)) * rollout.server_concurrency / node.replicas)
            members = rollout.n_samples_per_prompt
            # A group is leased until its slowest member has ended; other groups use its free slots by then. Twice as
            # many groups as fit into the slots keep all slots in use.
            items = 1 + (slots if stream.name == "generate.return" else max(1, 2 * slots // members))
        return msgspec.structs.replace(port, window_items=items)


def threads(config: Config) -> int:
    """Threads of each process: the processors are shared, and a small model is not worth more than two.

    Threads wait for each other at every operation. From about a million parameters a thread, it pays.
    """
    size = sum(file.stat().st_size for file in Path(config.train.hf_checkpoint).glob("*.safetensors"))
    worth = max(2, size // _BYTES_A_THREAD) if size else _MANY
    frozen = [place for place in flow.frozen_engines(config).values() if not flow.is_address(place)]
    ranks = processes_of(config.parallel) if needs_trainer_group(config) else 1
    evaluating = flow.evaluation_engines(config).count("")
    computing = flow.engine_count(config) + evaluating + len(frozen) + ranks  # processes that compute most of the time
    return max(1, min((os.cpu_count() or 1) // computing, worth))


def _engines(config: Config) -> tuple[list[EngineSpec], list[EngineSpec]]:
    """The engines that generate, and those beside them, frozen or for evaluations alone, with their ports and GPUs.

    Their model is that of the flags, also in a resume: the checkpoint of the resume is pruned in time, and a later
    restart reads this path again. The weights are brought to an engine before its first prompt in any case.
    """
    addresses, frozen = config.sglang.rollout_external_engine_addrs, flow.frozen_engines(config)
    model_path, max_context = served_checkpoint(config), config.rollout.rollout_max_context_len
    count = flow.engine_count(config)
    started = 0 if addresses else count
    port, settings, seed = config.engine.engine_port, config.engine, config.run.seed
    checkpoints = {name: place for name, place in frozen.items() if not flow.is_address(place)}
    evaluating = flow.evaluation_engines(config)
    gpus: tuple[tuple[str, ...], ...] = ((),) * (started + len(checkpoints) + evaluating.count(""))
    if settings.engine == "sglang" and gpus:
        gpus = engines_gpus(config, gpus_to_divide(config), len(gpus))
    engines = [
        EngineSpec(f"engine-{i}", settings, model_path, max_context, port + i if port else 0, seed + i, gpus=gpus[i])
        for i in range(started)
    ]
    for i, address in enumerate(addresses[:count]):
        engines.append(EngineSpec(f"engine-{i}", settings, model_path, max_context, 0, seed, external=address))
    kept = [
        EngineSpec(f"frozen-{name}", settings, "", None, 0, 0, frozen=name, external=place)
        for name, place in frozen.items()
        if name not in checkpoints
    ]
    for i, (name, checkpoint) in enumerate(checkpoints.items(), started):
        where = port + i if port else 0
        kept.append(
            EngineSpec(f"frozen-{name}", settings, checkpoint, max_context, where, seed, frozen=name, gpus=gpus[i])
        )
    for i, address in enumerate(evaluating):
        at = started + len(checkpoints) + i
        place: dict[str, Any] = {"external": address} if address else {"gpus": gpus[at]}
        where = port + at if port and not address else 0
        name = f"eval-engine-{i}"
        kept.append(EngineSpec(name, settings, model_path, max_context, where, seed + at, evaluates=True, **place))
    return engines, kept
