"""Pack: an environment that an OpenEnv server hosts (the package `openenv`, 0.10), over its WebSocket sessions.

    [[environment]]
    name = "openenv"
    python = "openenv-venv/bin/python"      # an interpreter with openenv and msgspec
    options = { url = "http://127.0.0.1:8000", action = "message", observation = "echoed_message" }

The model's turn becomes the field `action` of an action; if `action` is "", the turn is the whole action as a JSON
object. The model reads the field `observation`, or the whole observation as JSON.

Invariants: a refused or failed action is an observation; a server that is unreachable, full or ends a session is an
InfrastructureError.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from stages.agents.environment import InfrastructureError, Start, Step, Task, Turn, system_message
from stages.chat.messages import Message

try:  # imported while the worker starts: it may take many seconds
    from openenv.core import GenericEnvClient
except ImportError:
    GenericEnvClient = None

_REFUSED: Final = re.compile(r"Server error: (.*) \(code: \S*(VALIDATION_ERROR|EXECUTION_ERROR)\S*\)", re.DOTALL)


class Openenv:
    """`url` of the server; `action`, `observation`: see above; `reset`: sent at the start of an episode, with the
    task's seed and the row's `metadata.reset`; `system` stands before the first observation; `deadline_s` of an
    answer."""

    def __init__(
        self,
        url: str,
        action: str = "",
        observation: str = "",
        reset: Mapping[str, Any] | None = None,
        system: str = "",
        deadline_s: float = 60.0,
    ) -> None:
        if GenericEnvClient is None:
            raise ValueError(
                "the pack openenv needs its package, in the interpreter `python` of the table: pip install openenv"
            )
        self._url, self._action, self._observation, self._system = url, action, observation, system
        self._reset, self._deadline_s = dict(reset or {}), deadline_s
        self._client: Any = None
        self._steps = 0

    async def reset(self, task: Task) -> Start:
        self._client = GenericEnvClient(base_url=self._url, message_timeout_s=self._deadline_s)
        chosen = {**self._reset, **task.metadata.get("reset", {})}
        try:
            await self._client.connect()
            first = await self._client.reset(**{"seed": task.seed & 0x7FFFFFFF, **chosen})
        except Exception as error:  # its libraries raise many kinds: refusals, closed sockets, time-outs
            raise InfrastructureError(f"the OpenEnv server at {self._url} begins no episode: {error}") from None
        shown = Message("user", self._shown(first.observation))
        return Start((*system_message(self._system), *task.messages, shown))

    async def step(self, turn: Turn) -> Step:
        try:
            action = self._chosen(turn)
        except ValueError as error:
            return Step((Message("user", f"error: {error}"),))
        try:
            result = await self._client.step(action)
        except RuntimeError as error:
            if (refused := _REFUSED.fullmatch(str(error))) is None:
                raise InfrastructureError(f"the OpenEnv server at {self._url}: {error}") from None
            return Step((Message("user", f"error: {refused[1][:2000]}"),))
        except Exception as error:  # as above
            raise InfrastructureError(f"the OpenEnv server at {self._url}: {error}") from None
        self._steps += 1
        reward = None if result.reward is None else float(result.reward)
        if result.done:
            return Step(reward=reward, done=True, metrics={"steps": float(self._steps)})
        return Step((Message("user", self._shown(result.observation)),), reward=reward)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    def _chosen(self, turn: Turn) -> dict[str, Any]:
        """The action of a turn. Raises ValueError with a text for the model."""
        text = turn.message.content.strip()
        if self._action:
            return {self._action: text}
        try:
            action = json.loads(text)
        except ValueError as error:
            raise ValueError(f"an action is a JSON object, and this is not JSON ({error})") from None
        if not isinstance(action, dict):
            raise ValueError(f"an action is a JSON object, not {type(action).__name__}")
        return action

    def _shown(self, observation: Mapping[str, Any]) -> str:
        if not self._observation:
            return json.dumps(observation, sort_keys=True)
        if self._observation not in observation:
            keys = ", ".join(sorted(observation)) or "nothing"
            raise ValueError(f"options.observation is {self._observation!r}, but an observation has: {keys}")
        value = observation[self._observation]
        return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
