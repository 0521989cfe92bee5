"""The chat format of a checkpoint. Loading it needs neither torch nor a network, and takes a fraction of a second."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final

from stages.agents.chat import ChatFormat
from stages.agents.chat_formats.bridge import QUESTION, Bridge, check_bridge
from stages.agents.chat_formats.errors import ChatFormatError
from stages.agents.chat_formats.parsers.found import CallParser
from stages.agents.chat_formats.parsers.marked import Marked
from stages.agents.chat_formats.parsers.registry import PARSERS, parser_by_name, parser_for
from stages.agents.chat_formats.plain import PlainFormat
from stages.agents.chat_formats.reading import TurnReader, reasoning_tags
from stages.agents.chat_formats.rendering import Template
from stages.agents.chat_formats.template_format import TemplateFormat, TurnEnd, special_pieces
from stages.agents.messages import Message, ToolCall, ToolSchema
from stages.data.tokenizer import Tokenizer, load_tokenizer

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
    """How conversations with a checkpoint's model are written.

    `parser`: how its tool calls are read, by SGLang's names; by default as its chat template writes them.
    `marks`: what opens and closes a call where there is neither a parser's name nor a chat template.
    `template_arguments`: what the template takes besides messages and tools, such as enable_thinking. Raises
    ChatFormatError where the template cannot be used over several turns, TokenizerError without a usable tokenizer.
    """
    return chat_format(
        load_tokenizer(checkpoint, chat_template_path),
        parser=parser,
        marks=marks,
        template_arguments=template_arguments,
    )


def chat_format(
    tokenizer: Tokenizer,
    *,
    parser: str | None = None,
    marks: tuple[str, str] | None = None,
    template_arguments: Mapping[str, object] | None = None,
) -> ChatFormat:
    """As `load_chat_format`, with a tokenizer that is loaded already."""
    named = None if parser is None else parser_by_name(parser)
    if not tokenizer.has_chat_template:
        return PlainFormat(tokenizer, named or Marked(*marks or ()))
    return _by_template(tokenizer, named, template_arguments or {})


def _by_template(
    tokenizer: Tokenizer, named: CallParser | None, template_arguments: Mapping[str, object]
) -> TemplateFormat:
    template = Template(tokenizer, template_arguments)
    bridge = Bridge(template, partial(special_pieces, tokenizer))
    closings = [check_bridge(bridge, (_USER,), ())]
    reads, fault = named, ""
    try:
        reads = reads or _parser_of(template, bridge)
        closings += [check_bridge(bridge, messages, (_PROBE,)) for messages in ((_USER,), _ANSWERS[:1], _ANSWERS)]
    except ChatFormatError as error:
        fault = f"tools cannot be offered to this model: {error}"
    end = TurnEnd(tokenizer, bridge.end, closings)
    tags = reasoning_tags(tokenizer.chat_template)
    prompt = template.render((QUESTION,), ())
    opened = prompt.rfind(tags[0]) > prompt.rfind(tags[1])
    reader = TurnReader(tokenizer, reads, end.end_ids, tags, opened)
    return TemplateFormat(tokenizer, template, bridge, reader, end, fault)


def _parser_of(template: Template, bridge: Bridge) -> CallParser:
    """The parser that reads what the template writes."""
    turn = Message("assistant", tool_calls=(_CALL,))
    bare = template.render((QUESTION,), (_PROBE,), generation_prompt=False)
    prompt = template.render((QUESTION,), (_PROBE,))
    written = template.render((QUESTION, turn), (_PROBE,), generation_prompt=False).removesuffix(bridge.end)
    for head in (prompt, bare):
        if written.startswith(head):
            parser = parser_for(written[len(head) :], _CALL, (_PROBE,))
            if parser is not None:
                return parser
    raise ChatFormatError(
        "no parser reads the calls that its chat template writes; name one of its family with --tool-call-parser, or "
        f"give a template that shows calls: {', '.join(PARSERS)}"
    )
