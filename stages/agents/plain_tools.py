"""Calls of tools in plain text, for `--tools`.

This is an environment of tools like the pack `functions`, for prompts that the data already contains. Engines have the
first turn, and the agents stage gets a rollout only after a call. A call stands between two marks. Its result is
appended by a template, without the markup of a chat format.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from configs.schema import ToolsConfig
from stages.agents.environment import Turn
from stages.agents.tool_episode import ToolEpisode
from stages.chat.marked_calls import Marked
from stages.chat.messages import Message, ToolCall
from stages.chat.tool_calls import Offered
from stages.messages import Sample
from stages.tools.registry import Bounded
from stages.tools.tool import RESULT_CHARS, Tool


class PlainTools(ToolEpisode):
    """One object serves all rollouts of a replica, because it has no state. Only `--max-turns` bounds the calls."""

    def __init__(self, tools: Mapping[str, Tool], settings: ToolsConfig) -> None:
        super().__init__(max_calls=sys.maxsize, result_chars=2 * RESULT_CHARS)
        self._tools = {name: Bounded(tool, settings.tool_deadline_s) for name, tool in tools.items()}
        self._marked = Marked(settings.tool_call_open, settings.tool_call_close)
        self._offered = Offered([tool.schema for tool in tools.values()])

    async def answer(self, response: str) -> str:
        """The result of the call that ends a response. Errors are results of the form `error: ...`."""
        call = self._marked.last(response, self._offered)
        calls, malformed = ((call,), "") if isinstance(call, ToolCall) else ((), call)
        turn = Turn(0, Message("assistant", response, tool_calls=calls), response, malformed=malformed)
        [message] = (await self.step(turn)).messages
        return message.content


def ends_in_call(settings: ToolsConfig, sample: Sample) -> bool:
    """Whether the last turn of a sample ended in a call."""
    return (
        bool(settings.tools)
        and sample.status == "completed"
        and not sample.done
        and sample.response.rstrip().endswith(settings.tool_call_close)
    )
