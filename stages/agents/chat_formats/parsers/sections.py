"""Calls between tokens of their own, all of a turn in one section: DeepSeek V3 and V3.1, Kimi K2, Mistral.

DeepSeek   <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>, in V3 with `function` first and the
           name and fenced arguments behind it
Kimi K2    <|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>
Mistral    [TOOL_CALLS][{"name": ..., "arguments": {...}}], or [TOOL_CALLS]NAME[ARGS]{...} for each
"""

from __future__ import annotations

import re
from typing import Final

from stages.agents.chat_formats.parsers.found import Found, Offered, blocks, called, found, read_json_at
from stages.agents.messages import ToolCall

_KIMI_ID: Final = re.compile(r"(?:functions\.)?(.+?):\d+", re.DOTALL)
_COMPACT: Final = re.compile(r"\s*([^\[\]{}\s]+)\s*(?:\[CALL_ID\]([^\[\]{}\s]*)\s*)?\[ARGS\]", re.DOTALL)


class DeepSeek:
    opening = "<｜tool▁calls▁begin｜>"
    closing = "<｜tool▁calls▁end｜>"
    reads_reasoning = False

    def parse(self, text: str, offered: Offered) -> Found:
        def read(content: str) -> ToolCall | str:
            name, _, arguments = content.partition("<｜tool▁sep｜>")
            before, fence, fenced = arguments.partition("```json")
            if fence:
                name, arguments = before, fenced.rpartition("```")[0]
            return called(offered, name.strip(), arguments)

        around = (self.opening, self.closing)
        return blocks(text, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", read, around=around)


class KimiK2:
    opening = "<|tool_calls_section_begin|>"
    closing = "<|tool_calls_section_end|>"
    reads_reasoning = False

    def parse(self, text: str, offered: Offered) -> Found:
        def read(content: str) -> ToolCall | str:
            id, _, arguments = content.partition("<|tool_call_argument_begin|>")
            named = _KIMI_ID.fullmatch(id.strip())
            return called(offered, id.strip() if named is None else named[1], arguments, id.strip())

        return blocks(text, "<|tool_call_begin|>", "<|tool_call_end|>", read, around=(self.opening, self.closing))


class Mistral:
    opening = "[TOOL_CALLS]"
    closing = ""
    reads_reasoning = False

    def parse(self, text: str, offered: Offered) -> Found:
        content, place = "", 0
        calls: list[ToolCall] = []
        faults: list[str] = []
        while (start := text.find(self.opening, place)) >= 0:
            content += text[place:start]
            inner = start + len(self.opening)
            read, end = self._read(text, inner, offered)
            for call in read:
                if isinstance(call, ToolCall):
                    calls.append(call)
                else:
                    faults.append(call)
            if not all(isinstance(call, ToolCall) for call in read):
                content += text[start:end]
            place = end
        return found(content + text[place:], calls, faults)

    def _read(self, text: str, place: int, offered: Offered) -> tuple[list[ToolCall | str], int]:
        """The calls behind a mark, and where they end."""
        compact = _COMPACT.match(text, place)
        form = f"behind {self.opening} stands a JSON list of calls, or NAME[ARGS] and a JSON object"
        try:
            value, end = read_json_at(text, place if compact is None else compact.end())
        except ValueError:
            return ["the tool call is not valid JSON; " + form], len(text)
        if compact is not None:
            return [offered.call(compact[1], value, compact[2] or "")], end
        if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
            return [form], end
        ids = [one.get("id") for one in value]
        return [
            offered.call(one.get("name"), one.get("arguments", {}), id if isinstance(id, str) else "")
            for one, id in zip(value, ids, strict=True)
        ], end
