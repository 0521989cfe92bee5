"""Engines and routers that run already: found by address, checked, watched, taken back. Never started or ended.

Invariants: an engine that serves another model than the policy's is refused before it is announced (a frozen one may
serve any); a server that does not answer is taken off the topic. When it answers again, it is announced with a new
incarnation, since it may have been restarted: the engines stage then brings an engine up to date before it gets
requests, and names a router its engines again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import msgspec
from msgspec import Struct

from configs.schema.rollout import HealthConfig
from models.disk import read_file
from models.engines.access_token import Token
from models.engines.client import EngineClient
from models.engines.protocol import ModelInfo
from models.errors import EngineError, EngineTimeout
from pipeline.errors import UsageError
from pipeline.facts.run_directory import EngineSpec
from pipeline.supervise.health_probe import HealthProbe, HealthTracker, HttpProbe, SchedulerProbe, until
from pipeline.supervise.lifecycle import Lifecycle
from pipeline.supervise.restarts import Waiting
from stages.topic_values import RouterAddress

Answer = TypeVar("Answer")

POLL_S: Final = 0.5
ATTEMPTS: Final = 20  # of a question that got no answer in time
FLAG: Final = "--rollout-external-engine-addrs"
ROUTER_FLAG: Final = "--router-address"


class PolicyConfig(Struct, frozen=True):
    """The part of a checkpoint's config.json that distinguishes models."""

    architectures: tuple[str, ...] | None = None
    vocab_size: int | None = None
    hidden_size: int | None = None
    num_hidden_layers: int | None = None


def read_policy_config(directory: Path) -> PolicyConfig | None:
    """None where there is no config.json on this machine, or none that can be read."""
    try:
        return msgspec.json.decode(read_file(directory / "config.json"), type=PolicyConfig)
    except (OSError, msgspec.MsgspecError):
        return None


def differs(policy: PolicyConfig, info: ModelInfo, served: PolicyConfig | None) -> str | None:
    """In what the served model is not of the policy's shape, or None.

    `served`: the served checkpoint's config.json, where it lies on this machine too. Sizes are compared only then, or
    where the server names them: SGLang reports the architecture alone.
    """
    if policy.architectures and info.architectures and set(policy.architectures).isdisjoint(info.architectures):
        return f"it serves a {info.architectures[0]}, the policy is a {policy.architectures[0]}"
    pairs = [("vocab_size", policy.vocab_size, info.vocab_size)]
    if served is not None:
        names = ("vocab_size", "hidden_size", "num_hidden_layers")
        pairs += [(name, getattr(policy, name), getattr(served, name)) for name in names]
    for name, trained, other in pairs:
        if trained is not None and other is not None and trained != other:
            return f"its {name} is {other}, the policy's is {trained}"
    return None


class ExternalServer:
    """A server at an address, as the user gave it: `given` is the flag. `token`: what requests to it must bring."""

    def __init__(self, name: str, given: str, url: str, lifecycle: Lifecycle, health: HealthConfig) -> None:
        self.name, self.given, self.url, self.lifecycle = name, f"{given}{url}", url, lifecycle
        self.token: Token | None = None
        self.first_wait_s = health.rollout_health_check_first_wait
        self.timeout_s, self.interval_s = health.rollout_health_check_timeout, health.rollout_health_check_interval
        self.tracker = HealthTracker(health.rollout_health_check_failures)

    def client(self) -> EngineClient:
        timeout_s = self.timeout_s
        return EngineClient(self.url, control_timeout_s=timeout_s, connect_timeout_s=timeout_s, token=self.token)

    async def arrival(self, look: HttpProbe, what: str, cure: str) -> None:
        """Waits for the first good answer, at most `rollout_health_check_first_wait` seconds. Raises UsageError."""
        waiting = Waiting(self.name, self.lifecycle.say, f"waiting for {self.url}")
        fault: str | None = "no answer"
        try:
            async with asyncio.timeout(self.first_wait_s):
                while (fault := await look()) is not None:
                    if look.unauthorized:  # waiting does not help
                        raise UsageError(f"{self.given}: {fault}")
                    waiting.tick()
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise UsageError(f"{self.given}: no {what} answers there ({fault}); {cure}") from None
        waiting.over(self.url, always=False)


class ExternalEngine(ExternalServer):
    """One engine, of the policy or frozen. `run` until cancelled."""

    def __init__(self, spec: EngineSpec, lifecycle: Lifecycle, health: HealthConfig) -> None:
        flags = {"frozen": f"--frozen-engine {spec.frozen}=", "evaluation": "--eval-external-engine-addrs "}
        given = flags.get(spec.kind, f"{FLAG} ")
        super().__init__(spec.name, given, spec.external.rstrip("/"), lifecycle, health)
        self.spec, self.token = spec, spec.token.token if spec.token is not None else None

    async def run(self) -> None:
        """Waits for the engine, then watches it, in turn. Raises UsageError if it is not there or not the right one."""
        async with self.client() as client:
            first = HttpProbe(client, self.timeout_s, "/model_info")  # not /health, which may have to generate
            cure = "start it first, or give its right address, or leave it out and engines start with the run"
            if self.spec.frozen:
                cure = "start it first, or give a checkpoint, which starts with the run"
            await self.arrival(first, "healthy engine", cure)
            fault, version = await self._inspect(client)
            if fault is not None:
                raise UsageError(
                    f"{self.given}: {fault}; start it with the checkpoint of --hf-checkpoint "
                    f"({self.spec.model_path}), or leave it out"
                )
            look: HealthProbe = SchedulerProbe(first, None, self._slow)
            if self.spec.frozen and not version:
                look = first  # it has no /server_info
            for incarnation in itertools.count():
                self.lifecycle.engine_up(self.spec, self.url, incarnation, version)
                complaint = partial(self.lifecycle.complaint, self.name, incarnation)
                why = await until("lost", self.tracker, look, self.interval_s, complaint)
                self.lifecycle.away(self.spec.kind, self.name, self.url, why)
                version = await self._return(client, first)
                self.lifecycle.say(f"{self.name}: {self.url} answers again")

    def _slow(self) -> bool:
        """Whether it may load weights now; a frozen engine never gets any."""
        return not self.spec.frozen and self.lifecycle.loading(self.name)

    async def _return(self, client: EngineClient, look: HttpProbe) -> str:
        """Waits until it answers again and serves the right model; returns its version. Reports a fault once."""
        reported = ""
        while True:
            await until("recovered", self.tracker, look, self.interval_s)
            fault, version = await self._inspect(client)
            if fault is None:
                return version
            if fault != reported:
                self.lifecycle.say(f"{self.name}: {self.url} is back, but {fault}; it is left out")
                reported = fault
            self.tracker.mark_down()

    async def _inspect(self, client: EngineClient) -> tuple[str | None, str]:
        """What is wrong with the model that it serves, and the version of the server."""
        if self.spec.frozen:
            return None, await _version(client)
        try:
            server, model = await _late_answer(client.server_info), await _late_answer(client.model_info)
        except EngineError as error:
            return f"it does not report its model ({error})", ""
        policy = read_policy_config(Path(self.spec.model_path))
        if policy is None:
            return None, server.version
        return differs(policy, model, read_policy_config(Path(model.model_path))), server.version


async def _version(client: EngineClient) -> str:
    """The name that a server reports, "" if none: a frozen engine may be of an unknown kind."""
    try:
        return (await _late_answer(client.server_info)).version
    except EngineError:
        return ""


async def _late_answer(ask: Callable[[], Awaitable[Answer]]) -> Answer:
    """Asks again after a timeout: a busy server answers late, which says nothing of its model. Raises EngineError."""
    for _ in range(ATTEMPTS - 1):
        with contextlib.suppress(EngineTimeout):
            return await ask()
    return await ask()


class ExternalRouter(ExternalServer):
    """A router. `run` until cancelled."""

    def __init__(
        self, kind: str, address: str, lifecycle: Lifecycle, health: HealthConfig, token: Token | None = None
    ) -> None:
        super().__init__("router", f"{ROUTER_FLAG} ", address.rstrip("/"), lifecycle, health)
        self.kind, self.token = kind, token

    async def run(self) -> None:
        """Waits for the router, then watches it, in turn. Raises UsageError if it is not there."""
        async with self.client() as client:
            look = HttpProbe(client, self.timeout_s)
            cure = "start it first, or give its right address, or leave it out and one starts with the run"
            await self.arrival(look, "router", cure)
            for incarnation in itertools.count():
                self.lifecycle.router_up(RouterAddress(self.kind, self.url, incarnation, token=self.token), "", "")
                why = await until("lost", self.tracker, look, self.interval_s)
                self.lifecycle.away("router", self.name, self.url, why)
                await until("recovered", self.tracker, look, self.interval_s)
                self.lifecycle.say(f"router: {self.url} answers again")
