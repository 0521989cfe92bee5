"""Chat messages as environments, chat formats and the gateway exchange them: those of the OpenAI API, as structs.

Invariants: plain values that travel as JSON; what a model wrote stays in `content` as it was, also where it could not
be read as a call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

Role = Literal["system", "developer", "user", "assistant", "tool"]


class ToolCall(Struct, frozen=True, omit_defaults=True):
    """One call that a model asks for. `arguments` is text where the model wrote no JSON object."""

    name: str
    arguments: Mapping[str, object] | str
    id: str = ""


class Message(Struct, frozen=True, omit_defaults=True):
    """One message of a conversation."""

    role: Role
    content: str = ""
    reasoning_content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""  # of a tool's answer
    name: str = ""  # of the tool that answers


ToolSchema = Mapping[str, object]  # {"type": "function", "function": {"name", "description", "parameters"}}
