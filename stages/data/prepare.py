"""A checked row becomes a prompt: text and token ids, and in supervised training what is to be learned.

Supervised training of a row without a label learns what its assistant messages say, tool calls, reasoning and the token
that ends the turn included. All else (users, tools, the template's markup around them) is context. A message with
`"step_loss_mask": 0` is context too.

    prompt   all before the first learned message, with the template's generation prompt
    label    the rest, up to the end of the last learned message
    context  spans of the label that are not learned, [start, end) in characters

Invariants: the same row gives the same prompt each time; prompt + label is a beginning of the whole rendered chat; a
chat is refused if its turns cannot be separated in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Final, TypeGuard, TypeVar

import msgspec
from msgspec import Struct

from configs.schema.data import DataConfig
from stages.chat.messages import Message as ChatMessage
from stages.chat.tokenizer import Tokenizer
from stages.data.rows import BadValue, Message, PromptRow
from stages.messages import NO_IDS, Int32Array, PromptGroup, wire

T = TypeVar("T")
Chat = Sequence[Mapping[str, Any]]
Tokenize = Callable[[str], Sequence[int]]
Render = Callable[[list[Message], list[Mapping[str, object]]], str]

_MARK: Final = "\u2063turn\u2063"  # stands for an answer; no tokenizer merges it with its neighbours, no text has it
_MARKUP_CHARACTERS = 64  # longer than any special token
_HEAD_CHARACTERS = 8  # for each token of the limit; a token of prose has four


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


Converse = Callable[[Chat, Sequence[Mapping[str, object]]], Conversation]


class PreparedPrompt(Struct, frozen=True):
    """One prompt, ready to be admitted as a group."""

    prompt: str
    prompt_ids: Int32Array  # [P], P >= 1
    label: str | None
    metadata: str  # JSON object
    tools: str  # JSON list: the run's tools, then the row's own
    label_ids: Int32Array = NO_IDS  # [L], filled in supervised training
    ended: bool = False  # the label ends as the chat template ends a turn

    def group(self, group_id: int, index: int, n_samples: int, seed: int) -> PromptGroup:
        """The prompt, which is the one of the index, as a group of so many rollouts."""
        own = {name: getattr(self, name) for name in ("prompt", "prompt_ids", "label", "metadata", "tools")}
        return PromptGroup(group_id=group_id, prompt_index=index, epoch=0, n_samples=n_samples, seed=seed, **own)


@dataclass(frozen=True)
class Preparer:
    """Renders and tokenises checked rows."""

    wrap_text: bool  # text is rendered, as a message of the user
    tokenize: Tokenize  # text as it stands
    tokenize_rendered: Tokenize
    render: Render | None  # applies the chat template to (messages, tools)
    tools: Sequence[Mapping[str, object]] = ()  # of the run
    tokenize_labels: bool = False  # fills `label_ids`, for supervised training
    converse: Converse | None = None  # splits a chat with an answer; without it chats are not looked into

    def __call__(self, row: PromptRow, limit: int | None = None) -> PreparedPrompt:
        """Raises BadValue if the template refuses the messages, no token comes out, or a text of many times the limit,
        in tokens, is too long without doubt."""
        tools: list[Mapping[str, object]] = [*self.tools]
        if row.tools != "[]":
            tools.extend(msgspec.json.decode(row.tools))
        if self.converse is not None and row.label is None and is_conversation(row.prompt):
            # Its answers are learned; what lies between them is left out of the loss.
            chat = self._of_template(partial(self.converse, row.prompt, tools))
            ids, label_ids = (_frozen(self.tokenize_rendered(text)) for text in (chat.prompt, chat.label))
            metadata = msgspec.json.encode(msgspec.json.decode(row.metadata) | {"tool_spans": chat.context}).decode()
            offered = msgspec.json.encode(tools).decode()
            return PreparedPrompt(chat.prompt, ids, chat.label, metadata, offered, label_ids, chat.ended)
        if isinstance(row.prompt, str) and not self.wrap_text:
            text, tokens = row.prompt, _tokenized(self.tokenize, row.prompt, limit)
        else:
            text = self._rendered(row.prompt, tools)
            tokens = _tokenized(self.tokenize_rendered, text, limit)
        if not len(tokens):
            raise BadValue("empty prompt", "the prompt has no tokens")
        encoded_tools = row.tools if not self.tools else msgspec.json.encode(tools).decode()
        label_ids = _frozen(self.tokenize_rendered(row.label or "")) if self.tokenize_labels else NO_IDS
        return PreparedPrompt(text, _frozen(tokens), row.label, row.metadata, encoded_tools, label_ids)

    def _rendered(self, prompt: str | list[Message], tools: list[Mapping[str, object]]) -> str:
        if self.render is None:
            raise BadValue(
                "template",
                "the prompt is a list of chat messages, but the tokenizer has no chat template; "
                "give one with --chat-template-path",
            )
        messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return self._of_template(partial(self.render, messages, tools))

    def _of_template(self, rendered: Callable[[], T]) -> T:
        try:
            return rendered()
        except BadValue:
            raise
        except Exception as error:  # a template is a program of the checkpoint: whatever it raises concerns this row
            raise BadValue(
                "template", f"the chat template refuses the messages ({type(error).__name__}: {error})"
            ) from None


def _tokenized(tokenize: Tokenize, text: str, limit: int | None) -> Sequence[int]:
    """The tokens of a text. Of a text of megabytes only the beginning is encoded, which shows that it is too long."""
    if limit is not None and len(text) > _HEAD_CHARACTERS * (limit + 1):
        head = text[: _HEAD_CHARACTERS * (limit + 1)]
        n_tokens = len(tokenize(head))
        if n_tokens > limit + 1:  # its last token may become one with what follows
            raise BadValue(
                "too long",
                f"the first {len(head)} of {len(text)} characters are {n_tokens} tokens, above the limit of {limit}",
            )
    return tokenize(text)


def _frozen(ids: Sequence[int]) -> Int32Array:
    array = wire(ids, Int32Array)
    array.flags.writeable = False  # one array is handed to every group of this prompt
    return array


def render_of(data: DataConfig, tokenizer: Tokenizer) -> Render | None:
    """Applies the chat template, None without one."""

    def render(messages: list[Message], offered: list[Mapping[str, object]]) -> str:
        return tokenizer.apply_chat_template(messages, offered or None, **data.apply_chat_template_kwargs)

    return render if tokenizer.has_chat_template else None


def converse_of(data: DataConfig, tokenizer: Tokenizer) -> Converse:
    """Splits a chat by its template."""

    def markup_at(text: str) -> str:
        piece = tokenizer.decode(tokenizer.markup(text[:_MARKUP_CHARACTERS])[:1], False)
        return piece if text.startswith(piece) else ""

    def converse(messages: Chat, offered: Sequence[Mapping[str, object]]) -> Conversation:
        def render(turns: Chat, generation_prompt: bool) -> str:
            arguments = data.apply_chat_template_kwargs | {"add_generation_prompt": generation_prompt}
            return tokenizer.apply_chat_template(turns, offered or None, **arguments)

        return demonstrated(messages, render, markup_at)

    return converse


def messages_as_json(messages: list[Message], offered: list[Mapping[str, object]]) -> str:
    """In the place of a template, for prompts that travel as messages."""
    return msgspec.json.encode(msgspec.convert(messages, tuple[ChatMessage, ...])).decode()
