"""What the user sees while a run goes on: the live table, or plain lines where the output is no terminal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from configs.schema import Config
from pipeline.observe.table import open_display
from pipeline.recorder import Recorder
from stages.prompts import PromptStage
from transport import Hub, TopicServer

REFRESH_S = 0.5


class Monitor:
    """Feeds a display twice a second. A context manager."""

    def __init__(
        self,
        config: Config,
        stage: PromptStage,
        recorder: Recorder,
        hubs: Mapping[str, Hub],
        topic: TopicServer,
    ) -> None:
        self.stage, self.recorder, self.hubs, self.topic = stage, recorder, hubs, topic
        self.display = open_display(config.observe.live, log_interval=config.observe.log_interval)

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
        self.display.update(self.recorder.view.snapshot(time.monotonic()))
