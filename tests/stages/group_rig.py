"""The group stage among real streams: what goes in, what comes out, what is settled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from configs.schema import Config
from stages.group.stage import GroupStage
from stages.messages import RolloutSlice, Sample, Settled
from tests.stages.stage_rig import REPORT, Rig, make_context, make_sample, open_rig, running, take
from transport.stream import Inlet, Outlet


@dataclass
class Desk:
    rig: Rig
    stage: GroupStage
    task: asyncio.Task[None]
    feed: Outlet[Any]
    out: Inlet[Any]
    settled: Inlet[Any]
    sent: int = 0

    async def send(self, *slices: RolloutSlice) -> None:
        """Each under a key of its own, so that only the stage can tell duplicates."""
        for slice_ in slices:
            self.sent += 1
            await self.feed.send(slice_, f"{slice_.key}#{self.sent}")

    async def end(self) -> None:
        self.rig.hubs["group"].finish()
        await self.task


async def join(rig: Rig, replica: str = "group-0") -> Any:
    return await rig.join(
        {"in": ("group", RolloutSlice)},
        {"out": ("train", RolloutSlice), "settle": ("settle", REPORT), "eval": ("evaluate", RolloutSlice)},
        replica=replica,
    )


@asynccontextmanager
async def open_desk(config: Config | None = None, *, sockets: bool = False) -> AsyncIterator[Desk]:
    async with open_rig(sockets=sockets) as rig:
        ports = await join(rig)
        stage = GroupStage(make_context(config))
        async with running(stage, ports) as task:
            yield Desk(rig, stage, task, await rig.outlet("group"), await rig.inlet("train"), await rig.inlet("settle"))


def failed(index: int, why: str = "ValueError: boom") -> Sample:
    return make_sample(index, status="failed", error=why, n=2)


async def settled(one: Desk) -> Settled:
    report = await take(one.settled)
    assert isinstance(report, Settled)
    return report
