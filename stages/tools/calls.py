"""Reading a tool call at the end of generated text.

Generation stops at the closing marker, so a call is the last thing in the text. Between the markers stands a JSON
object `{"name": ..., "arguments": {...}}` (the form of Hermes and Qwen); where only one tool is offered, a bare object
of its arguments or a bare expression will do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct

from configs.schema.did_you_mean import did_you_mean
from stages.tools.tool import Arguments

CALL_CHARS = 32_768


class ToolCall(Struct, frozen=True):
    """A call that names an offered tool. `arguments` is text where the model wrote no JSON object."""

    name: str
    arguments: Arguments


def find_call(text: str, opening: str, closing: str) -> str | None:
    """What stands between the markers of the call that ends the text; None if the text does not end in a call."""
    text = text.rstrip()
    if not text.endswith(closing):
        return None
    end = len(text) - len(closing)
    start = text.rfind(opening, 0, end)
    return None if start < 0 else text[start + len(opening) : end].strip()


def parse_call(text: str, opening: str, closing: str, names: Sequence[str]) -> ToolCall | str:
    """The call that ends the text, or what is wrong with it in words that the model can act on."""
    content = find_call(text, opening, closing)
    if content is None:
        return f"no tool call: the text must end in {opening} ... {closing}"
    if not content:
        return "the tool call is empty"
    if len(content) > CALL_CHARS:
        return f"the tool call is longer than {CALL_CHARS} characters"
    only = names[0] if len(names) == 1 else None
    if not content.startswith("{"):
        return ToolCall(only, _bare(content)) if only is not None else _form(names)
    try:
        value: object = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return "the tool call is not valid JSON"
    return _from_object(value, names, only) if isinstance(value, dict) else _form(names)


def _from_object(value: Mapping[str, object], names: Sequence[str], only: str | None) -> ToolCall | str:
    name = value.get("name")
    if "arguments" not in value and only is not None and name != only:
        return ToolCall(only, value)  # the arguments themselves
    if not isinstance(name, str):
        return _form(names)
    if name not in names:
        return f"there is no tool {name[:100]!r}{did_you_mean(name, names)} Tools: {', '.join(names)}"
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):
        return ToolCall(name, _decoded(arguments))
    if not isinstance(arguments, dict):
        return "the arguments of a tool call must be a JSON object"
    return ToolCall(name, arguments)


def _bare(content: str) -> str:
    """A bare expression; quotes that make it a JSON string are taken off."""
    if content.startswith('"'):
        try:
            return msgspec.json.decode(content, type=str)
        except (msgspec.DecodeError, UnicodeError):
            return content
    return content


def _decoded(arguments: str) -> Arguments:
    """Arguments that some models write as JSON inside of a string."""
    try:
        value: object = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _form(names: Sequence[str]) -> str:
    return f'a tool call is a JSON object {{"name": ..., "arguments": {{...}}}}; tools: {", ".join(names)}'
