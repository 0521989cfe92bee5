"""Plays an environment by hand: what a model would say, turn by turn."""

from __future__ import annotations

from collections.abc import Mapping

from stages.agents.environment import Environment, Start, Step, Task, Turn
from stages.chat.messages import Message, ToolCall


class Episode:
    """One episode of an environment, and its turns so far."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.turns = 0

    @staticmethod
    def task(question: str = "", *, seed: int = 0, metadata: Mapping[str, object] | None = None) -> Task:
        messages = (Message("user", question),) if question else ()
        return Task(messages, metadata=metadata or {}, seed=seed)

    async def start(self, question: str = "", *, seed: int = 0, metadata: Mapping[str, object] | None = None) -> Start:
        return await self.environment.reset(self.task(question, seed=seed, metadata=metadata))

    async def say(self, text: str, *calls: ToolCall, malformed: str = "", truncated: bool = False) -> Step:
        message = Message("assistant", text, tool_calls=calls)
        turn = Turn(self.turns, message, text, truncated, malformed)
        self.turns += 1
        return await self.environment.step(turn)

    async def call(self, name: str, arguments: Mapping[str, object] | str) -> str:
        """The observation of one call."""
        step = await self.say("", ToolCall(name, arguments, id=f"call-{self.turns}"))
        assert not step.done
        (message,) = step.messages
        assert message.role == "tool"
        assert message.tool_call_id == f"call-{self.turns - 1}"
        return message.content
