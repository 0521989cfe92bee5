"""Messages of a conversation, the interface that turns them into tokens, and the errors of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from msgspec import Struct


class ChatError(Exception):
    """Base of everything that `stages.chat` raises on purpose."""


class ChatFormatError(ChatError):
    """A conversation cannot be written in this format, or the format cannot be used for several turns at all."""


class TokenizerError(ChatError):
    """The checkpoint has no usable tokenizer or chat template."""


Role = Literal["system", "developer", "user", "assistant", "tool"]


class ToolCall(Struct, frozen=True, omit_defaults=True):
    """A call of the model. `arguments` is text if the model wrote no JSON object."""

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
    """A turn of the model as a message, and the error in its calls as a text for the model ("" for none)."""

    message: Message
    malformed: str = ""


class ChatFormat(Protocol):
    """The format of one model's conversations. Stateless: equal arguments give equal results."""

    stop: Sequence[str]  # texts that end a turn, besides the end-of-sequence tokens
    stop_token_ids: Sequence[int]

    def start(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        """Tokens of a first prompt, up to the start of the model's turn."""

    def append(self, ids: Sequence[int], messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        """Tokens to append to `ids`, which end in a turn of the model.

        They close that turn if the model was cut off before its end, and contain the messages and the start of the
        model's next turn.
        """

    def reply(self, ids: Sequence[int], tools: Sequence[ToolSchema]) -> Reply:
        """The message of one turn's tokens."""
