"""The chat format of a checkpoint, and the parser that reads its tool calls.

Loading a format needs neither torch nor a network, and takes a fraction of a second. Parsers have the names that SGLang
gives them; by default the parser is the first that reads a call as the checkpoint's chat template writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import msgspec

from configs.schema import Config
from configs.schema.notation import cure
from stages.chat.bridge import QUESTION, Bridge, Template, check_bridge
from stages.chat.errors import ChatFormatError
from stages.chat.formats import PlainFormat, TemplateFormat, TurnEnd, TurnReader, reasoning_tags, special_pieces
from stages.chat.marked_calls import Marked, glm, qwen3_coder
from stages.chat.messages import ChatFormat, Message, ToolCall, ToolSchema
from stages.chat.pythonic_calls import Pythonic
from stages.chat.section_calls import DeepSeek, Harmony, KimiK2, Llama3, Mistral
from stages.chat.tokenizer import Tokenizer, load_tokenizer
from stages.chat.tool_calls import CallParser, Offered

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


def parser_for(written: str, call: ToolCall, tools: tuple[ToolSchema, ...]) -> CallParser | None:
    """The first parser that reads back a call as the chat template writes it."""
    for make in dict.fromkeys(PARSERS.values()):
        parser = make()
        parsed = parser.parse(written, Offered(tools))
        if [(read.name, read.arguments) for read in parsed.calls] == [(call.name, call.arguments)] and not parsed.fault:
            return parser
    return None


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
    """The parser for the template's calls."""
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
