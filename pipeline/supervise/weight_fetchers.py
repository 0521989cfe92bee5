"""The fetchers of a run: on each node that has engines, other than the controller's, a process that brings their
weights there (stages/engines/stage.py).

Invariants: a node has one at the most, which is started with its first engine, started again when it is lost, and ends
when the node has no engine any more; an engine is announced together with the name of its node's.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Final

import msgspec

from pipeline.errors import check_repeatable
from pipeline.graph import STAGES, Node
from pipeline.hosts.free_port import HOST
from pipeline.hosts.launcher import HostGone, Launcher, ending
from pipeline.hosts.rendezvous import Entry, retire_key, spec_key
from pipeline.observe.stats import STATS_PREFIX
from pipeline.placement import Placement
from pipeline.supervise.restarts import Restarts
from pipeline.supervise.silence import end_if_silent
from stages.base import beside
from stages.engines.stage import END
from transport import TopicServer

STAGE: Final = "fetcher"


class WeightFetchers:
    """Of one run. `tasks`: where they are looked after, while the servers run."""

    tasks: asyncio.TaskGroup

    def __init__(
        self, placement: Placement, topic: TopicServer, launcher: Launcher, restarts: Restarts, entry: Entry
    ) -> None:
        self._placement, self._topic, self._launcher = placement, topic, launcher
        self._restarts, self._entry = restarts, entry
        self._engines: dict[str, str] = {}  # engine -> its host
        self._there: dict[str, str] = {}  # host -> its fetcher
        self._numbers = itertools.count()

    def beside(self, engine: str, host: str) -> str:
        """What brings weights to an engine that was placed on a host; empty if they need not be brought."""
        here = self._launcher.controller
        if here is None or host in (here, HOST):
            self.left(engine)
            return ""
        if self._engines.get(engine) != host:
            self.left(engine)
        self._engines[engine] = host
        if host not in self._there:
            number = next(self._numbers)
            self._there[host] = f"{STAGE}-{number}"
            self.tasks.create_task(self._keep(number, host))
        return self._there[host]

    def left(self, engine: str) -> None:
        """An engine is not where it was."""
        host = self._engines.pop(engine, None)
        if host is not None and host not in self._engines.values() and (name := self._there.pop(host, None)):
            self._topic.publish(retire_key(name), b"")

    async def _keep(self, number: int, host: str) -> None:
        """Waits for the end of a fetcher; starts it again unless it ended well, or its host is gone."""
        spec = self._placement.replica(Node(STAGE, STAGES[STAGE]), number, 1)
        name, process = spec.replica, self._entry.process("pipeline.hosts.worker", spec.replica)
        self._topic.publish(spec_key(name), msgspec.msgpack.encode(spec))
        while engine := next((engine for engine, its in self._engines.items() if its == host), None):
            try:
                await self._launcher.place(name, beside=engine)
            except HostGone:
                break
            handle = await self._launcher.spawn(process)
            # The engines stage waits for what it has ordered: a fetcher that hangs would hold the engines of its node.
            async with beside(end_if_silent(self._topic, STATS_PREFIX + name, name, handle)):
                code = await handle.wait()
            if code == 0:
                break
            check_repeatable(name, code, handle.last_line(), self._placement.rundir.path)
            await self._restarts.again(STAGE, name, ending(code), handle.last_line(), handle.log)
        if self._there.get(host) == name:
            del self._there[host]
        if self._topic.get(END) is None:
            self._restarts.lifecycle.retired(STAGE, name)
        for key in (spec_key(name), retire_key(name)):
            self._topic.drop(key)
        await self._launcher.release(name)
