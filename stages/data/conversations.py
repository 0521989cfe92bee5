"""Conversations as demonstrations: which characters of a rendered chat the policy learns.

Supervised training of a row without a label learns what its assistant messages say, tool calls, reasoning and the token
that ends the turn included. All else (users, tools, the template's markup around them) is context. A message with
`"step_loss_mask": 0` is context too.

    prompt   all before the first learned message, with the template's generation prompt
    label    the rest, up to the end of the last learned message
    context  spans of the label that are not learned, [start, end) in characters

Invariant: prompt + label is a beginning of the whole rendered chat; a chat whose turns cannot be told apart in it is
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, TypeGuard

from msgspec import Struct

from stages.data.rows import BadValue, Message

Chat = Sequence[Mapping[str, Any]]
_MARK: Final = "\u2063turn\u2063"  # stands for an answer; no tokenizer merges it with its neighbours, no text has it


class Conversation(Struct, frozen=True):
    """A rendered chat in two parts; see above. `ended`: the label ends with the template's token for that."""

    prompt: str
    label: str
    context: tuple[tuple[int, int], ...]
    ended: bool


def is_conversation(prompt: str | list[Message]) -> TypeGuard[list[Message]]:
    """Whether a row's prompt holds something to learn."""
    return not isinstance(prompt, str) and any(map(_learned, prompt))


def demonstrated(messages: Chat, render: Callable[[Chat, bool], str], markup_at: Callable[[str], str]) -> Conversation:
    """Split a chat. `render(messages, generation_prompt)` applies the template; `markup_at(text)` is the special token
    with which a text begins, or "". Raises BadValue."""
    whole = render(messages, False)
    spans, ended = [], False
    for place, message in enumerate(messages):
        if _learned(message):
            begin, end, ended = _span(messages, place, whole, render)
            closing = "" if ended else markup_at(whole[end:])
            ended = ended or bool(closing)
            spans.append((begin, end + len(closing)))
    first, last = spans[0][0], spans[-1][1]
    context = tuple((left[1] - first, right[0] - first) for left, right in pairwise(spans) if right[0] > left[1])
    return Conversation(whole[:first], whole[first:last], context, ended)


def _learned(message: Mapping[str, Any]) -> bool:
    return message.get("role") == "assistant" and message.get("step_loss_mask", 1) != 0


def _span(messages: Chat, place: int, whole: str, render: Callable[[Chat, bool], str]) -> tuple[int, int, bool]:
    """Where one assistant message lies in the rendered chat, and whether with the token that ends its turn."""
    before, behind = messages[:place], messages[place + 1 :]
    asked, ended = render(before, True), False  # what an engine is given to continue
    try:
        marked = render([*before, {"role": "assistant", "content": _MARK}, *behind], False)
    except Exception:  # what follows answers its tool calls: then it is looked for as the last message
        rendered = render(messages[: place + 1], False).rstrip()
        marked, ended = asked + _MARK + (whole[len(rendered) :] if whole.startswith(rendered) else _MARK), True
    head, found, tail = marked.partition(_MARK)
    # Otherwise the template writes earlier turns in another way once there are later ones.
    begin = len(asked) if whole.startswith(asked) else len(head) if whole.startswith(head) else -1
    end = len(whole) - len(tail)
    if not found or begin < 0 or end < begin or not whole.endswith(tail):
        where = "in a way that does not show where it begins and ends"
        raise BadValue("template", f"the chat template renders message {place + 1} {where}")
    return begin, end, ended
