"""The dialect of OpenAI's Responses (POST /v1/responses).

The client sends the whole conversation. Nothing is stored under the id of a response, so `previous_response_id` is
refused. Functions are offered to the model as tools; tools that a provider runs itself are not. Reasoning is sent as
text and also as `encrypted_content`, for clients that return only that.
"""

from __future__ import annotations

import base64
import binascii
import itertools
from collections.abc import Iterator
from typing import Any, Final

from msgspec import Struct

from stages.chat.messages import Message, ToolCall
from stages.gateway.answers import Answer, Ask, Json, Refused, Sampling, event
from stages.gateway.chat_completions import (
    Common,
    OpenAIErrors,
    Part,
    arguments_text,
    content_text,
    function_tool,
    role,
)
from stages.gateway.requests import decode, form, offered, unserved
from stages.gateway.sessions import Conversation

_REFUSED: Final = dict.fromkeys(("background", "conversation", "prompt", "top_logprobs"))
_LOGPROBS: Final = "message.output_text.logprobs"


class Item(Struct, frozen=True):
    type: str = "message"
    role: str = "user"
    content: str | list[Part] | None = None
    call_id: str = ""
    name: str = ""
    arguments: str | dict[str, Any] = ""
    output: str | list[Part] | None = None
    summary: list[Part] | None = None
    encrypted_content: str | None = None


class TextOptions(Struct, frozen=True):
    format: dict[str, Any] | None = None


class ResponsesRequest(Common, frozen=True, kw_only=True):
    input: str | list[Item] = ""
    instructions: str | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    include: list[str] | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None


class Responses(OpenAIErrors):
    def read(self, body: bytes) -> Ask:
        parsed = decode(body, ResponsesRequest, _REFUSED)
        if parsed.previous_response_id:
            raise Refused("invalid", "previous_response_id is not supported; send the whole conversation as input")
        if _LOGPROBS in (parsed.include or ()):
            raise unserved("include", [_LOGPROBS])
        items = [Item(content=parsed.input)] if isinstance(parsed.input, str) else parsed.input
        system = [Message("system", parsed.instructions)] if parsed.instructions else []
        functions = (function_tool(tool) for tool in parsed.tools or () if tool.get("type") == "function")
        tools = offered(parsed.tool_choice, functions)
        return Ask(
            parsed.model,
            Conversation((*system, *_messages(items)), tools),
            constraint=form("text.format", parsed.text.format if parsed.text else None, tools),
            one_call=parsed.parallel_tool_calls is False,
            max_tokens=parsed.max_output_tokens,
            sampling=Sampling(parsed.temperature, parsed.top_p),
            stream=bool(parsed.stream),
        )

    def answer(self, ask: Ask, answer: Answer) -> Json:
        return _response(ask, answer, _output(answer))

    def events(self, ask: Ask, answer: Answer) -> Iterator[bytes]:
        numbers = itertools.count()

        def emit(name: str, /, **data: object) -> bytes:
            return event({"type": name, "sequence_number": next(numbers), **data}, name)

        opening = {**_response(ask, answer, []), "status": "in_progress", "usage": None, "incomplete_details": None}
        yield emit("response.created", response=opening)
        yield emit("response.in_progress", response=opening)
        for index, item in enumerate(_output(answer)):
            where = {"item_id": item["id"], "output_index": index}
            place = {**where, "content_index": 0}
            empty: Json = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
            yield emit(
                "response.output_item.added", output_index=index, item={**item, "status": "in_progress", **empty}
            )
            if item["type"] == "message":
                [part] = item["content"]
                yield emit("response.content_part.added", **place, part={**part, "text": ""})
                yield emit("response.output_text.delta", **place, delta=part["text"], logprobs=[])
                yield emit("response.output_text.done", **place, text=part["text"], logprobs=[])
                yield emit("response.content_part.done", **place, part=part)
            elif item["type"] == "function_call":
                arguments = item["arguments"]
                yield emit("response.function_call_arguments.delta", **where, delta=arguments)
                yield emit("response.function_call_arguments.done", **where, arguments=arguments, name=item["name"])
            else:
                thought = item["content"][0]["text"]
                yield emit("response.reasoning_text.delta", **place, delta=thought)
                yield emit("response.reasoning_text.done", **place, text=thought)
            yield emit("response.output_item.done", output_index=index, item=item)
        ending = "response.incomplete" if answer.finish == "length" else "response.completed"
        yield emit(ending, response=self.answer(ask, answer))

    def error_event(self, refused: Refused) -> bytes:
        words = {"code": "server_error", "message": refused.message, "param": None, "sequence_number": 0}
        return event({"type": "error", **words}, "error")


def _messages(items: list[Item]) -> Iterator[Message]:
    """The conversation in a list of items. One turn of the model may be several items."""
    for of_model, grouped in itertools.groupby(items, key=_is_models):
        turn = list(grouped)
        if of_model:
            content = "".join(content_text(item.content) for item in turn if item.type == "message")
            thought = "".join(_thought(item) for item in turn if item.type == "reasoning")
            calls = (ToolCall(item.name, item.arguments, item.call_id) for item in turn if item.type == "function_call")
            yield Message("assistant", content, thought, tuple(calls))
            continue
        for item in turn:
            if item.type == "function_call_output":
                yield Message("tool", content_text(item.output), tool_call_id=item.call_id)
            elif item.type == "message":
                yield Message(role(item.role), content_text(item.content))
            else:
                raise Refused("invalid", f"input items of type {item.type[:40]!r} are not supported")


def _is_models(item: Item) -> bool:
    return item.type in ("function_call", "reasoning") or (item.type == "message" and item.role == "assistant")


def _thought(item: Item) -> str:
    if item.content:
        return content_text(item.content)
    try:
        return base64.b64decode(item.encrypted_content or "", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return content_text(item.summary)


def _output(answer: Answer) -> list[dict[str, Any]]:
    """The items of an answer, in order. An answer cut in its reasoning has only the reasoning item."""
    message, cut = answer.message, answer.finish == "length"
    in_reasoning = cut and bool(message.reasoning_content) and not (message.content or message.tool_calls)
    items: list[dict[str, Any]] = []
    if message.reasoning_content:
        items.append(
            {
                "id": f"rs_{answer.id}",
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": message.reasoning_content}],
                "encrypted_content": base64.b64encode(message.reasoning_content.encode()).decode(),
                "status": "incomplete" if in_reasoning else "completed",
            }
        )
    if message.content or not (message.tool_calls or in_reasoning):
        text = {"type": "output_text", "text": message.content, "annotations": [], "logprobs": []}
        items.append(
            {
                "id": f"msg_{answer.id}",
                "type": "message",
                "role": "assistant",
                "status": "incomplete" if cut else "completed",
                "content": [text],
            }
        )
    for place, call in enumerate(message.tool_calls):
        items.append(
            {
                "id": f"fc_{answer.id}_{place}",
                "type": "function_call",
                "call_id": call.id,
                "name": call.name,
                "arguments": arguments_text(call),
                "status": "completed",
            }
        )
    return items


def _response(ask: Ask, answer: Answer, output: list[dict[str, Any]]) -> dict[str, object]:
    cut = answer.finish == "length"
    prompt, generated = len(answer.prompt_ids), len(answer.token_ids)
    offered = () if ask.conversation is None else ask.conversation.tools
    functions: list[Any] = [tool["function"] for tool in offered]
    return {
        "id": f"resp_{answer.id}",
        "object": "response",
        "created_at": answer.created,
        "status": "incomplete" if cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": None,
        "max_output_tokens": ask.max_tokens,
        "metadata": {},
        "model": ask.model,
        "output": output,
        "parallel_tool_calls": not ask.one_call,
        "temperature": None,
        "top_p": None,
        "tool_choice": "auto" if functions else "none",
        "tools": [{"type": "function", "strict": False, **function} for function in functions],
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": answer.cached_tokens},
            "output_tokens": generated,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + generated,
        },
    }
