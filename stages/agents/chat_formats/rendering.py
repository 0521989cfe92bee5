"""Messages as chat templates want them, and templates as functions of messages.

Invariant: what a template refuses becomes one ChatFormatError with the template's own words.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import msgspec

from stages.agents.chat_formats.errors import ChatFormatError
from stages.agents.messages import Message, ToolCall, ToolSchema
from stages.data.tokenizer import Tokenizer


class Template:
    """The chat template of a checkpoint. `arguments`: what it takes besides messages and tools."""

    def __init__(self, tokenizer: Tokenizer, arguments: Mapping[str, object]) -> None:
        self._tokenizer, self._arguments = tokenizer, arguments

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSchema], generation_prompt: bool = True) -> str:
        """The text of a conversation. Ids of calls that the template refuses (Mistral's take nine letters) are
        replaced by such that it takes. Raises ChatFormatError."""
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


def as_mapping(message: Message) -> dict[str, object]:
    """A message in the form of the OpenAI API, but with arguments of calls as objects, as templates expect them."""
    shown: dict[str, object] = {"role": message.role, "content": message.content}
    if message.reasoning_content:
        shown["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        shown["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    for key, value in (("tool_call_id", message.tool_call_id), ("name", message.name)):
        if value:
            shown[key] = value
    return shown


def _short_ids(messages: Sequence[Message]) -> list[Message]:
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
