"""The engines stage: the single owner of the engines, from their first weights to the last abort.

The supervisor starts and restarts engine and router processes and publishes their addresses. This stage attaches to
each, the frozen ones too, and is the only one that controls them: it brings weights, gives memory back and takes it
again, names the engines to the router, watches their loads, and publishes the engine directory (`directory/<engine>`)
and `router_state`. All others are clients of what it publishes, so that they come, go and die without touching an
engine.

Invariants:
- there is one replica, and no stream: what it knows is on the topic and in the engines themselves; what has to be done
  on another node than its own, it has the fetcher there do (stages/engines/fetcher.py);
- engines outlive it: while it is away they go on with the weights that they have, and the directory stands; started
  anew, it attaches to them again and loads nothing where nothing is due;
- it ends when the controller says so, after all streams: generation and evaluation need the engines until then.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from typing import Final

from configs.schema import router_kind
from models.engines.errors import EngineError
from models.weights.delta_mirror import DeltaMirror
from stages.base import Stage, StageContext
from stages.engine_entries import ADDRESS, addresses
from stages.engines.engine_control import EngineControl
from stages.engines.load_watch import LoadWatch
from stages.engines.router_workers import RouterWorkers
from stages.ports import Ports

END: Final = "end"  # topic key: the streams have ended, and with them the need of engines


class EnginesStage(Stage):
    """All engines that have an address."""

    def __init__(self, context: StageContext) -> None:
        super().__init__(context)
        self.engines: dict[str, EngineControl] = {}
        # One local copy for all engines, under a name of its own in each run: what a killed stage left is taken over.
        run = uuid.uuid5(uuid.NAMESPACE_URL, str(context.run_dir.resolve())).hex[:12]
        self._mirror = DeltaMirror(f"mirror-{run}-{context.replica}", context.run_dir)
        self.watch = LoadWatch(self.config, self.engines, self.activity)
        self.router = RouterWorkers(self.activity) if router_kind(self.config) != "none" else None

    async def close(self) -> None:
        self._mirror.close()

    async def run(self, ports: Ports) -> None:
        """Waits for the topic: engines that come, a drain, the end. Unblocked by the end alone."""
        topic = ports.topic
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(self.watch.run(topic))]
            if self.router is not None:
                background.append(tasks.create_task(self.router.run(topic)))
            revision, aborted = 0, False
            while topic.get(END) is None:
                for name in addresses(topic).keys() - self.engines.keys():
                    control = self.engines[name] = EngineControl(name, self, self._mirror, ports.weights)
                    background.append(tasks.create_task(control.follow(topic)))
                if topic.get("drain") is not None and not aborted:
                    aborted = True
                    await self._abort_all()
                revision = await topic.wait(revision, ADDRESS, "drain", END)
            for task in background:
                task.cancel()

    async def _abort_all(self) -> None:
        """Have the engines give back what they hold. A client that drains sends nothing more, and takes what comes."""
        async with asyncio.TaskGroup() as tasks:
            for control in self.engines.values():
                tasks.create_task(_abort(control))


async def _abort(control: EngineControl) -> None:
    if control.client is not None:
        with contextlib.suppress(EngineError):  # an engine that is down holds nothing
            await control.client.abort()
