"""Fields of requests that the dialects share: refused by name, the choice of a tool, the form of an answer.

A field is either honoured, or has no effect and stands so in docs/gateway.md, or is refused with its name. Unknown
fields have no effect: clients send fields of providers that nobody documents.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from stages.chat.messages import ToolSchema
from stages.gateway.answers import Constraint, Refused

T = TypeVar("T")


def decode(body: bytes, kind: type[T], refused: Mapping[str, object] | None = None) -> T:
    """The body of a request. Raises Refused.

    `refused`: fields that must be absent or null, or have this value; where it is None, they may be empty as well.
    """
    try:
        parsed = msgspec.json.decode(body, type=kind)
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw]) if refused else {}
        given = {name: msgspec.json.decode(fields[name]) for name in fields.keys() & (refused or {})}
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # validation errors are decode errors
        raise Refused("invalid", f"the request cannot be read: {error}") from error
    except RecursionError:
        raise Refused("invalid", "the request is nested too deeply; send plain messages") from None
    for name, value in given.items():
        harmless = (refused or {})[name]
        if value not in (None, harmless) and (value or harmless is not None):
            raise unserved(name, value)
    return parsed


def unserved(name: str, value: object) -> Refused:
    """The refusal of a field."""
    shown = msgspec.json.encode(value)[:60].decode(errors="replace")
    return Refused("invalid", f"{name} is {shown}, which this gateway does not serve; leave it out (docs/gateway.md)")


def offered(choice: str | Mapping[str, Any] | None, tools: Iterable[ToolSchema]) -> tuple[ToolSchema, ...]:
    """The tools that `tool_choice` of any dialect leaves. Raises Refused for a call that must be made."""
    kind = choice.get("type") if isinstance(choice, Mapping) else choice
    if kind not in (None, "auto", "none"):
        raise unserved("tool_choice", choice)
    return () if kind == "none" else tuple(tools)


def form(name: str, sent: Mapping[str, Any] | None, tools: Sequence[ToolSchema]) -> Constraint | None:
    """The form of an answer: `response_format`, `text.format` or `output_config.format`. Raises Refused."""
    kind = (sent or {}).get("type", "text")
    if sent is None or kind == "text":
        return None
    described = sent.get("json_schema", sent)
    schema = {"type": "object"} if kind == "json_object" else described.get("schema") if kind == "json_schema" else None
    if not isinstance(schema, dict):
        raise unserved(name, sent)
    if tools:
        raise Refused(
            "invalid", f"{name} and tools exclude each other here, for a call has another form; leave one out"
        )
    return Constraint(name, msgspec.json.encode(schema).decode())
