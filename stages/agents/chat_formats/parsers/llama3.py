"""Calls of Llama 3: a turn that is nothing but `{"name": ..., "parameters": {...}}`, several with `;` between them.

`<|python_tag|>` may stand before the first; then text may stand before that. An object that has no name is an answer in
JSON and no call.
"""

from __future__ import annotations

from stages.agents.chat_formats.parsers.found import Found, Offered, found, read_json_at
from stages.agents.messages import ToolCall


class Llama3:
    opening = "<|python_tag|>"
    closing = ""
    reads_reasoning = False

    def parse(self, text: str, offered: Offered) -> Found:
        before, tag, written = text.partition(self.opening)
        if not tag:
            before, written = "", text
        if not tag and not written.lstrip().startswith("{"):
            return Found(text)
        calls: list[ToolCall] = []
        faults: list[str] = []
        kept, rest = before, written
        while rest := rest.lstrip(" \n;"):
            try:
                value, end = read_json_at(rest, 0)
            except ValueError:
                if tag or '"name"' in rest:
                    faults.append('the tool call is not valid JSON; a call is {"name": ..., "parameters": {...}}')
                break
            if not isinstance(value, dict) or "name" not in value:
                break
            call = offered.call(value["name"], value.get("parameters", value.get("arguments", {})))
            if isinstance(call, ToolCall):
                calls.append(call)
            else:
                faults.append(call)
                kept += rest[:end]
            rest = rest[end:]
        return found(kept + rest if calls else text, calls, faults)
