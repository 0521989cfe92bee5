"""Calls between two marks: JSON objects (Hermes, Qwen), and values between tags (Qwen3-Coder, GLM-4.5).

    <tool_call>{"name": ..., "arguments": {...}}</tool_call>
    <tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>
    <tool_call>NAME<arg_key>KEY</arg_key><arg_value>value</arg_value></tool_call>

Between tags, the tool's schema decides whether a value is text or JSON. If only one tool is offered, a bare object of
its arguments or a bare expression is accepted as a JSON call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from stages.chat.messages import ToolCall
from stages.chat.tool_calls import CALL_CHARS, Found, Offered, blocks, read_json, read_json_at, unknown_tool


class Marked:
    """Calls between marks of any text."""

    reads_reasoning = False

    def __init__(self, opening: str = "<tool_call>", closing: str = "</tool_call>") -> None:
        self.opening, self.closing = opening, closing

    def parse(self, text: str, offered: Offered) -> Found:
        """All calls of a turn."""
        return blocks(
            text, self.opening, self.closing, lambda content: read_call(content, offered), end_of=_end_of_json
        )

    def last(self, text: str, offered: Offered) -> ToolCall | str:
        """The call that ends a text, where generation stopped at the closing mark."""
        content = self.find_last(text)
        if content is None:
            return f"no tool call: the text must end in {self.opening} ... {self.closing}"
        return read_call(content, offered)

    def find_last(self, text: str) -> str | None:
        """The text between the marks of the call that ends the text; None if the text does not end in a call."""
        text = text.rstrip()
        if not text.endswith(self.closing):
            return None
        end = len(text) - len(self.closing)
        start = text.rfind(self.opening, 0, end)
        return None if start < 0 else text[start + len(self.opening) : end].strip()


def read_call(content: str, offered: Offered) -> ToolCall | str:
    """A call, or its error as a text that the model can act on."""
    if not content:
        return "the tool call is empty"
    if len(content) > CALL_CHARS:
        return f"the tool call is longer than {CALL_CHARS} characters"
    names = offered.names
    only = names[0] if len(names) == 1 else None
    if not content.startswith("{"):
        return ToolCall(only, _bare(content)) if only is not None else _form(offered)
    try:
        value = read_json(content)
    except ValueError:
        return "the tool call is not valid JSON"
    return _from_object(value, offered, only) if isinstance(value, dict) else _form(offered)


def _from_object(value: Mapping[str, object], offered: Offered, only: str | None) -> ToolCall | str:
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters"))
    if "arguments" not in value and only is not None and name != only:
        return ToolCall(only, value)  # the arguments themselves
    if not isinstance(name, str):
        return _form(offered)
    if name not in offered.names:
        return unknown_tool(name, offered.names)
    return offered.call(name, {} if arguments is None else arguments)


def _bare(content: str) -> str:
    """A bare expression, without the quotes of a JSON string."""
    try:
        value = read_json(content) if content.startswith('"') else None
    except ValueError:
        return content
    return value if isinstance(value, str) else content


def _form(offered: Offered) -> str:
    return f'a tool call is a JSON object {{"name": ..., "arguments": {{...}}}}; tools: {", ".join(offered.names)}'


def _end_of_json(text: str, place: int) -> int:
    """End of the object at a place. A closing mark inside of its strings does not end the call."""
    try:
        return read_json_at(text, place)[1]
    except ValueError:
        return -1


_CODER: Final = re.compile(r"\s*<function=([^>\s]+)>(.*?)(?:</function>\s*)?", re.DOTALL)
_CODER_PAIR: Final = re.compile(r"\s*<parameter=([^>\s]+)>(.*?)</parameter>\s*", re.DOTALL)
_CODER_FORM: Final = "<function=NAME><parameter=KEY>value</parameter></function>"
_GLM: Final = re.compile(r"([^<]*)((?:<arg_key>.*)?)", re.DOTALL)
_GLM_PAIR: Final = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)
_GLM_FORM: Final = "NAME<arg_key>KEY</arg_key><arg_value>value</arg_value>"


class Tagged:
    """Calls of one of the two forms. `breaks`: the line breaks on either side of a value are markup."""

    opening = "<tool_call>"
    closing = "</tool_call>"
    reads_reasoning = False

    def __init__(self, call: re.Pattern[str], pair: re.Pattern[str], form: str, breaks: bool) -> None:
        self._call, self._pair, self._form, self._breaks = call, pair, form, breaks

    def parse(self, text: str, offered: Offered) -> Found:
        return blocks(text, self.opening, self.closing, lambda content: self._read(content, offered))

    def _read(self, content: str, offered: Offered) -> ToolCall | str:
        if len(content) > CALL_CHARS:
            return f"the tool call is longer than {CALL_CHARS} characters"
        matched = self._call.fullmatch(content)
        if matched is None:
            return f"a tool call has the form {self._form}; tools: {', '.join(offered.names)}"
        name, rest = matched[1].strip(), matched[2]
        arguments: dict[str, object] = {}
        place = 0
        while rest[place:].strip():
            pair = self._pair.match(rest, place)
            if pair is None:
                return f"an argument of the tool call is not closed or not named; the form is {self._form}"
            key, value = pair[1].strip(), pair[2]
            if self._breaks:
                value = value.removeprefix("\n").removesuffix("\n")
            arguments[key] = offered.value(name, key, value)
            place = pair.end()
        return offered.call(name, arguments)


def qwen3_coder() -> Tagged:
    return Tagged(_CODER, _CODER_PAIR, _CODER_FORM, breaks=True)


def glm() -> Tagged:
    return Tagged(_GLM, _GLM_PAIR, _GLM_FORM, breaks=False)
