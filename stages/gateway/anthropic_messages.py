"""The dialect of Anthropic's messages (POST /v1/messages), and its count_tokens.

Only text is supported. Tools with an `input_schema` are offered to the model; tools that a provider runs itself are
not. docs/gateway.md says what becomes of every field.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec
from msgspec import Struct

from stages.chat.messages import Message, ToolCall
from stages.gateway.answers import Answer, Ask, Dialect, Json, Reason, Refused, Sampling, event, texts
from stages.gateway.chat_completions import Common, Part, content_text, function_tool, role
from stages.gateway.requests import decode, form, offered
from stages.gateway.sessions import Conversation

_REFUSED: Final = dict.fromkeys(("container", "mcp_servers"))
_STOP: Final = {"stop": "end_turn", "stop_text": "stop_sequence", "length": "max_tokens", "calls": "tool_use"}
_KINDS: Final[dict[Reason, str]] = {
    "no_session": "authentication_error",
    "not_found": "not_found_error",
    "too_large": "request_too_large",
    "busy": "rate_limit_error",
    "unavailable": "overloaded_error",
    "internal": "api_error",
}


class Block(Part, frozen=True):
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: Any = None
    tool_use_id: str = ""
    content: str | list[Block] | None = None


class SentMessage(Struct, frozen=True):
    role: str
    content: str | list[Block] = ""


class OutputConfig(Struct, frozen=True):
    format: dict[str, Any] | None = None


class MessagesRequest(Common, frozen=True, kw_only=True):
    messages: list[SentMessage]
    max_tokens: int | None = None
    system: str | list[Block] | None = None
    tool_choice: dict[str, Any] | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None  # its older name
    stop_sequences: list[str] | None = None
    top_k: int | None = None


class AnthropicMessages(Dialect):
    def read(self, body: bytes) -> Ask:
        parsed = decode(body, MessagesRequest, _REFUSED)
        system = _text(parsed.system)
        messages = [Message("system", system)] if system else []
        for sent in parsed.messages:
            messages += _messages(sent)
        sent_tools = (function_tool(tool, "input_schema") for tool in parsed.tools or () if "input_schema" in tool)
        tools = offered(parsed.tool_choice, sent_tools)
        config = parsed.output_config or OutputConfig()
        return Ask(
            parsed.model,
            Conversation(tuple(messages), tools),
            constraint=form("output_config.format", config.format, tools)
            or form("output_format", parsed.output_format, tools),
            one_call=bool((parsed.tool_choice or {}).get("disable_parallel_tool_use")),
            max_tokens=parsed.max_tokens,
            stop=texts(parsed.stop_sequences),
            sampling=Sampling(parsed.temperature, parsed.top_p, parsed.top_k),
            stream=bool(parsed.stream),
            object_arguments=True,
        )

    def answer(self, ask: Ask, answer: Answer) -> Json:
        usage = _usage(answer, len(answer.token_ids))
        return {**_opening(ask, answer), "content": _blocks(answer), **_ending(answer), "usage": usage}

    def events(self, ask: Ask, answer: Answer) -> Iterator[bytes]:
        yield _said("message_start", message=_opening(ask, answer))
        for index, block in enumerate(_blocks(answer)):
            kind = block["type"]
            if kind == "tool_use":
                written = msgspec.json.encode(block["input"]).decode()
                begun, delta = {**block, "input": {}}, {"type": "input_json_delta", "partial_json": written}
            else:
                begun, delta = {**block, kind: ""}, {"type": f"{kind}_delta", kind: block[kind]}
            yield _said("content_block_start", index=index, content_block=begun)
            yield _said("content_block_delta", index=index, delta=delta)
            yield _said("content_block_stop", index=index)
        yield _said("message_delta", delta=_ending(answer), usage={"output_tokens": len(answer.token_ids)})
        yield _said("message_stop")

    def error(self, refused: Refused) -> Json:
        kind = _KINDS.get(refused.reason, "invalid_request_error")
        # Clients recognise a conversation that is too long by this text.
        words = f"prompt is too long: {refused.message}" if refused.reason == "too_long" else refused.message
        return {"type": "error", "error": {"type": kind, "message": words}}

    def error_event(self, refused: Refused) -> bytes:
        return event(self.error(refused), "error")


def _said(name: str, /, **data: object) -> bytes:
    return event({"type": name, **data}, name)


def _opening(ask: Ask, answer: Answer) -> dict[str, object]:
    return {
        "id": f"msg_{answer.id}",
        "type": "message",
        "role": "assistant",
        "model": ask.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(answer, 0),
    }


def _ending(answer: Answer) -> dict[str, object]:
    return {"stop_reason": _STOP[answer.finish], "stop_sequence": answer.stop or None}


def _usage(answer: Answer, made: int) -> Json:
    return {
        "input_tokens": len(answer.prompt_ids) - answer.cached_tokens,
        "cache_read_input_tokens": answer.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": made,
    }


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    message = answer.message
    blocks: list[dict[str, Any]] = []
    if message.reasoning_content:
        blocks.append({"type": "thinking", "thinking": message.reasoning_content, "signature": ""})
    if message.content or not message.tool_calls:
        blocks.append({"type": "text", "text": message.content})
    for call in message.tool_calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments})
    return blocks


def _messages(sent: SentMessage) -> Iterator[Message]:
    """The messages in one message of the dialect: first the results of tools, then the text."""
    author = role(sent.role)
    blocks = [Block(text=sent.content)] if isinstance(sent.content, str) else sent.content
    if author == "assistant":
        yield Message(
            author,
            _text([block for block in blocks if block.type == "text"]),
            "".join(block.thinking for block in blocks if block.type == "thinking"),
            tuple(
                ToolCall(block.name, block.input if isinstance(block.input, dict) else {}, block.id)
                for block in blocks
                if block.type == "tool_use"
            ),
        )
        return
    for block in blocks:
        if block.type == "tool_result":
            yield Message("tool", _text(block.content), tool_call_id=block.tool_use_id)
    rest = [block for block in blocks if block.type != "tool_result"]
    if rest or not blocks:
        yield Message(author, _text(rest))


def _text(content: str | list[Block] | None) -> str:
    return content_text(content, ("text",), "\n")
