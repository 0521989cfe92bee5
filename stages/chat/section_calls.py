"""Calls between special tokens (DeepSeek, Kimi K2, Mistral), in channels (gpt-oss), and as bare JSON (Llama 3).

DeepSeek   <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>, in V3 with `function` first and the
           name and fenced arguments behind it
Kimi K2    <|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>
Mistral    [TOOL_CALLS][{"name": ..., "arguments": {...}}], or [TOOL_CALLS]NAME[ARGS]{...} for each
gpt-oss    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.NAME
           <|constrain|>json<|message|>{...}<|call|>: analysis is reasoning, everything but calls is content
Llama 3    {"name": ..., "parameters": {...}} and nothing else, several with `;` between them. `<|python_tag|>` may
           stand before the first; then text may stand before that. An object without a name is an answer in JSON.
"""

from __future__ import annotations

import re
from typing import Final

from stages.chat.messages import ToolCall
from stages.chat.tool_calls import Found, Offered, blocks, called, found, read_json_at

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
        """The calls after a mark, and their end."""
        compact = _COMPACT.match(text, place)
        form = f"behind {self.opening} stands a JSON list of calls, or NAME[ARGS] and a JSON object"
        try:
            value, end = read_json_at(text, place if compact is None else compact.end())
        except ValueError:
            return ["the tool call is not valid JSON; " + form], len(text)
        if compact is not None:
            return [offered.call(compact[1], value, compact[2] or "")], end
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            return [form], end
        ids = [item.get("id") for item in value]
        return [
            offered.call(one.get("name"), one.get("arguments", {}), id if isinstance(id, str) else "")
            for one, id in zip(value, ids, strict=True)
        ], end


_BODY: Final = "<|message|>"
_HEADER: Final = re.compile(r"<\|start\|>assistant|<\|channel\|>")
_END: Final = re.compile(r"<\|(?:end|call|return)\|>|(?=<\|start\|>assistant|<\|channel\|>)")
_RECIPIENT: Final = re.compile(r"to=functions\.([^\s<]+)")
_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w*)")


class Harmony:
    opening = "<|channel|>commentary to="
    closing = "<|call|>"
    reads_reasoning = True

    def parse(self, text: str, offered: Offered) -> Found:
        reasoning: list[str] = []
        content: list[str] = []
        calls: list[ToolCall] = []
        faults: list[str] = []
        place = 0
        while (begin := text.find(_BODY, place)) >= 0:
            header = _HEADER.search(text, place, begin)
            start = begin if header is None else header.start()
            end = _END.search(text, begin + len(_BODY))
            content.append(text[place:start])
            place = len(text) if end is None else end.end()
            head, body = text[start:begin], text[begin + len(_BODY) : len(text) if end is None else end.start()]
            recipient, channel = _RECIPIENT.search(head), _CHANNEL.search(head)
            if recipient is not None:
                call = called(offered, recipient[1], body)
                if isinstance(call, ToolCall):
                    calls.append(call)
                    continue
                faults.append(call)
                content.append(text[start:place])
            elif channel is not None and channel[1] == "analysis":
                reasoning.append(body)
            else:
                content.append(body)
        content.append(text[place:])
        parts = found("".join(content), calls, faults)
        return Found(parts.content, parts.calls, parts.fault, "\n".join(reasoning))


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
