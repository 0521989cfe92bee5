"""Links that follow a topic, each with an engine server, and the trainer's side of the weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from configs.schema.update import UpdateConfig
from models.engines.protocol import PauseMode
from models.engines.serve import EngineServer
from stages.base import Activity
from stages.engines.engine_link import EngineLink
from stages.messages import Applied
from tests.models.weights.made_up import checkpoint
from tests.stages.engine_rig import Weights, core_of, simulated
from tests.stages.stage_rig import TOPIC, Rig, SpanLog, open_rig


@dataclass
class Fleet:
    """Links that follow a topic, each with the engine of its number."""

    rig: Rig
    weights: Weights
    stack: AsyncExitStack
    bare: Path
    links: list[EngineLink] = field(default_factory=list)
    servers: list[EngineServer] = field(default_factory=list)
    applied: list[tuple[str, int]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def engine(self, index: int, *, incarnation: int = 0) -> EngineServer:
        server = EngineServer(simulated(), str(self.bare), max_context_len=None, seed=index)
        await self.stack.enter_async_context(server)
        self.servers.append(server)
        self.rig.engine_at(server.url, engine=index, incarnation=incarnation)
        return server

    async def landed(self, version: int, *, engine: int = 0) -> None:
        """The owner has reported the version, and its link is up."""
        await self.weights.landed(version, engine=engine)
        await self.links[engine].ready.wait()

    def labels(self) -> list[str]:
        return [core_of(server).label for server in self.servers]

    def report(self, engine: int = 0) -> Applied:
        found = self.rig.read_applied(engine)
        assert found is not None
        return found


@asynccontextmanager
async def fleet(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    n: int = 1,
    *,
    owner: bool = True,
    mode: PauseMode = "in_place",
    source: Path | None = None,
    update: UpdateConfig | None = None,
) -> AsyncIterator[Fleet]:
    """`n` links that follow a topic; `source` is what the trainer's slots are laid out for."""
    monkeypatch.setattr("stages.engines.engine_link.RETRY_S", 0.01)
    (tmp_path / "bare").mkdir()
    async with AsyncExitStack() as stack:
        rig = await stack.enter_async_context(open_rig())
        weights = Weights(rig, tmp_path / "slots", source or checkpoint(tmp_path / "source"))
        stack.callback(weights.slots.close)
        one = Fleet(rig, weights, stack, tmp_path / "bare")
        async with asyncio.TaskGroup() as tasks:
            following = []
            for index in range(n):
                link = EngineLink(
                    f"engine-{index}",
                    owner=owner,
                    pause_mode=mode,
                    timeout_s=30.0,
                    activity=Activity(),
                    spans=SpanLog(),
                    changed=one.changed,
                    update=update,
                )
                one.links.append(link)
                topic = await rig.node.topic(TOPIC, replica=link.name)
                following.append(tasks.create_task(link.follow(topic)))
            yield one
            for task in following:
                task.cancel()
        for link in one.links:
            if link.client is not None:
                await link.client.close()
