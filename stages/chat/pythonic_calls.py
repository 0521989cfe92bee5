"""Calls as a Python list: `[look(place="here", times=2), wait()]` (Llama 4, and models of the same form).

The text is parsed to a syntax tree and never evaluated. A list that names no tool on offer is content.
"""

from __future__ import annotations

import ast
import re
from typing import Final

import msgspec

from stages.chat.messages import ToolCall
from stages.chat.tool_calls import CALL_CHARS, Found, Offered, found

_BEGIN: Final = re.compile(r"\[\s*([A-Za-z_][\w.]*)\s*\(")
_CONSTANTS: Final = {"true": True, "false": False, "null": None}


class Pythonic:
    opening = "<|python_start|>"
    closing = "<|python_end|>"
    reads_reasoning = False

    def parse(self, text: str, offered: Offered) -> Found:
        names = offered.names
        begin = next((match for match in _BEGIN.finditer(text) if match[1] in names), None)
        begin = begin or (_BEGIN.match(text.replace(self.opening, "").lstrip()) and _BEGIN.search(text))
        if begin is None:
            return Found(text)
        end = _closing(text, begin.start())
        if end < 0:
            return Found(text, fault="the tool call is not closed: end it with ]")
        calls: list[ToolCall] = []
        faults: list[str] = []
        for call in _read(text[begin.start() : end], offered):
            if isinstance(call, ToolCall):
                calls.append(call)
            else:
                faults.append(call)
        if faults:
            return Found(text, tuple(calls), "; ".join(dict.fromkeys(faults)))
        rest = (text[: begin.start()] + text[end:]).replace(self.opening, "").replace(self.closing, "")
        return found(rest, calls, faults)


def _closing(text: str, place: int) -> int:
    """Index after the bracket that closes the bracket at a place, ignoring strings; -1 if there is none."""
    depth, quote = 0, ""
    while place < len(text):
        character = text[place]
        if quote:
            if character == "\\":
                place += 1
            elif character == quote:
                quote = ""
        elif character in "\"'":
            quote = character
        elif character in "[({":
            depth += 1
        elif character in "])}":
            depth -= 1
            if depth == 0:
                return place + 1
        place += 1
    return -1


def _read(text: str, offered: Offered) -> list[ToolCall | str]:
    form = f"calls have the form [name(key=value), ...]; tools: {', '.join(offered.names)}"
    if len(text) > CALL_CHARS:
        return [f"the tool call is longer than {CALL_CHARS} characters"]
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return [f"the tool call is not valid; {form}"]
    if not isinstance(tree, ast.List):
        return [form]
    return [_call(node, offered, form) for node in tree.elts]


def _call(node: ast.expr, offered: Offered, form: str) -> ToolCall | str:
    if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
        return form
    try:
        arguments = {str(keyword.arg): _value(keyword.value) for keyword in node.keywords}
        msgspec.json.encode(arguments)
    except (ValueError, TypeError, RecursionError):
        return f"an argument of the tool call is no plain value; {form}"
    return offered.call(_name(node.func), arguments)


def _name(node: ast.expr) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def _value(node: ast.expr) -> object:
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(element) for element in node.elts]
    if isinstance(node, ast.Dict):
        return {_key(key): _value(value) for key, value in zip(node.keys, node.values, strict=True)}
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | bool | None):
        raise ValueError("no plain value")
    return value


def _key(node: ast.expr | None) -> str:
    value = node.value if isinstance(node, ast.Constant) else None
    if not isinstance(value, str):
        raise ValueError("keys are texts")
    return value
