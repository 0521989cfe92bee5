"""The parts of a run that the user's view of it and the user's commands work on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from configs.schema import Config
from pipeline.graph import Graph
from pipeline.hosts.launcher import Launcher
from pipeline.record.recorder import Recorder
from pipeline.replica_specs import Placement
from pipeline.supervise.runner import Runner
from stages.prompts.stage import PromptStage
from transport import Hub, TopicServer


@dataclass(frozen=True)
class RunParts:
    """Of one phase of a run; the controller makes them."""

    placement: Placement
    stage: PromptStage
    recorder: Recorder
    hubs: Mapping[str, Hub]  # by stream
    topic: TopicServer
    launcher: Launcher
    runner: Runner

    @property
    def config(self) -> Config:
        return self.placement.config

    @property
    def graph(self) -> Graph:
        return self.placement.graph
