"""Calls between special tokens (DeepSeek, Kimi K2, Mistral), in channels (gpt-oss), as bare JSON (Llama 3), and
as a Python list (Llama 4).

DeepSeek   <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>, in V3 with `function` first and the
           name and fenced arguments behind it
Kimi K2    <|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>
Mistral    [TOOL_CALLS][{"name": ..., "arguments": {...}}], or [TOOL_CALLS]NAME[ARGS]{...} for each
gpt-oss    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.NAME
           <|constrain|>json<|message|>{...}<|call|>: analysis is reasoning, everything but calls is content
Llama 3    {"name": ..., "parameters": {...}} and nothing else, several with `;` between them. `<|python_tag|>` may
           stand before the first; then text may stand before that. An object without a name is an answer in JSON.
Llama 4    [look(place="here", times=2), wait()], parsed to a syntax tree and never evaluated. A list that names no tool
           on offer is content.
"""

from __future__ import annotations

import ast
import re
from typing import Final

import msgspec
from msgspec.structs import replace

from stages.chat.messages import ToolCall
from stages.chat.tool_calls import CALL_CHARS, CallParser, Found, Offered, blocks, called, found, read_json_at

_KIMI_ID: Final = re.compile(r"(?:functions\.)?(.+?):\d+", re.DOTALL)
_COMPACT: Final = re.compile(r"\s*([^\[\]{}\s]+)\s*(?:\[CALL_ID\]([^\[\]{}\s]*)\s*)?\[ARGS\]", re.DOTALL)


class DeepSeek(CallParser):
    opening = "<｜tool▁calls▁begin｜>"
    closing = "<｜tool▁calls▁end｜>"

    def parse(self, text: str, offered: Offered) -> Found:
        def read(content: str) -> ToolCall | str:
            name, _, arguments = content.partition("<｜tool▁sep｜>")
            before, fence, fenced = arguments.partition("```json")
            if fence:
                name, arguments = before, fenced.rpartition("```")[0]
            return called(offered, name.strip(), arguments)

        around = (self.opening, self.closing)
        return blocks(text, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", read, around=around)


class KimiK2(CallParser):
    opening = "<|tool_calls_section_begin|>"
    closing = "<|tool_calls_section_end|>"

    def parse(self, text: str, offered: Offered) -> Found:
        def read(content: str) -> ToolCall | str:
            id, _, arguments = content.partition("<|tool_call_argument_begin|>")
            named = _KIMI_ID.fullmatch(id.strip())
            return called(offered, id.strip() if named is None else named[1], arguments, id.strip())

        return blocks(text, "<|tool_call_begin|>", "<|tool_call_end|>", read, around=(self.opening, self.closing))


class Mistral(CallParser):
    opening = "[TOOL_CALLS]"

    def parse(self, text: str, offered: Offered) -> Found:
        content, place = "", 0
        calls: list[ToolCall | str] = []
        while (start := text.find(self.opening, place)) >= 0:
            content += text[place:start]
            read, end = self._read(text, start + len(self.opening), offered)
            calls += read
            if not all(isinstance(call, ToolCall) for call in read):
                content += text[start:end]
            place = end
        return found(content + text[place:], calls)

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
        return [
            offered.call(one.get("name"), one.get("arguments", {}), id if isinstance(id, str) else "")
            for one, id in zip(value, [item.get("id") for item in value], strict=True)
        ], end


_BODY: Final = "<|message|>"
_HEADER: Final = re.compile(r"<\|start\|>assistant|<\|channel\|>")
_END: Final = re.compile(r"<\|(?:end|call|return)\|>|(?=<\|start\|>assistant|<\|channel\|>)")
_RECIPIENT: Final = re.compile(r"to=functions\.([^\s<]+)")
_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w*)")


class Harmony(CallParser):
    opening = "<|channel|>commentary to="
    closing = "<|call|>"
    reads_reasoning = True

    def parse(self, text: str, offered: Offered) -> Found:
        reasoning: list[str] = []
        content: list[str] = []
        calls: list[ToolCall | str] = []
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
                calls.append(called(offered, recipient[1], body))
                if not isinstance(calls[-1], ToolCall):
                    content.append(text[start:place])
            elif channel is not None and channel[1] == "analysis":
                reasoning.append(body)
            else:
                content.append(body)
        content.append(text[place:])
        return found("".join(content), calls, "\n".join(reasoning))


class Llama3(CallParser):
    opening = "<|python_tag|>"

    def parse(self, text: str, offered: Offered) -> Found:
        kept, tag, rest = text.partition(self.opening)
        if not tag:
            kept, rest = "", text
        if not tag and not rest.lstrip().startswith("{"):
            return Found(text)
        calls: list[ToolCall | str] = []
        while rest := rest.lstrip(" \n;"):
            try:
                value, end = read_json_at(rest, 0)
            except ValueError:
                if tag or '"name"' in rest:
                    calls.append('the tool call is not valid JSON; a call is {"name": ..., "parameters": {...}}')
                break
            if not isinstance(value, dict) or "name" not in value:
                break
            call = offered.call(value["name"], value.get("parameters", value.get("arguments", {})))
            calls.append(call)
            if not isinstance(call, ToolCall):
                kept += rest[:end]
            rest = rest[end:]
        return found(kept + rest if any(isinstance(call, ToolCall) for call in calls) else text, calls)


_BEGIN: Final = re.compile(r"\[\s*([A-Za-z_][\w.]*)\s*\(")
_CONSTANTS: Final = {"true": True, "false": False, "null": None}
_BRACKET_OR_STRING: Final = re.compile(r"""[\[({\])}]|'(?:[^'\\]|\\.)*+'|"(?:[^"\\]|\\.)*+"|['"]""", re.DOTALL)


class Pythonic(CallParser):
    opening = "<|python_start|>"
    closing = "<|python_end|>"

    def parse(self, text: str, offered: Offered) -> Found:
        names = offered.names
        begin = next((match for match in _BEGIN.finditer(text) if match[1] in names), None)
        begin = begin or (_BEGIN.match(text.replace(self.opening, "").lstrip()) and _BEGIN.search(text))
        if begin is None:
            return Found(text)
        end = _closing(text, begin.start())
        if end < 0:
            return Found(text, fault="the tool call is not closed: end it with ]")
        rest = (text[: begin.start()] + text[end:]).replace(self.opening, "").replace(self.closing, "")
        parsed = found(rest, _read(text[begin.start() : end], offered))
        return replace(parsed, content=text) if parsed.fault else parsed


def _closing(text: str, place: int) -> int:
    """Index after the bracket that closes the bracket at a place, ignoring strings; -1 if there is none."""
    depth = 0
    for piece in _BRACKET_OR_STRING.finditer(text, place):
        if piece[0] in ("'", '"'):  # a string without an end
            return -1
        depth += (piece[0] in "[({") - (piece[0] in "])}")
        if depth == 0:
            return piece.end()
    return -1


def _read(text: str, offered: Offered) -> list[ToolCall | str]:
    form = f"calls have the form [name(key=value), ...]; tools: {', '.join(offered.names)}"
    if len(text) > CALL_CHARS:
        return [f"the tool call is longer than {CALL_CHARS} characters"]
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return [f"the tool call is not valid; {form}"]
    return [form] if not isinstance(tree, ast.List) else [_call(node, offered, form) for node in tree.elts]


def _call(node: ast.expr, offered: Offered, form: str) -> ToolCall | str:
    if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
        return form
    try:
        name, arguments = ast.unparse(node.func), {str(word.arg): _value(word.value) for word in node.keywords}
        msgspec.json.encode(arguments)
    except (ValueError, TypeError, RecursionError):
        return f"an argument of the tool call is no plain value; {form}"
    return offered.call(name, arguments)


def _value(node: ast.expr) -> object:
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(element) for element in node.elts]
    if isinstance(node, ast.Dict):
        keys = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("keys are texts")
        return dict(zip(keys, map(_value, node.values), strict=True))
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | bool | None):
        raise ValueError("no plain value")
    return value
