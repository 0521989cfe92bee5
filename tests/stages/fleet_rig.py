"""The engines stage with engine servers, and the trainer's side of the weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch

from configs.schema import Config
from configs.schema.rollout import UpdateConfig
from models.engines.client import EngineClient
from models.engines.protocol import PauseMode
from models.engines.serve import EngineServer
from models.train.interface import WeightExporter
from stages.engines.engine_control import EngineControl
from stages.engines.stage import EnginesStage
from stages.messages import WeightsAnnouncement
from stages.ports import Ports
from stages.topic_values import EngineEntry
from stages.train.weights import WeightPublisher
from tests.models.weights.made_up import checkpoint
from tests.stages.engine_rig import Weights, core_of, served, simulated
from tests.stages.stage_rig import Rig, before_calls, make_config, make_context, open_rig, until

PATIENT = 1_000_000  # failures in a row: a test that wants none of the supervisor's help


@dataclass(frozen=True)
class Update:
    """What an engine is asked to load from disk."""

    url: str
    path: str
    label: str | None


@dataclass
class Fleet:
    """An engines stage at work, and the engines that were started."""

    rig: Rig
    config: Config
    weights: Weights
    stack: AsyncExitStack
    tasks: asyncio.TaskGroup
    bare: Path
    patch: pytest.MonkeyPatch
    stage: EnginesStage = field(init=False)
    running: asyncio.Task[None] = field(init=False)
    servers: list[EngineServer] = field(default_factory=list)
    lives: int = 0

    async def start_stage(self) -> None:
        """A stage that knows nothing but the topic."""
        self.stage = EnginesStage(make_context(self.config, self.bare, replica="engines-0"))
        topic = await self.rig.node.topic(self.rig.topic.address, replica=f"engines-{self.lives}")
        self.lives += 1
        self.running = self.tasks.create_task(self.stage.run(Ports("engines-0", {}, {}, topic)))

    async def lose_stage(self) -> None:
        self.running.cancel()
        await asyncio.wait((self.running,))
        await self.stage.close()

    async def engine(self, index: int, *, incarnation: int = 0, fetcher: str = "") -> EngineServer:
        server = EngineServer(simulated(), str(self.bare), max_context_len=None, seed=index)
        await self.stack.enter_async_context(server)
        self.servers.append(server)
        self.rig.engine_at(server.url, engine=index, incarnation=incarnation, fetcher=fetcher)
        await self.known(index)
        return server

    async def serving(self, count: int = 1, fetchers: Sequence[str] = ()) -> list[EngineServer]:
        """So many engines, from 0 on, which serve version 0; `fetchers` are those of the first ones."""
        padded = [*fetchers, *[""] * (count - len(fetchers))]
        servers = [await self.engine(index, fetcher=fetcher) for index, fetcher in enumerate(padded)]
        await self.land(0)
        return servers

    async def land(self, version: int) -> WeightsAnnouncement:
        """The trainer publishes a version, and all engines serve it."""
        announcement = self.weights.publish(version)
        await self.all_landed(version)
        return announcement

    async def all_landed(self, version: int) -> None:
        for index in range(len(self.servers)):
            await self.landed(version, engine=index)

    async def known(self, index: int = 0) -> None:
        """Wait until the stage controls the engine's newest incarnation."""
        await self.rig.topic_until(lambda: self.rig.entry(index) is not None)

    def control(self, engine: int = 0) -> EngineControl:
        return self.stage.engines[f"engine-{engine}"]

    def failures(self, engine: int = 0) -> int:
        control = self.stage.engines.get(f"engine-{engine}")
        return 0 if control is None else control.failures

    def served(self, engine: int = 0) -> bool:
        return served(self.rig, engine)

    async def landed(self, version: int, *, engine: int = 0) -> None:
        """The engine serves the version."""
        await self.weights.landed(version, engine=engine)
        control = self.control(engine)
        await until(lambda: control.client is not None and control.entry.state in ("serving", "updating"))

    def labels(self) -> list[str]:
        return [core_of(server).label for server in self.servers]

    def entry(self, engine: int = 0) -> EngineEntry:
        found = self.rig.entry(engine)
        assert found is not None
        return found

    def before_updates(self, hook: Callable[[Update], Awaitable[None]] | None = None) -> list[Update]:
        """What engines are asked to load from disk from now on. `hook` comes before each request; what it raises takes
        its place."""
        requested: list[Update] = []

        async def note(client: EngineClient, path: str, label: str | None, *_: object, **__: object) -> None:
            requested.append(Update(client.base_url, path, label))
            if hook is not None:
                await hook(requested[-1])

        before_calls(self.patch, EngineClient, "update_weights_from_disk", note)
        return requested

    async def held_in_update(self, url: str | None = None) -> tuple[asyncio.Event, list[Update]]:
        """Version 1 is published, and its update (of the engine at the address, or of all) has begun. It goes on at the
        event. And what engines are asked to load."""
        loading, go = asyncio.Event(), asyncio.Event()

        async def hold(update: Update) -> None:
            if url in (None, update.url):
                loading.set()
                await go.wait()

        asked = self.before_updates(hold)
        self.weights.publish(1)
        await loading.wait()
        return go, asked

    def count_calls(self) -> list[tuple[str, str]]:
        """(address, path) of what engines are asked from now on."""
        asked: list[tuple[str, str]] = []

        def note(client: EngineClient, method: str, path: str, *_: object, **__: object) -> None:
            asked.append((client.base_url, path))

        before_calls(self.patch, EngineClient, "call", note)
        return asked

    def publisher(self, source: Path) -> TensorPublisher:
        """A trainer's publisher of the fleet's route, with slots of its own."""
        home = self.bare.parent
        made = TensorPublisher(self.config, home / "published", source, home / "run")
        made.announce_at = self.weights.announce
        self.stack.callback(made.close)
        return made


@asynccontextmanager
async def open_fleet(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    mode: PauseMode = "in_place",
    source: Path | None = None,
    update: UpdateConfig | None = None,
    max_failures: int = PATIENT,
) -> AsyncIterator[Fleet]:
    """A stage that follows a topic; `source` is what the trainer's slots are laid out for."""
    monkeypatch.setattr("stages.engines.engine_control.RETRY_S", 0.01)
    (tmp_path / "bare").mkdir()
    config = make_config(engine={"pause_generation_mode": mode, "engine": "simulated"}, router={"router": "none"})
    update = msgspec.structs.replace(update or UpdateConfig(), update_weight_max_failures=max_failures)
    async with AsyncExitStack() as stack:
        rig = await stack.enter_async_context(open_rig())
        weights = Weights(rig, tmp_path / "slots", source or checkpoint(tmp_path / "source"))
        stack.callback(weights.slots.close)
        async with asyncio.TaskGroup() as tasks:
            config = msgspec.structs.replace(config, update=update)
            fleet = Fleet(rig, config, weights, stack, tasks, tmp_path / "bare", monkeypatch)
            await fleet.start_stage()
            yield fleet
            await fleet.lose_stage()


class TensorPublisher(WeightPublisher):
    """A publisher of tensors that the test gives it."""

    announce_at: Callable[[WeightsAnnouncement], None]

    def __init__(self, config: Config, slots: Path, source: Path, run_dir: Path) -> None:
        self._exporter = _Given()
        super().__init__(config, slots, run_dir, partial(self._exporter.write_slot, slots, source), None)

    def write_tensors(self, version: int, tensors: Mapping[str, torch.Tensor]) -> WeightsAnnouncement:
        self._exporter.tensors = tensors
        return self.write(version, 0, pinned=False)

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor]) -> Path:
        """Returns the directory of the slot."""
        announcement = self.write_tensors(version, tensors)
        self.announce_at(announcement)
        return Path(announcement.path)


class _Given(WeightExporter):
    tensors: Mapping[str, torch.Tensor]

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.tensors.items()
