"""Processes with the hubs of streams, kept alive, on whichever host. See `pipeline.hosts.hub_process`.

Invariant: the process that takes the place of another knows that it does, so that it waits for the peers of that one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

import msgspec

from pipeline.errors import check_repeatable
from pipeline.hosts.launcher import Launcher, ending
from pipeline.hosts.rendezvous import Entry, spec_key
from pipeline.hosts.stream_hub import HUB, HubProcessSpec, facts_key
from pipeline.replica_specs import Placement
from pipeline.supervise.restarts import Restarts
from pipeline.supervise.silence import end_if_silent
from stages.base import beside
from transport import StreamSpec, TopicServer

MODULE: Final = "pipeline.hosts.hub_process"


class HubProcesses:
    """`streams`: by the name of the process that has their hubs."""

    def __init__(
        self, placement: Placement, launcher: Launcher, topic: TopicServer, streams: Mapping[str, list[StreamSpec]],
        up: str,
    ) -> None:  # fmt: skip
        self.placement, self.launcher, self.topic, self.streams, self.up = placement, launcher, topic, streams, up

    async def run(self, entry: Entry, restarts: Restarts) -> None:
        """Waits for the processes; unblocked by cancellation, or by the first that cannot be started again."""
        async with asyncio.TaskGroup() as tasks:
            for name in self.streams:
                tasks.create_task(self._keep(name, entry, restarts))

    async def _keep(self, name: str, entry: Entry, restarts: Restarts) -> None:
        process, incarnation = entry.process(MODULE, name), 0
        while True:
            await self.launcher.place(name)
            spec = HubProcessSpec(tuple(self._here(name)), self.up, incarnation)
            self.topic.publish(spec_key(name), msgspec.msgpack.encode(spec))
            handle = await self.launcher.spawn(process)
            # Its senders lose nothing by its end.
            async with beside(end_if_silent(self.topic, facts_key(name), name, handle)):
                code = await handle.wait()
            words = handle.last_line()
            check_repeatable(name, code, words, self.placement.rundir.path)
            await restarts.again(HUB, name, ending(code), words, handle.log)
            incarnation += 1

    def _here(self, name: str) -> list[StreamSpec]:
        """With the addresses that are bound: where there are several hosts, on that of the process."""
        if self.launcher.controller is None:
            return self.streams[name]
        address = f"tcp://{self.launcher.address(name)}:0"
        return [msgspec.structs.replace(spec, address=address) for spec in self.streams[name]]
