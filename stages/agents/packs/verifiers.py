"""Pack: an environment of the package `verifiers` (0.4), with its harness and its scores.

    [[environment]]
    name = "verifiers"
    python = "verifiers-venv/bin/python"      # an interpreter with verifiers and msgspec
    options = { env = { taskset = { id = "gsm8k-v1" }, agent = { harness = { id = "null" } } } }

`env` is verifiers' block of settings. Its harness sends requests to the policy through the gateway; the reward is the
mean over its traces.

Invariants: each episode has its own environment, interception server and client; a failure of verifiers' sandboxes or
servers is an InfrastructureError, every other error fails the rollout with its text.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import count, islice
from typing import Any, Final, Literal

import msgspec

from stages.agents.environment import Endpoint, InfrastructureError, Outcome, Task

try:  # imported while the worker starts: it may take many seconds
    from verifiers.v1.clients import EvalClientConfig, ModelContext
    from verifiers.v1.utils.loaders import load_environment, load_taskset, resolve_env_config
except ImportError:
    load_environment = None

_INFRASTRUCTURE: Final = ("SandboxError", "TunnelError", "InterceptionError")


class _Tasks:
    """The tasks of a taskset, read on demand."""

    def __init__(self, env: bytes) -> None:
        self._rest = iter(load_taskset(resolve_env_config(_local(msgspec.json.decode(env))).taskset))
        self._read: list[Any] = []

    def __getitem__(self, index: int) -> Any:
        """Raises IndexError after the last task."""
        self._read += islice(self._rest, max(0, index + 1 - len(self._read)))
        return self._read[index]


class Verifiers:
    """`env`: see above; programs run beside the worker (runtime `subprocess`) by default. Tasks whose number is a
    multiple of `heldout` are for evaluations."""

    def __init__(self, env: Mapping[str, Any], heldout: int = 10) -> None:
        if load_environment is None:
            raise ValueError(
                "the pack verifiers needs its package, in the interpreter `python` of the table: pip install verifiers"
            )
        self._env = msgspec.json.encode(env, order="sorted")
        resolve_env_config(_local(env))

    @classmethod
    def tasks(
        cls, split: Literal["train", "heldout"], seed: int, env: Mapping[str, Any], heldout: int = 10
    ) -> Iterator[Mapping[str, Any]]:
        """Tasks by their number in the taskset."""
        tasks = _tasks(msgspec.json.encode(env, order="sorted"))
        for index in count():
            if (index % heldout == 0) != (split == "heldout"):
                continue
            try:
                data = tasks[index].data
            except IndexError:
                return
            yield {"index": index, "input": data.prompt_text or data.name or str(index)}

    async def run(self, task: Task, endpoint: Endpoint) -> Outcome:
        key = f"SLUICE_{uuid.uuid4().hex}"  # verifiers reads keys from variables
        os.environ[key] = endpoint.api_key
        try:
            client = EvalClientConfig(base_url=f"{endpoint.base_url}/v1", api_key_var=key)
            played = load_environment(resolve_env_config(_local(msgspec.json.decode(self._env))))
            async with played.serving():
                context = ModelContext(model=endpoint.model, client=client)
                episode = await played.run_episode(_tasks(self._env)[int(task.metadata["index"])], context)
        finally:
            del os.environ[key]
        for error in (*episode.errors, *(error for trace in episode.traces for error in trace.errors)):
            words = f"{error.type}: {error.message}"
            raise InfrastructureError(words) if error.type in _INFRASTRUCTURE else RuntimeError(words)
        rewards = [trace.reward for trace in episode.traces]
        metrics = {
            name: float(reward.value)
            for trace in episode.traces
            for name, reward in trace.rewards.items()
            if reward is not None
        }
        return Outcome(sum(rewards) / len(rewards), metrics)


@cache
def _tasks(env: bytes) -> _Tasks:
    return _Tasks(env)


def _local(env: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, with the runtime `subprocess` as the default."""
    agent = {"runtime": {"type": "subprocess"}, **env.get("agent", {})}
    return {**env, "agent": agent} if "id" not in env else dict(env)
