"""The process of episodes: `python -m stages.agents.worker SOCKET_FD PARENT_PID MEMORY_BYTES IMPORT_PATH OPTIONS`.

It hosts episodes of one environment, each an object of its class; calls are those of stages/agents/calls.py.

Invariant: calls of one episode come one after the other; those of others run beside them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from stages.agents.calls import INFRASTRUCTURE, Begin, Begun, Call, End, Hosted, Restore, Run, Take, Taken
from stages.agents.environment import InfrastructureError, Outcome, Start, Step
from stages.agents.hosted_class import import_hosted, make
from stages.worker_calls import Handler, Refusal, become_worker, serve


class Episodes:
    """The episodes of one process."""

    def __init__(self, kind: type[Any], said: Hosted, options: Mapping[str, Any]) -> None:
        self._kind, self._said, self._options = kind, said, options
        self._there: dict[str, Any] = {}

    async def answer(self, raw: msgspec.Raw) -> object:
        """The answer to a call."""
        try:
            return await self._answered(msgspec.msgpack.decode(raw, type=Call))
        except InfrastructureError as error:
            raise Refusal(INFRASTRUCTURE, str(error)) from None

    async def _answered(self, call: Call) -> object:
        match call:
            case Begin(episode, task):
                environment = self._new(episode)
                start = _checked(await environment.reset(task), Start, "reset")
                return Begun(start, self._state(environment))
            case Restore(episode, task, state):
                self._new(episode).restore(task, state)
                return None
            case Take(episode, turn):
                environment = self._there[episode]
                step = _checked(await environment.step(turn), Step, "step")
                return Taken(step, b"" if step.done else self._state(environment))
            case End(episode):
                await self._close(episode)
                return None
            case Run(task, endpoint):
                agent = make(self._kind, self._options)
                return _checked(await agent.run(task, endpoint), Outcome, "run")

    def _new(self, episode: str) -> Any:
        self._there[episode] = environment = make(self._kind, self._options)
        return environment

    async def _close(self, episode: str) -> None:
        environment = self._there.pop(episode, None)
        if environment is not None and hasattr(environment, "close"):
            await environment.close()

    def _state(self, environment: Any) -> bytes:
        return bytes(environment.snapshot()) if self._said.snapshots else b""


def _checked(value: Any, kind: type[Any], name: str) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{name} returned {type(value).__name__}, but must return a {kind.__name__}")
    return value


def main(arguments: list[str]) -> None:
    """Serve until the socket closes. Does not return."""
    socket_fd, parent, memory, path, options = arguments

    def prepare() -> tuple[Handler, object]:
        kind, said = import_hosted(path)
        return Episodes(kind, said, json.loads(options)).answer, said

    serve(become_worker(int(socket_fd), int(parent), int(memory)), prepare)


if __name__ == "__main__":
    main(sys.argv[1:])
