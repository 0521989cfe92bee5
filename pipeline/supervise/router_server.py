"""The router in front of the engines: a process supervised like an engine, or one that runs already.

It is started without workers. Each engine is named to it by the replica that owns the engine, once that carries
published weights; all are named again to a router of a new incarnation, which knows none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Literal

from configs.schema import Config
from models.engines.client import EngineClient
from models.engines.launch.environment import Installed
from models.engines.launch.routing import router_launch
from pipeline.hosts.launcher import Launcher, ProcessSpec
from pipeline.supervise.restart_server import StartCommand, SupervisedServer
from pipeline.supervise.restarts import Kind, Lifecycle

RouterKind = Literal["sglang", "smg"]


class RouterServer(SupervisedServer):
    """sglang-router or smg. Its `/health` is its own: it says 200 without any worker."""

    name = "router"
    kind: Kind = "router"

    def __init__(self, kind: RouterKind, config: Config, installed: Installed, lifecycle: Lifecycle) -> None:
        self.router, self.config, self.installed, self.lifecycle = kind, config, installed, lifecycle
        self._metrics = ""

    @contextlib.contextmanager
    def start_command(self, incarnation: int, launcher: Launcher) -> Iterator[StartCommand]:
        held, name = launcher.held_port, self.name
        host = launcher.address(name)
        with held(name) as port, held(name) as metrics_port:
            launch = router_launch(self.config, self.installed, port=port, metrics_port=metrics_port, host=host)
            self._metrics = f"http://{host}:{metrics_port}"
            argv = tuple(without_sglang(launch.argv))
            yield StartCommand(ProcessSpec(name, argv, launch.env, ours=False, sweep=True), launch.url)

    async def up(self, client: EngineClient, incarnation: int) -> None:
        version = self.installed.smg if self.router == "smg" else self.installed.router
        self.lifecycle.router_up(self.router, client.base_url, incarnation, version or "", self._metrics)


def without_sglang(argv: Sequence[str]) -> list[str]:
    """The command `PYTHON -m MODULE ...` with SGLang hidden from the module.

    sglang-router imports it where it can, for a debugging mode that is not used here, and with it torch: 6 s of
    processor time and 0.5 GB for nothing.
    """
    python, _, module, *rest = argv
    hide = f"import runpy, sys; sys.modules['sglang'] = None; runpy.run_module({module!r}, run_name='__main__')"
    return [python, "-c", hide, *rest]
