"""Engines and routers that run already: found by address, checked, watched, taken back. Never started or ended.

Invariants: an engine that serves another model than the policy's is refused before it is announced (a frozen one may
serve any); a server that does not answer is taken off the topic. When it answers again, it is announced with a new
incarnation, since it may have been restarted: the engines stage then brings an engine up to date before it gets
requests, and names a router its engines again.
"""

from __future__ import annotations

import asyncio
import itertools
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from configs.schema.rollout import HealthConfig
from models.engines.client import EngineClient
from models.engines.protocol import ModelInfo
from models.engines.token import Token
from models.errors import EngineError
from pipeline.errors import UsageError
from pipeline.facts.run_directory import EngineSpec
from pipeline.supervise.health_probe import HealthProbe, HealthTracker, HttpProbe, SchedulerProbe, until
from pipeline.supervise.lifecycle import Lifecycle
from pipeline.supervise.restarts import Waiting
from stages.topic_values import RouterAddress

POLL_S: Final = 0.5
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
        return msgspec.json.decode((directory / "config.json").read_bytes(), type=PolicyConfig)
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


class ExternalEngine:
    """One engine at an address, of the policy or frozen. `run` until cancelled."""

    def __init__(self, spec: EngineSpec, lifecycle: Lifecycle, health: HealthConfig) -> None:
        self.spec, self.lifecycle, self.health = spec, lifecycle, health
        self.url = spec.external.rstrip("/")
        self.given = f"--frozen-engine {spec.frozen}={self.url}" if spec.frozen else f"{FLAG} {self.url}"

    async def run(self) -> None:
        """Waits for the engine, then watches it, in turn. Raises UsageError if it is not there or not the right one."""
        timeout_s, interval_s = self.health.rollout_health_check_timeout, self.health.rollout_health_check_interval
        token = self.spec.token.token if self.spec.token is not None else None
        async with EngineClient(
            self.url, control_timeout_s=timeout_s, connect_timeout_s=timeout_s, token=token
        ) as client:
            first = HttpProbe(client, timeout_s, "/model_info")  # not /health, which may have to generate
            cure = "start it first, or give its right address, or leave it out and engines start with the run"
            if self.spec.frozen:
                cure = "start it first, or give a checkpoint, which starts with the run"
            await arrival(self.spec.name, self.url, first, self.lifecycle, self.health, self.given, cure)
            fault, version = await self._inspect(client)
            if fault is not None:
                raise UsageError(
                    f"{self.given}: {fault}; start it with the checkpoint of --hf-checkpoint "
                    f"({self.spec.model_path}), or leave it out"
                )
            incarnation = 0
            account = HealthTracker(self.health.rollout_health_check_failures)
            look: HealthProbe = SchedulerProbe(first, None, self._slow)
            if self.spec.frozen and not version:
                look = first  # it has no /server_info
            while True:
                self.lifecycle.engine_up(self.spec, self.url, incarnation, version)
                complaint = partial(self.lifecycle.complaint, self.spec.name, incarnation)
                self.lifecycle.engine_away(self.spec, await until("lost", account, look, interval_s, complaint))
                version = await self._return(client, first, account)
                incarnation += 1
                self.lifecycle.say(f"{self.spec.name}: {self.url} answers again")

    def _slow(self) -> bool:
        """Whether it may load weights now; a frozen engine never gets any."""
        return not self.spec.frozen and self.lifecycle.loading(self.spec.name)

    async def _return(self, client: EngineClient, look: HttpProbe, account: HealthTracker) -> str:
        """Waits until it answers again and serves the right model; returns its version. Reports a fault once."""
        reported = ""
        while True:
            await until("recovered", account, look, self.health.rollout_health_check_interval)
            fault, version = await self._inspect(client)
            if fault is None:
                return version
            if fault != reported:
                self.lifecycle.say(f"{self.spec.name}: {self.url} is back, but {fault}; it is left out")
                reported = fault
            account.mark_down()

    async def _inspect(self, client: EngineClient) -> tuple[str | None, str]:
        """What is wrong with the model that it serves, and the version of the server."""
        if self.spec.frozen:
            return None, await _version(client)
        try:
            server, model = await client.server_info(), await client.model_info()
        except EngineError as error:
            return f"it does not report its model ({error})", ""
        policy = read_policy_config(Path(self.spec.model_path))
        if policy is None:
            return None, server.version
        return differs(policy, model, read_policy_config(Path(model.model_path))), server.version


async def _version(client: EngineClient) -> str:
    """The name that a server reports, "" if none: a frozen engine may be of an unknown kind."""
    try:
        return (await client.server_info()).version
    except EngineError:
        return ""


class ExternalRouter:
    """A router at an address. `run` until cancelled."""

    def __init__(
        self, kind: str, address: str, lifecycle: Lifecycle, health: HealthConfig, token: Token | None = None
    ) -> None:
        """`token`: what requests to it must bring."""
        self.kind, self.url, self.lifecycle, self.health = kind, address.rstrip("/"), lifecycle, health
        self.token = token

    async def run(self) -> None:
        """Waits for the router, then watches it, in turn. Raises UsageError if it is not there."""
        timeout_s, interval_s = self.health.rollout_health_check_timeout, self.health.rollout_health_check_interval
        async with EngineClient(
            self.url, control_timeout_s=timeout_s, connect_timeout_s=timeout_s, token=self.token
        ) as client:
            look = HttpProbe(client, timeout_s)
            cure = "start it first, or give its right address, or leave it out and one starts with the run"
            await arrival("router", self.url, look, self.lifecycle, self.health, f"{ROUTER_FLAG} {self.url}", cure)
            account = HealthTracker(self.health.rollout_health_check_failures)
            for incarnation in itertools.count():
                self.lifecycle.router_up(RouterAddress(self.kind, self.url, incarnation, token=self.token), "", "")
                self.lifecycle.router_away(self.url, await until("lost", account, look, interval_s))
                await until("recovered", account, look, interval_s)
                self.lifecycle.say(f"router: {self.url} answers again")


async def arrival(
    name: str, url: str, look: HttpProbe, lifecycle: Lifecycle, health: HealthConfig, given: str, cure: str
) -> None:
    """Waits for the first good answer, at most `rollout_health_check_first_wait` seconds. Raises UsageError."""
    waiting = Waiting(name, lifecycle.say, f"waiting for {url}")
    fault: str | None = "no answer"
    try:
        async with asyncio.timeout(health.rollout_health_check_first_wait):
            while (fault := await look()) is not None:
                if look.unauthorized:  # waiting does not help
                    raise UsageError(f"{given}: {fault}")
                waiting.tick()
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        what = "router" if name == "router" else "healthy engine"
        raise UsageError(f"{given}: no {what} answers there ({fault}); {cure}") from None
    waiting.over(url, always=False)
