"""All servers of a run: its engines, frozen engines and the router, each with a supervisor, or a watcher for one that
runs already; and the fetchers, processes that bring weights to the engines' nodes other than the controller's.

Invariants:
- servers start in parallel; SGLang's environment is inspected only if a server runs in it;
- an engine that leaves has given back its requests, or has had the time for it; the number of an engine is used once,
  so that a report about one is never taken for another;
- the router is started without workers. The replica that owns an engine registers it once it carries published
  weights; all are registered again with a router of a new incarnation, which knows none;
- a node has at most one fetcher. It starts with the node's first engine, restarts when lost, and ends with the last
  engine; an engine is announced with the name of its node's fetcher.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Final, Literal

import msgspec

from configs.schema import Config, router_kind
from models.engines.access_token import TokenFile
from models.engines.client import EngineClient
from models.engines.launch.command import RUNNER, router_launch, with_token
from models.engines.launch.environment import Installed
from pipeline.errors import check_repeatable
from pipeline.facts.run_directory import EngineSpec, Kind
from pipeline.facts.stats import STATS_PREFIX
from pipeline.graph import STAGES, Node
from pipeline.hosts.launcher import HostGone, Launcher, ProcessSpec, at_most, describe_exit
from pipeline.hosts.machine import HOST
from pipeline.hosts.rendezvous import retire_key, spec_key
from pipeline.preflight.refusals import prepare_sglang
from pipeline.supervise.engine_servers import EmbeddedOrSimulatedServer, InProcessEngine, SglangServer
from pipeline.supervise.external_servers import ExternalEngine, ExternalRouter
from pipeline.supervise.lifecycle import Lifecycle
from pipeline.supervise.restarts import ServerSupervisor, StartCommand, SupervisedServer, Supervision, end_if_silent
from stages.base import beside
from stages.engines.stage import END
from stages.topic_values import ADDRESS, DIRECTORY, LEAVE, RouterAddress, entries

STAGE: Final = "fetcher"


class WeightFetchers:
    """Of one run. `tasks`: where they are looked after, while the servers run."""

    tasks: asyncio.TaskGroup

    def __init__(self, shared: Supervision) -> None:
        self._shared, self._topic, self._launcher = shared, shared.topic, shared.launcher
        self._engines: dict[str, str] = {}  # engine -> its host
        self._by_host: dict[str, str] = {}  # host -> its fetcher
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
        if host not in self._by_host:
            number = next(self._numbers)
            self._by_host[host] = f"{STAGE}-{number}"
            self.tasks.create_task(self._keep(number, host))
        return self._by_host[host]

    def left(self, engine: str) -> None:
        """An engine is not where it was."""
        host = self._engines.pop(engine, None)
        if host is not None and host not in self._engines.values() and (name := self._by_host.pop(host, None)):
            self._topic.publish(retire_key(name), b"")

    async def _keep(self, number: int, host: str) -> None:
        """Waits for the end of a fetcher; starts it again unless it ended well, or its host is gone."""
        placement, restarts = self._shared.placement, self._shared.restarts
        spec = placement.replica(Node(STAGE, STAGES[STAGE]), number, 1)
        name, process = spec.replica, self._shared.entry.process(spec.replica)
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
            check_repeatable(name, code, handle.last_line(), placement.rundir.path)
            await restarts.again(STAGE, name, describe_exit(code), handle.last_line(), handle.log)
        if self._by_host.get(host) == name:
            del self._by_host[host]
        if self._topic.get(END) is None:
            restarts.lifecycle.retired(STAGE, name, "no engine is left on its node")
        for key in (spec_key(name), retire_key(name)):
            self._topic.drop(key)
        await self._launcher.release(name)


RouterKind = Literal["sglang", "smg"]


class RouterServer(SupervisedServer):
    """sglang-router or smg. Its `/health` covers itself only: it is 200 without any worker."""

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


LEAVE_S: Final = 30.0  # time for an engine to return its requests


Own = InProcessEngine | ServerSupervisor  # ends for good when it is retired


class Servers:
    """The servers of one run. `in_process`: whether our own engines run as threads of this process."""

    def __init__(self, shared: Supervision, *, in_process: bool) -> None:
        self._shared, self._in_process = shared, in_process
        self.config, self.placement, self.topic = shared.config, shared.placement, shared.topic
        self.fetchers = WeightFetchers(shared)
        self._tasks: asyncio.TaskGroup | None = None  # while they run
        self._engines: dict[str, tuple[Own, asyncio.Task[None]]] = {}  # engines that may be retired
        self._leaving: set[str] = set()
        self._numbers = len(self.placement.engines)  # of the next engine
        self._installed: Installed | None = None

    @property
    def engines(self) -> list[str]:
        """Names of the engines that generate and are to stay, the oldest first."""
        return [spec.name for spec in self.placement.engines if spec.name not in self._leaving]

    async def run(self) -> None:
        """Waits for all servers; unblocked by cancellation, or by the first that cannot be started again.

        The owner of the launcher stops the processes.
        """
        supervisors = await self.supervisors([*self.placement.engines, *self.placement.beside])
        started = [name for name, server in supervisors.items() if isinstance(server, ServerSupervisor)]
        await self._shared.launcher.end_left(started)
        generating = {spec.name for spec in self.placement.engines}
        async with asyncio.TaskGroup() as self._tasks:
            self.fetchers.tasks = self._tasks
            for name, server in supervisors.items():
                task = self._tasks.create_task(server.run())
                if name in generating and not isinstance(server, ExternalEngine | ExternalRouter):
                    self._engines[name] = server, task
        self._tasks = None

    def scalable(self) -> str | None:
        """Why engines cannot come and go now, None if they can."""
        config = self.config
        if config.sglang.rollout_external_engine_addrs:
            return "they are not started by this run (--rollout-external-engine-addrs)"
        if config.asynchrony.colocate:
            return "they share their devices with the trainer (--colocate)"
        if config.engine.engine == "sglang" and config.sglang.rollout_num_gpus is not None:
            return "--rollout-num-gpus is their number; resume the run with another value"
        return None if self._tasks is not None and self._engines else "they have not been started yet"

    def scale(self, count: int) -> None:
        """Start engines, or retire the youngest; call `scalable` first. Raises UsageError without a GPU for one."""
        present = self.engines
        assert self._tasks is not None
        for _ in range(count - len(present)):
            spec = self.placement.engine(self._numbers)
            self._shared.launcher.expect(spec.name)
            self._numbers += 1
            self.placement.engines.append(spec)
            server = self._started(spec)
            self._engines[spec.name] = server, self._tasks.create_task(server.run())
        for name in present[count:]:
            self._leaving.add(name)
            self._tasks.create_task(self._retire(next(s for s in self.placement.engines if s.name == name)))

    async def _retire(self, spec: EngineSpec) -> None:
        """Waits until the engine has returned its requests, `LEAVE_S` at most, then ends it."""
        name = spec.name
        self.topic.publish(LEAVE + name, b"")
        async with at_most(LEAVE_S):  # it is lost then, and its requests continue elsewhere
            revision = 0
            while self.topic.get(ADDRESS + name) is not None and not self._has_left(name):
                revision = await self.topic.wait(revision, ADDRESS + name, DIRECTORY + name)
        engine, task = self._engines.pop(name)
        engine.retire()
        await asyncio.wait({task})  # else it might still be announced
        self.placement.engines.remove(spec)
        self._leaving.remove(name)
        self.fetchers.left(name)
        await self._shared.launcher.release(name)
        self._shared.lifecycle.engine_left(spec)
        self.topic.drop(LEAVE + name)

    def _has_left(self, name: str) -> bool:
        entry = entries(self.topic).get(name)
        return entry is not None and entry.state == "left"

    async def supervisors(self, specs: Sequence[EngineSpec]) -> dict[str, Own | ExternalEngine | ExternalRouter]:
        """What supervises or watches each of the servers: these engines, and the router."""
        config, lifecycle, health = self.config, self._shared.lifecycle, self.config.health
        supervisors: dict[str, Own | ExternalEngine | ExternalRouter] = {
            spec.name: ExternalEngine(spec, lifecycle, health) for spec in specs if spec.external
        }
        router, address = router_kind(config), config.router.router_address
        if router != "none" and address is not None:
            token = self.placement.external_token
            supervisors["router"] = ExternalRouter(router, address, lifecycle, health, token.token if token else None)
        if (router != "none" and address is None) or any(not spec.ours and not spec.external for spec in specs):
            # In a thread: it may have to run SGLang's imports, which take seconds.
            self._installed = await asyncio.to_thread(prepare_sglang, config, warn=False)
        supervisors |= {spec.name: self._started(spec) for spec in specs if not spec.external}
        if router != "none" and address is None and self._installed is not None:
            token = self.placement.run_token()
            supervisors["router"] = self._supervised(RouterServer(router, config, self._installed, lifecycle, token))
        return supervisors

    def _started(self, spec: EngineSpec) -> Own:
        """The supervisor of an engine that the run starts."""
        lifecycle = self._shared.lifecycle
        if spec.ours and self._in_process:
            return InProcessEngine(spec, lifecycle)
        if spec.ours:
            return self._supervised(EmbeddedOrSimulatedServer(spec, lifecycle, self.fetchers.beside))
        assert self._installed is not None
        return self._supervised(SglangServer(spec, self.config, self._installed, lifecycle, self.fetchers.beside))

    def _supervised(self, server: SupervisedServer) -> ServerSupervisor:
        return ServerSupervisor(server, self._shared.launcher, self._shared.restarts, self.config.health)
