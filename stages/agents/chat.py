"""How a conversation becomes tokens, and what a model wrote becomes a message: the interface; see chat_formats.

Tokens of a conversation are only ever appended to: what the model sampled is never decoded and tokenised again, and
what an environment says goes behind it in the markup that the model's chat template gives such a turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from stages.agents.messages import Message, ToolSchema


class Reply(Struct, frozen=True):
    """A model's turn as a message, and what is wrong with its calls, in words for the model ("" if nothing is)."""

    message: Message
    malformed: str = ""


class ChatFormat(Protocol):
    """One model's way to write conversations. Pure: the same arguments give the same result."""

    stop: Sequence[str]  # texts that end a turn, besides the end-of-sequence tokens
    stop_token_ids: Sequence[int]

    def start(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        """Tokens of a first prompt, up to where the model's turn begins."""

    def append(self, ids: Sequence[int], messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        """Tokens to put behind `ids`, which end in a turn of the model: what closes that turn where the model was cut
        off before it did, the messages, and what begins the model's next turn."""

    def reply(self, ids: Sequence[int], tools: Sequence[ToolSchema]) -> Reply:
        """The message that the tokens of one turn are."""
