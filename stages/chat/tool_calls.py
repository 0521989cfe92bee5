"""The common parts of the parsers of tool calls: offered tools, parse results, and JSON within other text.

Invariants: a parser never raises, whatever the text; text that is not a readable call stays in the content, and the
fault is a sentence that the model can act on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
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
    closing: str  # the text after which the model should stop, or ""
    reads_reasoning: bool  # the parser gets whole turns, also without offered tools

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

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._parameters)

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
        written = text[inner : len(text) if end < 0 else end].strip()
        call = read(written)
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
