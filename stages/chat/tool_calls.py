"""Calls between two marks: JSON objects (Hermes, Qwen), and values between tags (Qwen3-Coder, GLM-4.5). Also what all
parsers of tool calls share: offered tools, parse results, and JSON within other text.

    <tool_call>{"name": ..., "arguments": {...}}</tool_call>
    <tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>
    <tool_call>NAME<arg_key>KEY</arg_key><arg_value>value</arg_value></tool_call>

Between tags, the tool's schema decides whether a value is text or JSON. If only one tool is offered, a bare object of
its arguments or a bare expression is accepted as a JSON call.

Invariants: a parser never raises, whatever the text; text that is not a readable call stays in the content, and the
fault is a sentence that the model can act on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, Protocol

import msgspec
from msgspec import Struct

from configs.schema.notation import did_you_mean
from stages.chat.messages import ToolCall, ToolSchema

CALL_CHARS: Final = 32_768
_PYTHON: Final = {"True": True, "False": False, "None": None}  # as templates without tojson write them


class Found(Struct, frozen=True):
    """The parts of a turn. `fault`: the error in its calls, or ""."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    fault: str = ""
    reasoning: str = ""  # only for formats in which the parser finds it


class CallParser(Protocol):
    """The parser of one family of models."""

    opening: str  # the text with which a call begins
    closing: str = ""  # the text after which the model should stop, or ""
    reads_reasoning: bool = False  # the parser gets whole turns, also without offered tools

    def parse(self, text: str, offered: Offered) -> Found: ...


class Offered:
    """The tools that a model may call, by name."""

    def __init__(self, tools: Sequence[ToolSchema]) -> None:
        self._parameters: dict[str, Mapping[str, object]] = {}
        for tool in tools:
            function = tool.get("function")
            function = function if isinstance(function, Mapping) else tool
            name, parameters = function.get("name"), function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            if isinstance(name, str):
                self._parameters[name] = properties if isinstance(properties, Mapping) else {}
        self.names = tuple(self._parameters)

    def call(self, name: object, arguments: object, id: str = "") -> ToolCall | str:
        """A call, or its error as a text for the model."""
        if not isinstance(name, str) or not name:
            return f"a tool call needs the name of a tool; tools: {', '.join(self.names)}"
        if name not in self._parameters:
            return unknown_tool(name, self.names)
        if isinstance(arguments, str):
            arguments = decoded(arguments)
        if isinstance(arguments, str | dict):
            return ToolCall(name, arguments, id)
        return "the arguments of a tool call must be a JSON object"

    def value(self, name: str, parameter: str, text: str) -> object:
        """An argument without quotes: text if the schema has text, else JSON if it is valid JSON."""
        schema = self._parameters.get(name, {}).get(parameter)
        kind = schema.get("type") if isinstance(schema, Mapping) else None
        if kind == "string":
            return text
        if text in _PYTHON:
            return _PYTHON[text]
        try:
            return read_json(text)
        except ValueError:
            return text


def unknown_tool(name: str, names: Sequence[str]) -> str:
    return f"there is no tool {name[:100]!r}{did_you_mean(name, names, otherwise='.')} Tools: {', '.join(names)}"


def blocks(
    text: str,
    opening: str,
    closing: str,
    read: Callable[[str], ToolCall | str],
    *,
    end_of: Callable[[str, int], int] = lambda text, place: -1,
    around: Sequence[str] = (),
) -> Found:
    """The calls between two marks; everything else is content.

    `end_of` returns the end of a call's content that begins at a place, -1 if only the closing mark ends it. `around`:
    marks around all calls of a turn, which are not content.
    """
    content: list[str] = []
    calls: list[ToolCall | str] = []
    place = 0
    while (start := text.find(opening, place)) >= 0:
        content.append(text[place:start])
        inner = start + len(opening)
        end = text.find(closing, max(inner, end_of(text, inner)))
        again = text.rfind(opening, inner, max(end, inner))
        if end >= 0 and again >= 0 and end_of(text, inner) < 0:  # a second call begins before the end of the first
            content.append(text[start:again])
            start, inner = again, again + len(opening)
        stop = len(text) if end < 0 else end + len(closing)
        call = read(text[inner : len(text) if end < 0 else end].strip())
        if not isinstance(call, ToolCall):
            call = f"the tool call is not closed: end it with {closing}" if end < 0 else call
            content.append(text[start:stop])
        calls.append(call)
        place = stop
    content.append(text[place:])
    rest = "".join(content)
    for mark in around if any(isinstance(call, ToolCall) for call in calls) else ():
        rest = rest.replace(mark, "")
    return found(rest, calls)


def found(content: str, read: Sequence[ToolCall | str], reasoning: str = "") -> Found:
    """The parts of a turn, given its calls and the faults in place of calls.

    Content beside calls is stripped: the space around calls is markup.
    """
    calls = tuple(call for call in read if isinstance(call, ToolCall))
    faults = dict.fromkeys(fault for fault in read if isinstance(fault, str))
    return Found(content.strip() if calls else content, calls, "; ".join(faults), reasoning)


def read_json(text: str) -> object:
    """A JSON value that can be encoded again. Raises ValueError."""
    value, end = read_json_at(text, 0)
    if text[end:].strip():
        raise ValueError("not valid JSON: text follows it")
    return value


def read_json_at(text: str, place: int) -> tuple[object, int]:
    """The JSON value at a place, after space, and its end. Raises ValueError."""
    while place < len(text) and text[place].isspace():
        place += 1
    try:
        value, end = _DECODER.raw_decode(text, place)
        msgspec.json.encode(value)  # fails for half of a surrogate pair
    except (ValueError, RecursionError):
        raise ValueError("not valid JSON") from None
    return value, end


def _refuse(constant: str) -> object:
    raise ValueError(constant)


_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse)  # line breaks in strings are common and harmless


def called(offered: Offered, name: str, arguments: str, id: str = "") -> ToolCall | str:
    """A call whose arguments must be JSON."""
    if len(arguments) > CALL_CHARS:
        return f"the tool call is longer than {CALL_CHARS} characters"
    try:
        value = read_json(arguments)
    except ValueError:
        return "the arguments of the tool call are not valid JSON"
    return offered.call(name, value, id)


def decoded(arguments: str) -> dict[str, object] | str:
    """Arguments, which some models write as JSON inside of a string."""
    try:
        value = read_json(arguments)
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


class Marked(CallParser):
    """Calls between marks of any text."""

    def __init__(self, opening: str = "<tool_call>", closing: str = "</tool_call>") -> None:
        self.opening, self.closing = opening, closing

    def parse(self, text: str, offered: Offered) -> Found:
        """All calls of a turn."""
        read = partial(read_call, offered=offered)
        return blocks(text, self.opening, self.closing, read, end_of=_end_of_json)

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


class Tagged(CallParser):
    """Calls of one of the two forms. `breaks`: the line breaks on either side of a value are markup."""

    opening = "<tool_call>"
    closing = "</tool_call>"

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


qwen3_coder: Final = partial(Tagged, _CODER, _CODER_PAIR, _CODER_FORM, breaks=True)
glm: Final = partial(Tagged, _GLM, _GLM_PAIR, _GLM_FORM, breaks=False)
