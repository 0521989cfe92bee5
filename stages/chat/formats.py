"""The two chat formats: a checkpoint's chat template, and plain text for models without one; and how they are loaded.

`TurnReader` reads the model's text of one turn as a message: reasoning, content, calls. Loading a format needs
neither torch nor a network, and takes a fraction of a second. Parsers of calls have the names that SGLang gives them;
by default the parser is the first that reads a call as the checkpoint's chat template writes it.

Invariants: `append` looks only at the last tokens of a conversation, to see how far its last turn is closed; the
closing text of a turn occurs exactly once in a conversation; reading never raises, whatever the ids, and text that is
not a readable call stays in the content.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from configs.schema import Config
from configs.schema.notation import cure
from stages.chat.bridge import QUESTION, Bridge, check_bridge
from stages.chat.messages import ChatFormat, ChatFormatError, Message, Messages, Reply, ToolCall, Tools, ToolSchema
from stages.chat.special_token_calls import DeepSeek, Harmony, KimiK2, Llama3, Mistral, Pythonic
from stages.chat.tokenizer import Tokenizer, load_tokenizer
from stages.chat.tool_calls import CallParser, Found, Marked, Offered, glm, qwen3_coder

THINK: Final = ("<think>", "</think>")
_TAGS: Final = (THINK, ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))


@dataclass
class TurnReader:
    """Reads turns."""

    tokenizer: Tokenizer
    parser: CallParser | None
    end_ids: frozenset[int]  # tokens that end a turn
    tags: tuple[str, str] = THINK  # texts around reasoning
    opened: bool = False  # the prompt ends within reasoning

    def read(self, ids: Sequence[int], tools: Tools) -> Reply:
        """The message of one turn's tokens."""
        length = len(ids)
        while length and ids[length - 1] in self.end_ids:
            length -= 1
        text = self.tokenizer.decode(ids[:length], skip_special_tokens=False) if length else ""
        parser = self.parser
        if parser is not None and parser.reads_reasoning:
            parsed = parser.parse(text, Offered(tools))
            return Reply(Message("assistant", parsed.content, parsed.reasoning, parsed.calls), parsed.fault)
        reasoning, content = self._split(text, ended=length < len(ids))
        parsed = parser.parse(content, Offered(tools)) if parser is not None and tools else Found(content)
        return Reply(Message("assistant", parsed.content, reasoning, parsed.calls), parsed.fault)

    def _split(self, text: str, ended: bool) -> tuple[str, str]:
        """(reasoning, content)."""
        opening, closing = self.tags
        begins = text.lstrip().startswith(opening)
        before, closed, after = text.partition(closing)
        if not begins and (opening in before or not (self.opened or closed)):
            return "", text
        if begins:
            before = before.partition(opening)[2]
        if not closed and ended and self.parser is not None:  # ended in a call inside its reasoning
            before, marker, after = before.partition(self.parser.opening)
            after = marker + after
        return before.strip(), after.lstrip("\n")


class PlainFormat:
    """Concatenated contents. No markup names the speaker: the environment's texts must do so."""

    def __init__(self, tokenizer: Tokenizer, parser: CallParser) -> None:
        # Nothing else ends a turn in this format.
        self.stop: Sequence[str] = (parser.closing,) if parser.closing else ()
        self.stop_token_ids: Sequence[int] = ()
        self._tokenizer = tokenizer
        self._reader = TurnReader(tokenizer, parser, frozenset(tokenizer.eos_ids))

    def start(self, messages: Messages, tools: Tools, most: int | None = None) -> list[int]:
        """Tokens of a text, with the tokenizer's special tokens (a BOS)."""
        return self._tokenizer.encode(_joined(messages), add_special_tokens=True, most=most)

    def append(self, ids: Sequence[int], messages: Messages, tools: Tools, most: int | None = None) -> list[int]:
        """Tokens of the text alone: no markup closes a turn."""
        return self._tokenizer.encode(_joined(messages), most=most)

    def reply(self, ids: Sequence[int], tools: Tools) -> Reply:
        return self._reader.read(ids, tools)


def _joined(messages: Messages) -> str:
    return "".join(message.content for message in messages)


class TurnEnd:
    """The tokens that close a turn, and how many of them the model wrote.

    `ids`: the template's tokens; the first special token ends the turn, and only space follows it. `others`: other
    tokens that may close a turn, such as the end of a call.
    """

    def __init__(self, tokenizer: Tokenizer, text: str, others: Sequence[str] = ()) -> None:
        self.ids = tokenizer.encode(text) if text else []
        special = [tokenizer.markup(end)[:1] for end in (text, *others)]
        self._place = self.ids.index(special[0][0]) if special[0] else -1
        closers = tuple(dict.fromkeys(id for ids in special for id in ids))
        self.stop_ids = tuple(id for id in closers if id not in tokenizer.eos_ids)
        self.end_ids = frozenset((*tokenizer.eos_ids, *closers))

    def written(self, ids: Sequence[int], behind: Sequence[int]) -> int:
        """How many of the closing tokens the turn already has."""
        if not ids:
            return 0
        if self._place >= 0 and ids[-1] in self.end_ids:
            return self._place + 1
        longest = len(self.ids)
        # Without a closing token, the end token may be the opening of the next message (GLM).
        if self._place < 0 and len(behind) > longest and behind[longest] in self.end_ids:
            longest += 1
        shortest = max(self._place + 1, 1)
        for count in range(min(longest, len(ids)), shortest - 1, -1):
            if list(ids[-count:]) == list(behind[:count]):
                return count
        return 0


class TemplateFormat:
    """See `load_chat_format`. `tool_fault`: reason why tools cannot be offered in this format, or ""."""

    def __init__(self, tokenizer: Tokenizer, parser: CallParser | None, arguments: Mapping[str, object]) -> None:
        self._tokenizer, self._bridge, self.tool_fault = tokenizer, Bridge(tokenizer, arguments), ""
        closings = [check_bridge(self._bridge, (_USER,), ())]
        try:
            parser = parser or _parser_of(self._bridge)
            for messages in ((_USER,), _ANSWERS[:1], _ANSWERS):
                closings.append(check_bridge(self._bridge, messages, (_PROBE,)))
        except ChatFormatError as error:
            self.tool_fault = f"tools cannot be offered to this model: {error}"
        self._end = TurnEnd(tokenizer, self._bridge.end, closings)
        tags = next((tags for tags in _TAGS if tags[1] in tokenizer.chat_template), THINK)
        prompt = self._bridge.render((QUESTION,), ())
        opened = prompt.rfind(tags[0]) > prompt.rfind(tags[1])
        self._reader = TurnReader(tokenizer, parser, self._end.end_ids, tags, opened)
        self.stop: Sequence[str] = ()
        self.stop_token_ids: Sequence[int] = self._end.stop_ids

    def start(self, messages: Messages, tools: Tools, most: int | None = None) -> list[int]:
        """Tokens of the whole conversation, by the template. Raises ChatFormatError, TooLong."""
        if tools and self.tool_fault:
            raise ChatFormatError(self.tool_fault)
        return self._tokenizer.encode(self._bridge.render(messages, tools), most=most)

    def append(self, ids: Sequence[int], messages: Messages, tools: Tools, most: int | None = None) -> list[int]:
        """Tokens of the template's text after a turn. Raises ChatFormatError, TooLong."""
        behind = self._tokenizer.encode(self._bridge.between(messages, tools).text, most=most)
        return behind[self._end.written(ids, behind) :]

    def reply(self, ids: Sequence[int], tools: Tools) -> Reply:
        return self._reader.read(ids, tools)


PARSERS: dict[str, Callable[[], CallParser]] = {
    "hermes": Marked,
    "qwen": Marked,
    "qwen25": Marked,
    "qwen3_coder": qwen3_coder,
    "glm": glm,
    "glm45": glm,
    "glm47": glm,
    "deepseekv3": DeepSeek,
    "deepseekv31": DeepSeek,
    "kimi_k2": KimiK2,
    "mistral": Mistral,
    "gpt-oss": Harmony,
    "llama3": Llama3,
    "pythonic": Pythonic,
}


def parser_by_name(name: str) -> CallParser:
    """Raises ChatFormatError."""
    if name not in PARSERS:
        raise ChatFormatError(f"--tool-call-parser {name!r} is unknown; {cure(name, PARSERS)}")
    return PARSERS[name]()


_PROBE: Final[ToolSchema] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks somewhere.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}, "times": {"type": "integer"}},
            "required": ["place"],
        },
    },
}
_USER: Final = Message("user", "Where else?")
_ANSWERS: Final = (
    Message("tool", "Nothing there.", tool_call_id="functions.look:0", name="look"),
    Message("tool", "Nothing either.", tool_call_id="functions.look:1", name="look"),
)
_CALL: Final = ToolCall("look", {"place": "under it", "times": 2}, "functions.look:0")


def load_chat_format(
    checkpoint: str,
    *,
    chat_template_path: str | None = None,
    parser: str | None = None,
    marks: tuple[str, str] | None = None,
    template_arguments: Mapping[str, object] | None = None,
) -> ChatFormat:
    """The chat format of a checkpoint.

    `parser`: SGLang's name of the parser of tool calls; by default chosen by the chat template. `marks`: texts around a
    call, used without a parser and a chat template. `template_arguments`: arguments of the template besides messages
    and tools, such as enable_thinking. Raises ChatFormatError if the template cannot be used over several turns,
    TokenizerError without a usable tokenizer.
    """
    tokenizer = load_tokenizer(checkpoint, chat_template_path)
    named = None if parser is None else parser_by_name(parser)
    if not tokenizer.has_chat_template:
        return PlainFormat(tokenizer, named or Marked(*marks or ()))
    return TemplateFormat(tokenizer, named, template_arguments or {})


def _parser_of(bridge: Bridge) -> CallParser:
    """The first parser that reads back a call as the chat template writes it. Raises ChatFormatError."""
    turn = Message("assistant", tool_calls=(_CALL,))
    bare = bridge.render((QUESTION,), (_PROBE,), generation_prompt=False)
    prompt = bridge.render((QUESTION,), (_PROBE,))
    written = bridge.render((QUESTION, turn), (_PROBE,), generation_prompt=False).removesuffix(bridge.end)
    for head in filter(written.startswith, (prompt, bare)):
        for make in dict.fromkeys(PARSERS.values()):
            parser = make()
            parsed = parser.parse(written[len(head) :], Offered((_PROBE,)))
            calls = [(read.name, read.arguments) for read in parsed.calls]
            if calls == [(_CALL.name, _CALL.arguments)] and not parsed.fault:
                return parser
    raise ChatFormatError(
        "no parser reads the calls that its chat template writes; name one of its family with --tool-call-parser, or "
        f"give a template that shows calls: {', '.join(PARSERS)}"
    )


def chat_format(config: Config) -> ChatFormat:
    """The chat format of the policy. Raises ChatFormatError."""
    data, tools = config.data, config.tools
    return load_chat_format(
        config.train.hf_checkpoint,
        chat_template_path=data.chat_template_path,
        parser=tools.tool_call_parser,
        marks=(tools.tool_call_open, tools.tool_call_close),
        template_arguments=data.apply_chat_template_kwargs,
    )


def with_stops(config: Config) -> Config:
    """The configuration, with the ends of a model's turn added to the stops of sampling. Raises ChatFormatError."""
    if not config.environment:
        return config
    chat, rollout = chat_format(config), config.rollout
    return msgspec.structs.replace(
        config,
        rollout=msgspec.structs.replace(
            rollout,
            rollout_stop=tuple(dict.fromkeys((*rollout.rollout_stop, *chat.stop))),
            rollout_stop_token_ids=tuple(dict.fromkeys((*rollout.rollout_stop_token_ids, *chat.stop_token_ids))),
        ),
    )
