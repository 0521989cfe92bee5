"""The text that a chat template writes between two turns of the model, found without rendering the first turn.

The template renders a short substitute conversation twice: a question and a turn with a mark in it, then the same with
the new messages. The text after the mark is the end of the model's turn, the markup of the messages, and the start of
the next turn. The model's own tokens are never rendered, so it does not matter what a template leaves out of earlier
turns (reasoning, mostly).

`check_bridge` checks at the start whether a template allows this. The text after a turn must not depend on earlier
messages, and a new message must not change the text before that turn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import takewhile

import msgspec
from msgspec import Struct

from stages.chat.messages import ChatFormatError, Message, Messages, ToolCall, Tools
from stages.chat.tokenizer import Tokenizer


def as_mapping(message: Message) -> dict[str, object]:
    """A message in the form of the OpenAI API, but with the arguments of calls as objects, as templates expect."""
    shown: dict[str, object] = {"content": "", **msgspec.to_builtins(message)}
    if message.tool_calls:
        shown["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return shown


def _short_ids(messages: Messages) -> list[Message]:
    return [
        msgspec.structs.replace(
            message,
            tool_calls=tuple(ToolCall(call.name, call.arguments, _short_id(call.id)) for call in message.tool_calls),
            tool_call_id=_short_id(message.tool_call_id) if message.role == "tool" else "",
        )
        for message in messages
    ]


def _short_id(name: str) -> str:
    return hashlib.blake2b(name.encode(errors="replace"), digest_size=5).hexdigest()[:9]


QUESTION = Message("user", "Where?")
ANSWER = Message("assistant", "Here.", reasoning_content="Look around.")
CURE = "give a template in which a new message only adds text at the end (--chat-template-path)"
_MARK = "XQZ7MARK"
_CONTEXT = 60  # characters shown on either side of a difference


class Between(Struct, frozen=True):
    """The text between two turns of the model."""

    text: str  # the whole text
    closing: str  # the end of the first turn when nothing follows it: mostly the beginning of `text`
    before: str  # text before the mark, without the new messages
    before_again: str  # the same with the new messages


class Bridge:
    """The chat template of a checkpoint, and bridges of turns by it. `arguments`: those of the template besides
    messages and tools."""

    def __init__(self, tokenizer: Tokenizer, arguments: Mapping[str, object]) -> None:
        self._tokenizer, self._arguments = tokenizer, arguments

    def render(self, messages: Messages, tools: Tools, generation_prompt: bool = True) -> str:
        """The text of a conversation. Raises ChatFormatError.

        Call ids that the template refuses are replaced by short ones (Mistral's templates need nine letters)."""
        refusal: Exception | None = None
        for shown in (messages, _short_ids(messages)):
            try:
                return self._tokenizer.apply_chat_template(
                    [as_mapping(message) for message in shown],
                    tools,
                    **{**self._arguments, "add_generation_prompt": generation_prompt},
                )
            except Exception as error:  # a template is a program: it may raise anything
                refusal = refusal or error
        roles = ", ".join(message.role for message in messages)
        raise ChatFormatError(f"the chat template refuses messages of {roles}: {refusal}") from refusal

    def _special(self, text: str) -> list[str]:
        """The pieces of a text that are tokens of markup, in order."""
        return [self._tokenizer.decode([id], False) for id in self._tokenizer.markup(text)]

    def between(self, messages: Messages, tools: Tools, before: Messages = (QUESTION,), reasoning: str = "") -> Between:
        """The template's text after a turn of the model that these messages answer. Raises ChatFormatError."""
        mark = _mark(messages, tools)
        refusal: ChatFormatError | None = None
        for turn in _turns(messages, mark, reasoning):
            try:
                without = self.render([*before, turn], tools, generation_prompt=False)
                whole = self.render([*before, turn, *messages], tools)
            except ChatFormatError as error:
                refusal = refusal or error
                continue
            return self._cut(without, whole, mark, called=bool(turn.tool_calls))
        assert refusal is not None
        raise refusal

    @cached_property
    def end(self) -> str:
        """The text that closes a turn without calls. Raises ChatFormatError."""
        return self.render([QUESTION, Message("assistant", _MARK)], (), False).rpartition(_MARK)[2]

    def _cut(self, without: str, whole: str, mark: str, called: bool) -> Between:
        last_mark, earlier_mark = without.rfind(mark), whole.rfind(mark)
        if last_mark < 0 or earlier_mark < 0:
            raise ChatFormatError(
                f"the chat template leaves out what the model wrote in {'its last' if last_mark < 0 else 'an earlier'} "
                f"turn, so nothing can be put behind it; {CURE}"
            )
        end, rest = without[last_mark + len(mark) :], whole[earlier_mark + len(mark) :]
        closing = self._closing(end, called)
        if not rest.startswith(end):
            # gpt-oss: a last turn ends with another token than an earlier turn.
            closer = self._special(rest[: len(end) + _CONTEXT])[:1]
            if self._special(end) != [end] or not closer or not rest.startswith(closer[0]):
                raise ChatFormatError(
                    "the chat template ends a turn of the model in another way when messages follow it, so nothing can "
                    f"be put behind it.\n{difference(end, rest, 'last turn', 'earlier turn')}\nThe cure: {CURE}"
                )
            return Between(rest, closing, without[:last_mark], whole[:earlier_mark])
        begin = len(end) - len(closing)  # the text before `closing` is the rest of a call, which the model writes
        return Between(rest[begin:], closing, without[:last_mark], whole[:earlier_mark])

    def _closing(self, end: str, called: bool) -> str:
        """The closing text of a turn, without the text that closes a call before it."""
        if not called or end.endswith(self.end):
            return self.end if called else end
        last = self._special(end)[-1:]
        if last and end.endswith(last[0]):
            return last[0]
        raise ChatFormatError(
            f"the chat template ends a turn with a call in another way than one without: {end!r}, not {self.end!r}; "
            f"{CURE}"
        )


def _turns(messages: Messages, mark: str, reasoning: str) -> Iterator[Message]:
    """Candidates for the model's turn before the messages; the first that the template accepts is used."""
    calls = tuple(
        ToolCall(answer.name or "tool", {"mark": mark}, answer.tool_call_id or f"call{place:05d}")
        for place, answer in enumerate(message for message in messages if message.role == "tool")
    )
    if calls and messages[0].role == "tool":
        for some in (calls, calls[:1]):  # some templates allow one call a turn, some no text beside a call
            yield Message("assistant", mark, reasoning, some)
            yield Message("assistant", "", reasoning, some)
    yield Message("assistant", mark, reasoning)


def _mark(messages: Messages, tools: Tools) -> str:
    """A mark that occurs in none of them: tool answers may contain any text."""
    written = msgspec.json.encode((messages, tools))
    mark = _MARK
    while mark.encode() in written:
        mark += "Q"
    return mark


def check_bridge(bridge: Bridge, messages: Messages, tools: Tools) -> str:
    """Check that these messages can follow any turn. Returns the turn's closing text. Raises ChatFormatError."""
    between = bridge.between(messages, tools)
    if not _is_cut_out_of(between.before_again, between.before):
        raise ChatFormatError(
            "the chat template changes what stands before a turn of the model when messages follow it, so a "
            "conversation cannot grow at its end.\n"
            f"{difference(between.before, between.before_again, 'before', 'after')}\nThe cure: {CURE}"
        )
    place = 0
    for message in messages:
        place = between.text.find(message.content, place)
        if place < 0:
            raise ChatFormatError(
                f"the chat template does not show a message of role {message.role!r}, or not in its place; {CURE}"
            )
    longer = (QUESTION, ANSWER, Message("user", "Where else?"))
    for before, reasoning in ((longer, ""), ((QUESTION,), "Think.")):
        elsewhere = bridge.between(messages, tools, before, reasoning)
        if elsewhere.text != between.text:
            raise ChatFormatError(
                "the chat template writes a message in another way when other things stand before it, so it cannot "
                "be written without them.\n"
                f"{difference(between.text, elsewhere.text, 'short', 'longer')}\nThe cure: {CURE}"
            )
    return between.closing


def _is_cut_out_of(shorter: str, longer: str) -> bool:
    """Whether `shorter` is `longer` without one piece: templates omit parts of earlier turns."""
    ahead, behind = _alike(shorter, longer), _alike(shorter[::-1], longer[::-1])
    return ahead + behind >= len(shorter) and len(shorter) <= len(longer)


def _alike(first: str, second: str) -> int:
    """Length of the common prefix of two texts."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def difference(first: str, second: str, first_name: str, second_name: str) -> str:
    """Both texts around their first difference, on two lines."""
    same = _alike(first, second)
    start = max(0, same - _CONTEXT)
    width = max(len(first_name), len(second_name))
    return "\n".join(
        f"  {name:<{width}}  {'...' if start else ''}{text[start : same + _CONTEXT]!r}"
        for name, text in ((first_name, first), (second_name, second))
    )
