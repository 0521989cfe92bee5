"""Engines that run already: found by address, checked, watched, taken back when they return. Never started or ended.

Invariants: an engine that serves another model than the policy's is refused before it is announced; one that does not
answer is taken off the topic, and announced with a new incarnation when it does, since it may have been started anew
with other weights: whoever owns it then brings it up to date before it gets requests.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from configs.schema.health import HealthConfig
from models.engines.client import EngineClient
from models.engines.errors import EngineError
from models.engines.protocol import ModelInfo
from pipeline.errors import UsageError
from pipeline.health import Account, HttpLook, SchedulerLook, until
from pipeline.keeper import Waiting
from pipeline.lifecycle import EngineSpec, Lifecycle

POLL_S: Final = 0.5
FLAG: Final = "--rollout-external-engine-addrs"


class PolicyConfig(Struct, frozen=True):
    """What of a checkpoint's config.json tells models apart."""

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


def differs(policy: PolicyConfig, info: ModelInfo, theirs: PolicyConfig | None) -> str | None:
    """In what the served model is not of the policy's shape, or None.

    `theirs`: the served checkpoint's config.json, where it lies on this machine too. Sizes are compared only then, or
    where the server names them: SGLang tells the architecture alone.
    """
    if policy.architectures and info.architectures and set(policy.architectures).isdisjoint(info.architectures):
        return f"it serves a {info.architectures[0]}, the policy is a {policy.architectures[0]}"
    pairs = [("vocab_size", policy.vocab_size, info.vocab_size)]
    if theirs is not None:
        names = ("vocab_size", "hidden_size", "num_hidden_layers")
        pairs += [(name, getattr(policy, name), getattr(theirs, name)) for name in names]
    for name, ours, other in pairs:
        if ours is not None and other is not None and ours != other:
            return f"its {name} is {other}, the policy's is {ours}"
    return None


class ExternalEngine:
    """One engine at an address. `run` until cancelled."""

    def __init__(self, spec: EngineSpec, lifecycle: Lifecycle, health: HealthConfig) -> None:
        self.spec, self.lifecycle, self.health = spec, lifecycle, health
        self.url = spec.external.rstrip("/")

    async def run(self) -> None:
        """Waits for the engine, then watches it, in turn. Raises UsageError if it is not there or not the right one."""
        timeout_s, interval_s = self.health.rollout_health_check_timeout, self.health.rollout_health_check_interval
        async with EngineClient(self.url, control_timeout_s=timeout_s, connect_timeout_s=timeout_s) as client:
            first = HttpLook(client, timeout_s, "/model_info")  # not /health, which may have to generate
            await self._arrival(first)
            fault, version = await self._inspect(client)
            if fault is not None:
                raise UsageError(
                    f"{FLAG} {self.url}: {fault}; start it with the checkpoint of --hf-checkpoint "
                    f"({self.spec.model_path}), or leave it out"
                )
            incarnation = 0
            account = Account(self.health.rollout_health_check_failures)
            look = SchedulerLook(first, None, lambda: self.lifecycle.loading(self.spec.name))
            while True:
                self.lifecycle.engine_up(self.spec, self.url, incarnation, version)
                self.lifecycle.engine_away(self.spec, await until("lost", account, look, interval_s))
                version = await self._return(client, first, account)
                incarnation += 1
                self.lifecycle.say(f"{self.spec.name}: {self.url} answers again")

    async def _arrival(self, look: HttpLook) -> None:
        """Waits for its first good answer, at most `rollout_health_check_first_wait` seconds."""
        waiting = Waiting(self.spec.name, self.lifecycle.say, f"waiting for {self.url}")
        fault: str | None = "no answer"
        try:
            async with asyncio.timeout(self.health.rollout_health_check_first_wait):
                while (fault := await look()) is not None:
                    waiting.tick()
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise UsageError(
                f"{FLAG} {self.url}: no healthy engine answers there ({fault}); start it first, or give its right "
                "address, or leave it out and engines start with the run"
            ) from None
        waiting.over(self.url, always=False)

    async def _return(self, client: EngineClient, look: HttpLook, account: Account) -> str:
        """Waits until it answers again and serves the right model; returns its version. Says once what is wrong."""
        told = ""
        while True:
            await until("recovered", account, look, self.health.rollout_health_check_interval)
            fault, version = await self._inspect(client)
            if fault is None:
                return version
            if fault != told:
                self.lifecycle.say(f"{self.spec.name}: {self.url} is back, but {fault}; it is left out")
                told = fault
            account.mark_down()

    async def _inspect(self, client: EngineClient) -> tuple[str | None, str]:
        """What is wrong with the model that it serves, and the version of the server."""
        try:
            server, model = await client.server_info(), await client.model_info()
        except EngineError as error:
            return f"it does not say what it serves ({error})", ""
        policy = read_policy_config(Path(self.spec.model_path))
        if policy is None:
            return None, server.version
        return differs(policy, model, read_policy_config(Path(model.model_path))), server.version
