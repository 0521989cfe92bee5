"""Conversations by a checkpoint's own chat template.

Invariants: `append` never looks at more than the last tokens of a conversation, to see how far its last turn is closed;
what closes a turn stands in a conversation exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence

from stages.agents.chat import Reply
from stages.agents.chat_formats.bridge import Bridge
from stages.agents.chat_formats.errors import ChatFormatError
from stages.agents.chat_formats.reading import TurnReader
from stages.agents.chat_formats.rendering import Template
from stages.agents.messages import Message, ToolSchema
from stages.data.tokenizer import Tokenizer


class TurnEnd:
    """The tokens that close a turn, and how many of them a model has written itself.

    `ids`: those of the template; of these the first special one tells that the turn is over, what follows is space.
    `others`: what else may close one, such as a call.
    """

    def __init__(self, tokenizer: Tokenizer, text: str, others: Sequence[str] = ()) -> None:
        self.ids = tokenizer.encode(text) if text else []
        special = [[id for id in tokenizer.encode(one) if is_special(tokenizer, id)][:1] for one in (text, *others)]
        self._place = self.ids.index(special[0][0]) if special[0] else -1
        closers = tuple(dict.fromkeys(id for ids in special for id in ids))
        self.stop_ids = tuple(id for id in closers if id not in tokenizer.eos_ids)
        self.end_ids = frozenset((*tokenizer.eos_ids, *closers))

    def written(self, ids: Sequence[int], behind: Sequence[int]) -> int:
        """How many of the tokens that come behind a turn stand at its end already."""
        if not ids:
            return 0
        if self._place >= 0 and ids[-1] in self.end_ids:
            return self._place + 1
        longest = len(self.ids)
        # Where nothing closes a turn, its end token may be what opens the next message (GLM).
        if self._place < 0 and len(behind) > longest and behind[longest] in self.end_ids:
            longest += 1
        shortest = max(self._place + 1, 1)
        for count in range(min(longest, len(ids)), shortest - 1, -1):
            if list(ids[-count:]) == list(behind[:count]):
                return count
        return 0


def is_special(tokenizer: Tokenizer, id: int) -> bool:
    """Whether a token is markup and no text."""
    return bool(tokenizer.decode([id], skip_special_tokens=False)) and not tokenizer.decode([id])


def special_pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    """The pieces of a text that are tokens of markup."""
    return [
        tokenizer.decode([id], skip_special_tokens=False) for id in tokenizer.encode(text) if is_special(tokenizer, id)
    ]


class TemplateFormat:
    """See `load_chat_format`. `tool_fault`: why tools cannot be offered in this format, "" if they can."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: Template,
        bridge: Bridge,
        reader: TurnReader,
        end: TurnEnd,
        tool_fault: str = "",
    ) -> None:
        self.stop: Sequence[str] = ()
        self.stop_token_ids: Sequence[int] = end.stop_ids
        self.tool_fault = tool_fault
        self._tokenizer, self._template, self._bridge = tokenizer, template, bridge
        self._reader, self._end = reader, end

    def start(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        """The whole conversation so far as the template writes it. Raises ChatFormatError."""
        if tools and self.tool_fault:
            raise ChatFormatError(self.tool_fault)
        return self._tokenizer.encode(self._template.render(messages, tools))

    def append(self, ids: Sequence[int], messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        """What the template writes behind a turn. Raises ChatFormatError."""
        behind = self._tokenizer.encode(self._bridge.between(messages, tools).text)
        return behind[self._end.written(ids, behind) :]

    def reply(self, ids: Sequence[int], tools: Sequence[ToolSchema]) -> Reply:
        return self._reader.read(ids, tools)
