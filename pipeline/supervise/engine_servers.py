"""The engines of a run as processes: our own servers and SGLang's, each kept by a `ServerSupervisor`.

Invariants: an engine's processes form one group, so that its scheduler and detokenizer end with it; a server that
cannot choose its own port gets one that is held for it; nothing here asks an engine to generate.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from configs.schema import Config
from configs.schema.health import HealthConfig
from models.engines.client import EngineClient
from models.engines.launch.command import server_launch
from models.engines.launch.environment import Installed
from pipeline.errors import UsageError
from pipeline.hosts.free_port import PortInUse, held_port
from pipeline.hosts.processes import with_parent_death_signal
from pipeline.record.run_directory import RunDir
from pipeline.supervise.health_probe import HealthProbe, HttpProbe, SchedulerProbe
from pipeline.supervise.restart_server import StartCommand
from pipeline.supervise.restarts import EngineSpec, Kind, Lifecycle

# SGLang looks for SIGTERM every 5 s, then has its schedulers give their GPU memory back. On a CPU there is nothing to
# give back, and nothing is written: it may be killed.
GPU_GRACE_S: Final = 20.0


class EmbeddedEngineServer:
    """Our server (embedded or simulated) as a process of its own. It chooses its port and writes it to a file."""

    slow_start = False

    def __init__(
        self,
        spec: EngineSpec,
        rundir: RunDir,
        environment: Mapping[str, str],
        lifecycle: Lifecycle,
        health: HealthConfig,
    ) -> None:
        self.spec, self.rundir, self.environment = spec, rundir, environment
        self.lifecycle, self.health = lifecycle, health

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def kind(self) -> Kind:
        return self.spec.kind

    @contextlib.contextmanager
    def start_command(self, incarnation: int) -> Iterator[StartCommand]:
        spec, ready = self.spec, self.rundir.sockets / f"{self.name}.{incarnation}.json"
        argv = [
            *(sys.executable, "-m", "models.engines.serve"),
            *("--engine", spec.config.engine),
            *("--model-path", spec.model_path),
            *("--port", str(spec.port)),
            *("--ready-file", str(ready)),
            *("--config", msgspec.json.encode(spec.config).decode()),
            *("--seed", str(spec.seed)),
        ]
        if spec.max_context:
            argv += ["--max-context-len", str(spec.max_context)]
        yield StartCommand(argv, self.environment, ready=ready)

    def look(self, client: EngineClient, group: int) -> HealthProbe:
        return HttpProbe(client, self.health.rollout_health_check_timeout)

    async def up(self, client: EngineClient, incarnation: int) -> None:
        info = await client.server_info()
        self.lifecycle.engine_up(self.spec, client.base_url, incarnation, info.version)


class SglangServer:
    """A real SGLang server in its own environment."""

    slow_start = True

    def __init__(self, spec: EngineSpec, config: Config, installed: Installed, lifecycle: Lifecycle) -> None:
        self.spec, self.config, self.installed, self.lifecycle = spec, config, installed, lifecycle

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def kind(self) -> Kind:
        return self.spec.kind

    @contextlib.contextmanager
    def start_command(self, incarnation: int) -> Iterator[StartCommand]:
        """Raises UsageError if the port that the user chose is taken."""
        spec = self.spec
        try:
            with held_port(spec.port) as port:
                launch = server_launch(
                    self.config,
                    self.installed,
                    model_path=spec.model_path,
                    port=port,
                    max_context=spec.max_context,
                    seed=spec.seed + 7919 * incarnation,  # or it would repeat what it sampled in its last life
                    gpus=spec.gpus,
                )
                grace_s = GPU_GRACE_S if self.installed.cuda else 0.0
                yield StartCommand(
                    with_parent_death_signal(launch.argv), {**os.environ, **launch.env}, launch.url, grace_s=grace_s
                )
        except PortInUse as error:
            raise UsageError(
                f"{spec.name}: {error.strerror}; choose another --engine-port (the first of the engines' ports), or 0 "
                "for any free ones"
            ) from error

    def look(self, client: EngineClient, group: int) -> HealthProbe:
        timeout_s = self.config.health.rollout_health_check_timeout
        return SchedulerProbe(HttpProbe(client, timeout_s), group, self._slow)

    def _slow(self) -> bool:
        return self.kind == "engine" and self.lifecycle.loading(self.name)

    async def up(self, client: EngineClient, incarnation: int) -> None:
        info = await client.server_info()
        self.lifecycle.engine_up(self.spec, client.base_url, incarnation, info.version)
