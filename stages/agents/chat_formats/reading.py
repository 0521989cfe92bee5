"""What a model wrote in one turn, as a message: reasoning, content, calls.

Invariant: never raises, whatever the ids; what cannot be read as a call stays in the content.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from stages.agents.chat import Reply
from stages.agents.chat_formats.parsers.found import CallParser, Found, Offered
from stages.agents.messages import Message, ToolSchema
from stages.data.tokenizer import Tokenizer

THINK: Final = ("<think>", "</think>")
_TAGS: Final = (THINK, ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))


def reasoning_tags(template: str) -> tuple[str, str]:
    """Between which texts a model reasons, by its chat template."""
    return next((tags for tags in _TAGS if tags[1] in template), THINK)


class TurnReader:
    """Reads turns. `tags`: what reasoning stands between; `opened`: the prompt ends within reasoning; `end_ids`: tokens
    that end a turn."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        parser: CallParser | None,
        end_ids: frozenset[int],
        tags: tuple[str, str] = THINK,
        opened: bool = False,
    ) -> None:
        self.parser, self.end_ids = parser, end_ids
        self._tokenizer, self._tags, self._opened = tokenizer, tags, opened

    def read(self, ids: Sequence[int], tools: Sequence[ToolSchema]) -> Reply:
        """The message that the tokens of one turn are."""
        length = len(ids)
        while length and ids[length - 1] in self.end_ids:
            length -= 1
        text = self._tokenizer.decode(ids[:length], skip_special_tokens=False) if length else ""
        parser = self.parser
        if parser is not None and parser.reads_reasoning:
            found = parser.parse(text, Offered(tools))
            return Reply(Message("assistant", found.content, found.reasoning, found.calls), found.fault)
        reasoning, content = self._split(text, ended=length < len(ids))
        found = parser.parse(content, Offered(tools)) if parser is not None and tools else Found(content)
        return Reply(Message("assistant", found.content, reasoning, found.calls), found.fault)

    def _split(self, text: str, ended: bool) -> tuple[str, str]:
        """(reasoning, content)."""
        opening, closing = self._tags
        begins = text.lstrip().startswith(opening)
        before, closed, after = text.partition(closing)
        if not begins and (opening in before or not (self._opened or closed)):
            return "", text
        if begins:
            before = before.partition(opening)[2]
        if not closed and ended and self.parser is not None:  # ended in a call without having closed its reasoning
            before, marker, after = before.partition(self.parser.opening)
            after = marker + after
        return before.strip(), after.lstrip("\n")
