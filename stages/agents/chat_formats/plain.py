"""Conversations with a model that has no chat template: the contents of the messages, as plain text."""

from __future__ import annotations

from collections.abc import Sequence

from stages.agents.chat import Reply
from stages.agents.chat_formats.parsers.found import CallParser
from stages.agents.chat_formats.reading import TurnReader
from stages.agents.messages import Message, ToolSchema
from stages.data.tokenizer import Tokenizer


class PlainFormat:
    """Contents one behind the other. Nothing tells who speaks: the environment's texts must."""

    def __init__(self, tokenizer: Tokenizer, parser: CallParser) -> None:
        self.stop: Sequence[str] = (parser.closing,) if parser.closing else ()  # nothing else ends such a turn
        self.stop_token_ids: Sequence[int] = ()
        self._tokenizer = tokenizer
        self._reader = TurnReader(tokenizer, parser, frozenset(tokenizer.eos_ids))

    def start(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        """The text with the special tokens that the tokenizer puts around one (a BOS)."""
        return self._tokenizer.encode(_joined(messages), add_special_tokens=True)

    def append(self, ids: Sequence[int], messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        """The text alone: nothing closes a turn."""
        return self._tokenizer.encode(_joined(messages))

    def reply(self, ids: Sequence[int], tools: Sequence[ToolSchema]) -> Reply:
        return self._reader.read(ids, tools)


def _joined(messages: Sequence[Message]) -> str:
    return "".join(message.content for message in messages)
