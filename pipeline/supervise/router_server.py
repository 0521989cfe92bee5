"""The router in front of the engines: a process supervised like an engine, or one that runs already.

It is started without workers. Each engine is named to it by the replica that owns the engine, once that carries
published weights; all are named again to a router of a new incarnation, which knows none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal

from configs.schema import Config
from models.engines.client import EngineClient
from models.engines.launch.arguments import RUNNER, with_token
from models.engines.launch.environment import Installed
from models.engines.launch.routing import router_launch
from models.engines.token import TokenFile
from pipeline.facts.servers import Kind
from pipeline.hosts.launcher import Launcher, ProcessSpec
from pipeline.supervise.restart_server import StartCommand, SupervisedServer
from pipeline.supervise.restarts import Lifecycle
from stages.messages import RouterAddress

RouterKind = Literal["sglang", "smg"]


class RouterServer(SupervisedServer):
    """sglang-router or smg. Its `/health` is its own: it says 200 without any worker."""

    name = "router"
    kind: Kind = "router"

    def __init__(
        self, kind: RouterKind, config: Config, installed: Installed, lifecycle: Lifecycle, token: TokenFile
    ) -> None:
        """`token`: what requests to it must bring."""
        self.router, self.config, self.installed, self.lifecycle = kind, config, installed, lifecycle
        self.token = token
        self._metrics = ""

    @contextlib.contextmanager
    def start_command(self, incarnation: int, launcher: Launcher) -> Iterator[StartCommand]:
        held, name = launcher.held_port, self.name
        host = launcher.address(name)
        with held(name) as port, held(name) as metrics_port:
            launch = router_launch(self.config, self.installed, port=port, metrics_port=metrics_port, host=host)
            self._metrics = f"http://{host}:{metrics_port}"
            launch = with_token(launch, self.token.path, hidden="sglang")
            files = (self.token.path, RUNNER)
            process = ProcessSpec(name, launch.argv, launch.env, ours=False, sweep=True, files=files)
            yield StartCommand(process, launch.url, token=self.token.token)

    async def up(self, client: EngineClient, incarnation: int) -> None:
        version = self.installed.smg if self.router == "smg" else self.installed.router
        address = RouterAddress(self.router, client.base_url, incarnation, token=self.token.token)
        self.lifecycle.router_up(address, version or "", self._metrics)
