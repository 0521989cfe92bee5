"""What is seen of a run while it goes on: the live table or plain lines, and the facts behind /metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from pipeline.hosts.stream_hub import StreamHub
from pipeline.observe.advice import Advice
from pipeline.observe.prometheus import Facts
from pipeline.observe.table import open_display
from pipeline.observe.waits import Waits
from pipeline.record.recorder import Recorder
from pipeline.supervise.announce import read_fleet
from stages.messages import Complaint
from stages.ports import read_value
from stages.prompts.stage import PromptStage
from stages.topic_values import SLOW, addresses

REFRESH_S = 0.5


class Monitor:
    """Feeds a display twice a second. A context manager."""

    def __init__(
        self,
        stage: PromptStage,
        recorder: Recorder,
        hubs: Mapping[str, StreamHub],
        waits: Waits,
        advise: Callable[[], Advice | None] = lambda: None,
    ) -> None:
        self.stage, self.recorder, self.hubs, self.waits, self.topic = stage, recorder, hubs, waits, waits.topic
        self._advise = advise
        self.advice: Advice | None = None
        observe = recorder.config.observe
        self.display = open_display(observe.live, log_interval=observe.log_interval)
        self._slow: set[tuple[str, int]] = set()
        self._engines: dict[str, str | None] = {}  # every engine seen, with its address while it has one

    def __enter__(self) -> Monitor:
        self.display.__enter__()
        self.recorder.lines = self.display.note
        return self

    def __exit__(self, *_: object) -> None:
        self.refresh()
        self.display.__exit__(None, None, None)

    async def run(self) -> None:
        """Waits for the clock; runs until cancelled."""
        while True:
            self.refresh()
            await asyncio.sleep(REFRESH_S)

    def refresh(self) -> None:
        queues: dict[str, int] = {}
        for name, hub in self.hubs.items():
            stage = name.split(".", 1)[0]
            queues[stage] = queues.get(stage, 0) + hub.stats().queued
        self.recorder.observe(self.topic, queues, self.stage.capacity, self.stage.version)
        self.advice = self._advise()
        self.recorder.view.advice = self.advice.sentence if self.advice is not None else ""
        self.display.update(self.recorder.view.snapshot(time.monotonic()))
        self._watch_engines()
        self._watch_progress()
        self._name_slow_engines()
        for line in self.recorder.outages.look(self.topic):
            self.recorder.say(line)

    def facts(self) -> Facts:
        """What /metrics tells of the run."""
        self._watch_engines()
        return Facts(
            run=self.recorder.view.snapshot(time.monotonic()),
            staleness=self.recorder.view.staleness,
            restarts=self.recorder.restarts,
            dead_letters=len(self.recorder.dead_letters),
            engines=self._engines,
            router=self._router_metrics(),
        )

    def _watch_progress(self) -> None:
        """Say what waits for what, where nothing was trained for long."""
        now, ledger = time.monotonic(), self.stage.ledger
        paused_s = now if self.stage.paused else 0.0  # the run stands still since the user wants it to
        ended = ledger.admitted - ledger.open
        done = (ended, self.stage.steps, self.stage.trainer_up, len(self.recorder.evals), paused_s)
        moved = sum(hub.stats().accepted for hub in self.hubs.values())
        said = self.recorder.stalls.look(now, done, moved, lambda quiet_s: self.waits.sentence(now, quiet_s))
        if said is not None:
            self.recorder.say(said)

    def _name_slow_engines(self) -> None:
        """Say once of each incarnation of an engine that an answer of it came at a crawl, or not at all."""
        for key in self.topic.items(SLOW):
            slow = read_value(self.topic, key, Complaint)
            if slow is not None and (about := (slow.engine, slow.incarnation)) not in self._slow:
                self._slow.add(about)
                self.recorder.say(f"{slow.engine}: {slow.reason}; the request is sent again, to another engine if any")

    def _watch_engines(self) -> None:
        """An engine keeps its place when its address goes: it is lost, not gone, unless it was scaled away."""
        left = self.recorder.view.engines_left
        self._engines = {name: None for name in self._engines if name not in left}
        self._engines |= {name: address.url for name, address in addresses(self.topic).items()}

    def _router_metrics(self) -> str | None:
        """Where the router last was; one that the user started himself has its metrics where only he knows."""
        router = read_fleet(self.recorder.rundir).get("router")
        return (router.metrics or None) if router is not None else None
