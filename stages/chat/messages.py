"""Messages of a conversation, and the interface that makes tokens of them.

Tokens of a conversation are only ever appended to: what the model sampled is never decoded and tokenised again. What an
environment answers goes behind it, in the markup that the model's chat template gives such a turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from msgspec import Struct

Role = Literal["system", "developer", "user", "assistant", "tool"]


class ToolCall(Struct, frozen=True, omit_defaults=True):
    """One call that a model makes. `arguments` is text where the model wrote no JSON object."""

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


class Reply(Struct, frozen=True):
    """A model's turn as a message, and what is wrong with its calls, in words for the model ("" if nothing is)."""

    message: Message
    malformed: str = ""


class ChatFormat(Protocol):
    """One model's way to write conversations. No state: the same arguments give the same result."""

    stop: Sequence[str]  # texts that end a turn, besides the end-of-sequence tokens
    stop_token_ids: Sequence[int]

    def start(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        """Tokens of a first prompt, up to where the model's turn begins."""

    def append(self, ids: Sequence[int], messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        """Tokens to put behind `ids`, which end in a turn of the model: what closes that turn where the model was cut
        off before it did, the messages, and what begins the model's next turn."""

    def reply(self, ids: Sequence[int], tools: Sequence[ToolSchema]) -> Reply:
        """The message that the tokens of one turn are."""
