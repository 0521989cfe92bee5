"""Parsers of tool calls by the names that SGLang gives them, and which of them reads what a chat template writes."""

from __future__ import annotations

from collections.abc import Callable

from configs.schema.did_you_mean import cure
from stages.agents.chat_formats.errors import ChatFormatError
from stages.agents.chat_formats.parsers.found import CallParser, Offered
from stages.agents.chat_formats.parsers.harmony import Harmony
from stages.agents.chat_formats.parsers.llama3 import Llama3
from stages.agents.chat_formats.parsers.marked import Marked
from stages.agents.chat_formats.parsers.pythonic import Pythonic
from stages.agents.chat_formats.parsers.sections import DeepSeek, KimiK2, Mistral
from stages.agents.chat_formats.parsers.tagged import glm, qwen3_coder
from stages.agents.messages import ToolCall, ToolSchema

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
    """The first parser that reads a call as it was meant, from how a chat template writes it."""
    for make in dict.fromkeys(PARSERS.values()):
        parser = make()
        found = parser.parse(written, Offered(tools))
        if [(one.name, one.arguments) for one in found.calls] == [(call.name, call.arguments)] and not found.fault:
            return parser
    return None
