"""Real engine servers and real weight slots around the generate stage, all in one process.

The simulated engine runs by the clock of the event loop, so no test relies on how far it came: `freeze` stops it
between two looks at its state, and what is compared is recomputed from the versions that the engine reported.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from configs.schema import Config
from configs.schema.rollout import EngineConfig, SimulatedEngineConfig
from models.engines.client import EngineClient
from models.engines.embedded.engine import EmbeddedEngine
from models.engines.noise import sample_seed
from models.engines.protocol import GenerateOutput, GenerateRequest, MetaInfo, SamplingParams
from models.engines.serve import EngineServer
from models.engines.simulated.engine import SimulatedEngine
from models.engines.streamed import PartialOutputs
from models.weights.shared_memory_writer import SlotWriter
from stages.agents.stage import AgentsStage
from stages.base import GenerateOptions
from stages.engines.stage import EnginesStage
from stages.generate.stage import GenerateStage
from stages.messages import PromptGroup, RolloutSlice, Sample, WeightsAnnouncement
from stages.ports import Ports
from stages.topic_values import RouterAddress
from tests.models.engines.harness import simulated_token
from tests.models.weights.made_up import checkpoint, values
from tests.stages.faults import FaultProxy
from tests.stages.stage_rig import Rig, make_config, make_context, open_rig, response_ids, running, take, until
from transport.stream import Inlet, Outlet

VOCABULARY = 256
LENGTH = 40  # tokens of every response of the simulated engine
FAST_MS, SLOW_MS = 0.01, 20.0


def simulated(step_ms: float = FAST_MS, length: int = LENGTH) -> EngineConfig:
    return EngineConfig(
        engine="simulated",
        engine_slots=64,
        simulated=SimulatedEngineConfig(
            a_ms=step_ms,
            c_ms=0.0,
            prefill_ms_per_token=0.0,
            length_mean=float(length),
            length_sigma=0.0,
            update_s=0.0,
            vocab_size=VOCABULARY,
        ),
    )


class Weights:
    """The trainer's side: slots, and announcements on the topic."""

    def __init__(
        self, rig: Rig, directory: Path, source: Path, tensors: Callable[[int], Mapping[str, torch.Tensor]] = values
    ) -> None:
        self.rig, self.tensors = rig, tensors
        self.slots = SlotWriter(directory, source)

    def write(self, version: int, *, pinned: bool = False) -> WeightsAnnouncement:
        """Fill the older slot; nothing is announced yet."""
        manifest = self.slots.write(version, 0, iter(self.tensors(version).items()))
        return WeightsAnnouncement(**msgspec.structs.asdict(manifest), pinned=pinned)

    def announce(self, announcement: WeightsAnnouncement) -> None:
        self.rig.topic.publish("weights", msgspec.msgpack.encode(announcement))

    def publish(self, version: int, *, pinned: bool = False) -> WeightsAnnouncement:
        announcement = self.write(version, pinned=pinned)
        self.announce(announcement)
        return announcement

    async def landed(self, version: int, *, engine: int = 0) -> None:
        """Wait for the engine to serve the version."""
        await self.rig.topic_until(lambda: served(self.rig, engine) and carried(self.rig, engine) >= version)


def served(rig: Rig, engine: int = 0) -> bool:
    """Whether requests are sent to the engine."""
    entry = rig.entry(engine)
    return entry is not None and entry.state in ("serving", "updating")


def carried(rig: Rig, engine: int = 0) -> int:
    """The version that the engine carries, -1 for none."""
    entry = rig.entry(engine)
    return -1 if entry is None else entry.version


@dataclass
class Exchange:
    """One request as it was sent, and its answers as they came."""

    url: str
    request: GenerateRequest
    outputs: list[GenerateOutput] = field(default_factory=list)  # of a lost one, what was certain
    partial: PartialOutputs | None = None
    headers: Mapping[str, str] | None = None
    error: BaseException | None = None

    @property
    def params(self) -> SamplingParams:
        assert isinstance(self.request.sampling_params, SamplingParams)
        return self.request.sampling_params


Log = list[Exchange]
ONCE: dict[str, Any] = {  # a loop stage that wants each rollout once
    "inlets": {"return": ("generate.return", RolloutSlice)},
    "outlets": {"loop.once": ("once", RolloutSlice)},
    "loops": ("once=tests.stages.custom_parts:Once",),
}


AGENTS: dict[str, Any] = {  # the agents stage behind generate
    "inlets": {"return": ("generate.return", RolloutSlice)},
    "outlets": {"loop.agents": ("agents", RolloutSlice)},
    "loops": ("agents=stages.agents.stage:AgentsStage",),
}


def record_exchanges(monkeypatch: pytest.MonkeyPatch) -> list[Exchange]:
    """All generate requests from now on."""
    log: list[Exchange] = []
    original = EngineClient.generate

    async def generate(client: EngineClient, request: GenerateRequest, **options: Any) -> list[GenerateOutput]:
        exchange = Exchange(client.base_url, request, **options)
        log.append(exchange)
        try:
            exchange.outputs = await original(client, request, **options)
        except BaseException as error:
            exchange.error = error
            if exchange.partial is not None:
                exchange.outputs = [o or empty_output() for o in exchange.partial.certain()]
            raise
        return exchange.outputs

    monkeypatch.setattr(EngineClient, "generate", generate)
    return log


def empty_output() -> GenerateOutput:
    return GenerateOutput(meta_info=MetaInfo(id=""))


def core_of(server: EngineServer) -> SimulatedEngine:
    assert isinstance(server.core, SimulatedEngine)
    return server.core


async def freeze(server: EngineServer, tokens: int) -> None:
    """Pause a slow engine as soon as it has made so many tokens; it is fast from then on."""
    core = core_of(server)
    while True:
        core.load()  # brings the schedule up to now; nothing can happen before the pause
        if core.totals().generation_tokens >= tokens:
            break
        await asyncio.sleep(0.002)
    assert core.schedule.running, "the response ended before the engine could be paused"
    await core.pause("in_place")
    core.schedule.config = msgspec.structs.replace(core.schedule.config, a_ms=FAST_MS)


def freeze_after(server: EngineServer, steps: tuple[int, ...], loop: asyncio.AbstractEventLoop) -> list[asyncio.Event]:
    """Have the engine's own thread pause it after exactly so many steps, each time; the events say that it has. Steps
    after which no response is half made do not count: on a busy machine requests come one by one."""
    core = server.core
    assert isinstance(core, EmbeddedEngine)
    stepper, original, made = core.stepper, core.stepper.step, 0
    frozen = {count: asyncio.Event() for count in steps}
    table = stepper._table

    def step() -> None:
        nonlocal made
        original()
        if any(table.length[slot] > completion.prompt_tokens for slot, completion in table.owners.items()):
            made += 1
            if made in frozen:
                stepper.pause("in_place")
                loop.call_soon_threadsafe(frozen[made].set)

    stepper.step = step  # type: ignore[method-assign]
    return list(frozen.values())


def token_versions(sample: Sample) -> list[int]:
    """Of the tokens after the prompt."""
    versions: list[int] = sample.versions[sample.prompt_length :].tolist()
    return versions


def written(exchanges: list[Exchange], places: list[int], sample: Sample) -> list[int]:
    """What the simulated policy writes in answer to these requests, given the versions that the sample claims.

    `places[k]` is the sample's place among the answers of `exchanges[k]`."""
    versions = iter(token_versions(sample))
    tokens: list[int] = []
    for exchange, place in zip(exchanges, places, strict=True):
        prompt = exchange.request.prompts[0]
        seed = sample_seed(exchange.params.sampling_seed or 0, place)
        for offset in range(len(exchange.outputs[place].output_ids)):
            label = f"0.{next(versions)}"
            tokens.append(simulated_token(prompt, seed, len(prompt) + offset, label, VOCABULARY))
        reason = exchange.outputs[place].meta_info.finish_reason
        if reason is not None and reason.type == "stop":
            tokens[-1] = VOCABULARY - 1
    return tokens


def check_continued(sample: Sample, first: Exchange, rest: Sequence[Exchange], *, lost: bool = True) -> None:
    """The sample is what the first engine sent, and then what another made of it; no token twice, none left out.

    `lost`: the first engine did not give it back.
    """
    kept, params = first.outputs[sample.index].output_ids, first.params
    [second] = [e for e in rest if e.request.prompts[0] == [*first.request.prompts[0], *kept]]
    assert len(kept) >= 3
    assert second.params.sampling_seed == sample_seed(params.sampling_seed or 0, sample.index), "its own noise"
    assert (second.params.n, second.params.max_new_tokens) == (1, (params.max_new_tokens or 0) - len(kept))
    assert response_ids(sample) == written([first, second], [sample.index, 0], sample)
    reused = len(kept) if lost else 0
    assert (sample.status, sample.reused_tokens, sample.resumed) == ("completed", reused, 1)
    assert sample.fault() is None


@dataclass
class World:
    """Replicas of the generate stage, the engines stage and its engines."""

    rig: Rig
    stack: AsyncExitStack
    stages: list[GenerateStage]
    weights: Weights
    engine_config: EngineConfig
    model: str
    prompts: Outlet[Any]
    out: Inlet[Any]
    engines: list[EngineServer] = field(default_factory=list)
    proxies: list[FaultProxy] = field(default_factory=list)
    proxied: bool = False
    stream_interval: int = 0  # of the servers
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    back: Outlet[Any] | None = None

    @property
    def stage(self) -> GenerateStage:
        return self.stages[0]

    @property
    def task(self) -> asyncio.Task[None]:
        return self.tasks[0]

    def serving(self) -> list[str]:
        """Engines that the first replica would send to."""
        return [target.name for target in self.stage.sampler.directory.serving()]

    async def start_engine(self, index: int = 0, incarnation: int = 0) -> EngineServer:
        server = EngineServer(
            self.engine_config, self.model, max_context_len=None, seed=index, stream_interval=self.stream_interval
        )
        await self.stack.enter_async_context(server)
        self.engines.append(server)
        url = server.url
        if self.proxied:
            self.proxies.append(await self.stack.enter_async_context(FaultProxy(server.url)))
            url = self.proxies[-1].url
        self.rig.engine_at(url, engine=index, incarnation=incarnation)
        return server

    async def run_agents(self, config: Config | None = None, limits: GenerateOptions | None = None) -> AgentsStage:
        """An agents stage that answers what generate sends to it (see `AGENTS`)."""
        run_dir = self.stage.context.run_dir
        context = make_context(config or self.stage.config, run_dir, built_in=limits, replica="agents-0")
        agents = AgentsStage(context)
        ports = await self.rig.ports({"in": "agents"}, {"out": "generate.return"}, replica="agents-0")
        await self.stack.enter_async_context(running(agents, ports))
        return agents

    def hurry(self, *indices: int) -> None:
        """Engines are fast from now on."""
        for index in indices:
            core_of(self.engines[index]).schedule.config = simulated(FAST_MS).simulated

    async def in_mid_generation(self, log: Log, group: PromptGroup) -> Exchange:
        """A request of the group whose engine, the first, stands still, after all that it made has arrived. Others are
        fast."""
        self.hurry(*range(1, len(self.engines)))
        await self.ask(group)
        core = core_of(self.engines[0])
        await freeze(self.engines[0], tokens=3 * group.n_samples)
        first = log[0]
        assert first.partial is not None
        await until(lambda: first.partial.tokens == core.totals().generation_tokens)  # type: ignore[union-attr]
        return first

    def lose(self, index: int) -> None:
        """What the supervisor does when it gives an engine up."""
        self.rig.lose_engine(index)

    def router_at(self, url: str, *, kind: str = "sglang", incarnation: int = 0) -> None:
        self.rig.topic.publish("router", msgspec.msgpack.encode(RouterAddress(kind, url, incarnation)))

    def extra(self, name: str) -> float:
        return self.stage.activity.extra.get(name, 0.0)

    async def ask(self, group: PromptGroup) -> None:
        await self.prompts.send(group, str(group.group_id))

    async def answer(self) -> RolloutSlice:
        found = await take(self.out)
        assert isinstance(found, RolloutSlice)
        return found

    async def whole(self, n: int) -> list[Sample]:
        """The samples of a group, in as many slices as they may come."""
        samples: list[Sample] = []
        while len(samples) < n:
            samples += (await self.answer()).samples
        return sorted(samples, key=lambda sample: sample.index)

    async def come_back(self, group: PromptGroup, sample: Sample) -> None:
        """The sample comes back from its loop stage."""
        if self.back is None:
            self.back = await self.rig.outlet("generate.return")
        slice_ = RolloutSlice(group, (sample,))
        await self.back.send(slice_, slice_.key)

    async def rollouts(self, group: PromptGroup) -> list[Sample]:
        """Ask for a group and wait for all of its samples."""
        await self.ask(group)
        return await self.whole(group.n_samples)

    async def ready(self) -> None:
        """Version 0 is everywhere, and everybody knows it."""
        self.weights.publish(0)
        for index in range(len(self.engines)):
            await self.weights.landed(0, engine=index)
        for stage in self.stages:
            await until(lambda stage=stage: len(stage.sampler.directory.serving()) == len(self.engines))  # type: ignore[misc]


@asynccontextmanager
async def generating(
    tmp_path: Path,
    *,
    engines: int = 1,
    start: int | None = None,
    engine: EngineConfig | None = None,
    model: Path | None = None,
    tensors: Callable[[int], Mapping[str, torch.Tensor]] = values,
    options: Mapping[str, int] | None = None,
    inlets: Mapping[str, Any] | None = None,
    outlets: Mapping[str, Any] | None = None,
    window_items: int = 1000,
    loops: tuple[str, ...] = (),
    streamed: bool = False,
    proxied: bool = False,
    replicas: int = 1,
    **sections: Any,
) -> AsyncIterator[World]:
    """The stages at work, `start` of the engines up (all by default) and no weights published.

    With `streamed` they take the engines for SGLang's, and have every answer streamed token by token.
    """
    engine = engine or simulated()
    source = model or checkpoint(tmp_path / "source")
    bare = tmp_path / "bare"  # no tokenizer: the simulated engine then answers with empty texts
    bare.mkdir(exist_ok=True)
    mode = sections.pop("pause_mode", "in_place")
    kind = "sglang" if streamed else "simulated"
    sections.setdefault("router", {"router": "none"})
    config = make_config(engine={"pause_generation_mode": mode, "engine": kind}, **sections)
    async with AsyncExitStack() as stack:
        rig = await stack.enter_async_context(open_rig())
        weights = Weights(rig, tmp_path / "slots", source, tensors)
        stack.callback(weights.slots.close)
        stages, ports = [], []
        for index in range(replicas):
            replica = f"stage-{index}"
            into = {"in": ("generate", PromptGroup), **(inlets or {})}
            out = {"out": ("reward", RolloutSlice), **(outlets or {})}
            ports.append(await rig.join(into, out, window_items=window_items, replica=replica))
            about = {"index": index, "replicas": replicas, "replica": replica}
            built_in = GenerateOptions(**(options or {}))
            stages.append(GenerateStage(make_context(config, tmp_path, built_in=built_in, loops=loops, **about)))
        owner = EnginesStage(make_context(config, bare, replica="engines-0"))
        topic = await rig.node.topic(rig.topic.address, replica="engines-0")
        world = World(
            rig,
            stack,
            stages,
            weights,
            engine,
            str(model or bare),
            await rig.outlet("generate"),
            await rig.inlet("reward"),
            proxied=proxied,
            stream_interval=int(streamed),
        )
        for index in range(engines if start is None else start):
            await world.start_engine(index)
        await stack.enter_async_context(running(owner, Ports("engines-0", {}, {}, topic)))
        for stage, port in zip(stages, ports, strict=True):
            world.tasks.append(await stack.enter_async_context(running(stage, port)))
        yield world


@asynccontextmanager
async def started(tmp_path: Path, **options: Any) -> AsyncIterator[World]:
    """`generating`, with version 0 at every engine."""
    async with generating(tmp_path, **options) as world:
        await world.ready()
        yield world


def tensors_of(paths: list[Path]) -> Callable[[int], Mapping[str, torch.Tensor]]:
    """The weights of checkpoints by version."""
    from safetensors.torch import load_file

    loaded = [load_file(path / "model.safetensors") for path in paths]
    return lambda version: loaded[version]


def sent_to(exchanges: list[Exchange], server: EngineServer) -> Iterator[Exchange]:
    return (exchange for exchange in exchanges if exchange.url == server.url)
