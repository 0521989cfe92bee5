"""Answers of deterministic tools, kept for all episodes of a process.

A tool that has a `version` says with it that its answers are a matter of version and arguments alone: rollouts of a
group ask the same things, and so does an episode that takes its turns again.

Invariants: only answers are kept, never what a call raised; the same is not asked twice at the same time: who comes
second waits for the answer of the first, and asks for itself if that failed; what is kept has at most `most_chars`
characters, and what was asked for longest ago goes first; arguments that are the same JSON are the same, whatever the
order of their keys.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from typing import Final, Protocol, runtime_checkable
from weakref import WeakValueDictionary

from stages.tools.tool import Arguments, Tool

MOST_CHARS: Final = 64 << 20


@runtime_checkable
class Deterministic(Protocol):
    """What a tool has besides, if the same arguments always have the same answer and a call changes nothing."""

    version: str  # names all else that the answer depends on: the code, the index, the task


class AnswerCache:
    """Of one process; tools of equal names and versions are the same tool."""

    def __init__(self, most_chars: int = MOST_CHARS) -> None:
        self._kept: OrderedDict[tuple[str, str, str], str] = OrderedDict()
        self._under_way: WeakValueDictionary[tuple[str, str, str], asyncio.Lock] = WeakValueDictionary()
        self._chars, self._most = 0, most_chars

    async def call(self, tool: Tool, arguments: Arguments) -> tuple[str, bool]:
        """The answer of the tool, and whether it is that of an earlier call. Raises what the tool raises."""
        if not isinstance(tool, Deterministic):
            return await tool.call(arguments), False
        key = (tool.name, tool.version, json.dumps(arguments, sort_keys=True))
        lock = self._under_way.get(key) or asyncio.Lock()
        self._under_way[key] = lock  # there for as long as somebody holds it or waits for it
        async with lock:  # unblocked by the answer, failure or cancellation of whoever asked before
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key], True
            answer = await tool.call(arguments)
            self._keep(key, answer)
            return answer, False

    def _keep(self, key: tuple[str, str, str], answer: str) -> None:
        self._chars += _chars(key, answer)
        self._kept[key] = answer
        while self._chars > self._most:
            gone, was = self._kept.popitem(last=False)
            self._chars -= _chars(gone, was)


def _chars(key: tuple[str, str, str], answer: str) -> int:
    return len(key[0]) + len(key[1]) + len(key[2]) + len(answer)
