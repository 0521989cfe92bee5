"""Messages of a conversation, the interface that turns them into tokens, and the errors of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal, Protocol

from msgspec import Struct

from models.errors import UserFault


class ChatError(UserFault):
    """Base of everything that `stages.chat` raises on purpose."""


class ChatFormatError(ChatError):
    """A conversation cannot be written in this format, or the format cannot be used for several turns at all."""


class TooLong(ChatError):
    """A text surely has more tokens than its reader can take. It was not made tokens of as a whole."""


class TokenizerError(ChatError):
    """The checkpoint has no usable tokenizer or chat template."""


PIECE: Final = 1 << 16  # characters; the tokenizer takes some 300 bytes of memory for each
_SEAM: Final = 16  # tokens that a cut between two pieces can add


def refuse_longer(encode: Callable[[str], Sequence[int]], text: str, most: int | None) -> None:
    """Raise TooLong if a text surely has more than `most` tokens, after at most `most` tokens of work.

    A much longer text is counted piece by piece, so that its whole never takes the memory of a tokenizer."""
    if most is None or len(text) <= 4 * most:
        return
    found = 0
    for start in range(0, len(text), PIECE):
        found += len(encode(text[start : start + PIECE])) - _SEAM
        if found > most:
            raise TooLong(f"the conversation has over {most} tokens, which leaves no room for an answer")


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


Messages = Sequence[Message]
Tools = Sequence[ToolSchema]


class Reply(Struct, frozen=True):
    """A turn of the model as a message, and the error in its calls as a text for the model ("" for none)."""

    message: Message
    malformed: str = ""


class ChatFormat(Protocol):
    """The format of one model's conversations. Stateless: equal arguments give equal results."""

    stop: Sequence[str]  # texts that end a turn, besides the end-of-sequence tokens
    stop_token_ids: Sequence[int]

    def start(self, messages: Messages, tools: Tools, most: int | None = None) -> list[int]:
        """Tokens of a first prompt, up to the start of the model's turn. Raises TooLong for surely over `most`."""

    def append(self, ids: Sequence[int], messages: Messages, tools: Tools, most: int | None = None) -> list[int]:
        """Tokens to append to `ids`, which end in a turn of the model.

        They close that turn if the model was cut off before its end, and contain the messages and the start of the
        model's next turn.
        """

    def reply(self, ids: Sequence[int], tools: Tools) -> Reply:
        """The message of one turn's tokens."""
