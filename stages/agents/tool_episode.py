"""An episode in which a model may call tools before it answers: the base of the packs with tools.

A turn without a call is the answer and ends the episode. A grader scores it; it reads the last turn as the model wrote
it, without the answers of tools. Every failure of a call is an observation `error: ...`.

- A tool with side effects has `effects = True`: each of its calls is made once (stages/records/once.py), also in a
  replay of a lost episode. If it is unknown whether a call took effect, the observation is an error with that reason.
- A tool with a `version` is deterministic: version and arguments decide its answer. The process keeps these answers for
  all episodes (`AnswerCache`), because the rollouts of a group make the same calls.

Invariants:
- Every call of a turn has one observation, in order, with the id of the call and at most `result_chars` characters.
- InfrastructureError passes; every other exception of a tool is an observation.
- The cache keeps only answers, never errors. Equal calls do not run at the same time: the second waits for the answer
  of the first, and calls the tool itself if the first failed. Arguments with the same JSON are equal.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final
from weakref import WeakValueDictionary

from configs.schema.notation import did_you_mean
from stages.agents.environment import Environment, InfrastructureError, Start, Step, Task, Turn, system_message
from stages.chat.messages import Message, ToolCall
from stages.records.once import NoEffect, Once, Uncertain
from stages.tools.tool import Arguments, NoAnswer, Tool, ToolCallError, shortened

MOST_CHARS: Final = 64 << 20


class AnswerCache:
    """The cache of one process; tools of equal name and version share answers."""

    def __init__(self, most_chars: int = MOST_CHARS) -> None:
        self._kept: OrderedDict[tuple[str, str, str], str] = OrderedDict()
        self._under_way: WeakValueDictionary[tuple[str, str, str], asyncio.Lock] = WeakValueDictionary()
        self._chars, self._most = 0, most_chars

    async def call(self, tool: Tool, arguments: Arguments) -> tuple[str, bool]:
        """The answer of the tool, and whether it came from the cache. Raises the exceptions of the tool."""
        version = getattr(tool, "version", None)  # identifies what decides the answer beside them: code, index, task
        if version is None:
            return await tool.call(arguments), False
        key = (tool.name, version, json.dumps(arguments, sort_keys=True))
        lock = self._under_way.get(key) or asyncio.Lock()
        self._under_way[key] = lock  # kept while a task holds it or waits for it
        async with lock:  # released by the answer, failure or cancellation of the previous call
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key], True
            answer = await tool.call(arguments)
            self._chars += sum(map(len, (*key, answer)))
            self._kept[key] = answer
            while self._chars > self._most:
                gone, was = self._kept.popitem(last=False)
                self._chars -= sum(map(len, (*gone, was)))
            return answer, False


_ANSWERS: Final = AnswerCache()  # of all episodes of this process


@dataclass
class ToolEpisode(Environment):
    """An environment of tools; packs derive from it and implement `open_tools`.

    `max_calls` calls are answered, later calls refused. `system` is placed before the messages of the task.
    """

    max_calls: int = field(default=8, kw_only=True)
    result_chars: int = field(default=4096, kw_only=True)
    system: str = field(default="", kw_only=True)

    once: Once = field(init=False, repr=False)  # set by the worker
    _calls = _errors = _cached = 0

    def __post_init__(self) -> None:
        if self.max_calls < 1 or self.result_chars < 1:
            raise ValueError(
                f"max_calls is {self.max_calls} and result_chars {self.result_chars}; both must be at least 1"
            )
        self._tools: dict[str, Tool] = {}

    async def open_tools(self, task: Task) -> Sequence[Tool]:
        """The tools for this episode."""
        raise NotImplementedError

    async def reset(self, task: Task) -> Start:
        self._tools = {tool.name: tool for tool in await self.open_tools(task)}
        return Start(
            (*system_message(self.system), *task.messages), tuple(tool.schema for tool in self._tools.values())
        )

    async def step(self, turn: Turn) -> Step:
        if turn.truncated or not (turn.message.tool_calls or turn.malformed):
            return Step(done=True, metrics=self._metrics(), answer=turn.text)
        if turn.malformed:
            return Step((Message("tool", self._error(turn.malformed)),), answer=turn.text)
        return Step(tuple([await self._answered(call) for call in turn.message.tool_calls]), answer=turn.text)

    async def _answered(self, call: ToolCall) -> Message:
        try:
            text = await self._result(call)
        except InfrastructureError:
            raise
        except Exception as error:  # user code may raise anything; the model reads the error
            for_model = isinstance(error, ToolCallError | Uncertain)
            text = self._error(str(error) if for_model else f"{type(error).__name__}: {error}")
        return Message("tool", shortened(text, self.result_chars), tool_call_id=call.id, name=call.name)

    async def _result(self, call: ToolCall) -> str:
        self._calls += 1
        if self._calls > self.max_calls:
            raise ToolCallError(f"all {self.max_calls} calls are used up; give the answer")
        tool = self._tools.get(call.name)
        if tool is None:
            hint = did_you_mean(call.name, self._tools, otherwise=f"; there are: {', '.join(self._tools)}")
            raise ToolCallError(f"there is no tool {call.name[:100]!r}{hint}")
        if not getattr(tool, "effects", False):
            answer, kept = await _ANSWERS.call(tool, call.arguments)
            self._cached += kept
            return answer
        try:
            record = await self.once(self._effect, call.name, call.arguments)
        except NoEffect as error:
            raise InfrastructureError(str(error)) from error
        if "error" in record:
            raise ToolCallError(record["error"])
        return str(record["text"])

    async def _effect(self, name: str, arguments: Arguments) -> dict[str, str]:
        """A call with side effects. Whether an interrupted call took effect is uncertain."""
        try:
            return {"text": await self._tools[name].call(arguments)}
        except (InfrastructureError, NoAnswer) as error:
            raise Uncertain(f"whether this call took effect is not known: {error}") from error
        except ToolCallError as error:
            return {"error": str(error)}

    def _metrics(self) -> dict[str, float]:
        metrics = {"tool_calls": float(self._calls), "tool_errors": float(self._errors)}
        if any(hasattr(tool, "version") for tool in self._tools.values()):
            metrics["cached_calls"] = float(self._cached)
        return metrics

    def _error(self, words: str) -> str:
        self._errors += 1
        return f"error: {words}"
