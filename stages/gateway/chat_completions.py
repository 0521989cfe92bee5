"""The dialect of OpenAI's chat completions (POST /v1/chat/completions), with vLLM's fields for tokens.

Only text is supported, and one answer to a request. docs/gateway.md says what becomes of every field.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, get_args

import msgspec
from msgspec import Struct

from stages.chat.messages import Message, Role, ToolCall, ToolSchema
from stages.gateway.answers import STATUS, Answer, Ask, Dialect, Json, Refused, Sampling, event, texts
from stages.gateway.requests import decode, form, offered
from stages.gateway.sessions import Conversation

FINISH: Final = {"stop": "stop", "stop_text": "stop", "length": "length", "calls": "tool_calls"}
_ROLES: Final[Mapping[str, Role]] = {**{role: role for role in get_args(Role)}, "function": "tool"}
_TEXTS: Final = ("text", "input_text", "output_text", "refusal", "reasoning_text", "summary_text")
# Fields of OpenAI, then of vLLM and SGLang, that are refused unless they are empty or have the value given here.
_REFUSED: Final[Mapping[str, object]] = {
    **dict.fromkeys(("audio", "functions", "logit_bias", "top_logprobs", "web_search_options", "bad_words", "ebnf")),
    **dict.fromkeys(("chat_template", "chat_template_kwargs", "continue_final_message", "echo", "ignore_eos", "regex")),
    **dict.fromkeys(("guided_choice", "guided_grammar", "guided_json", "guided_regex", "input_ids", "lora_path")),
    **dict.fromkeys(("logits_processors", "min_tokens", "prompt_logprobs", "stop_regex", "structured_outputs")),
    **{"add_generation_prompt": True, "function_call": "none", "modalities": ["text"], "stop_token_ids": None},
}
_KINDS: Final = {"no_session": "invalid_api_key", "too_long": "context_length_exceeded"}


class Part(Struct, frozen=True):
    type: str = "text"
    text: str = ""
    refusal: str = ""


class Function(Struct, frozen=True):
    name: str
    arguments: str | dict[str, Any] = ""


class Call(Struct, frozen=True):
    function: Function
    id: str = ""


class ChatMessage(Struct, frozen=True):
    role: str
    content: str | list[Part] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class StreamOptions(Struct, frozen=True):
    include_usage: bool | None = None


class Common(Struct, frozen=True, kw_only=True):
    """What a conversation has in every dialect."""

    model: str = "policy"
    tools: list[dict[str, Any]] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None


class ChatRequest(Common, frozen=True, kw_only=True):
    messages: list[ChatMessage]
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    logprobs: bool | None = None
    return_token_ids: bool | None = None
    top_k: int | None = None


class OpenAIErrors(Dialect):
    """The errors of OpenAI's dialects."""

    def error(self, refused: Refused) -> Json:
        kind = "server_error" if STATUS[refused.reason] >= 500 else "invalid_request_error"
        code = _KINDS.get(refused.reason, refused.reason)
        return {"error": {"message": refused.message, "type": kind, "param": None, "code": code}}


class ChatCompletions(OpenAIErrors):
    def read(self, body: bytes) -> Ask:
        parsed = decode(body, ChatRequest, _REFUSED)
        if (parsed.n or 1) != 1:
            raise Refused("invalid", f"n is {parsed.n}; the gateway gives one answer to a request: ask again for more")
        functions = (tool.get("function") for tool in parsed.tools or ())
        tools = offered(parsed.tool_choice, (function_tool(one) for one in functions if isinstance(one, dict)))
        limits = (parsed.max_completion_tokens, parsed.max_tokens)
        return Ask(
            parsed.model,
            Conversation(tuple(map(_message, parsed.messages)), tools),
            constraint=form("response_format", parsed.response_format, tools),
            one_call=parsed.parallel_tool_calls is False,
            max_tokens=next((limit for limit in limits if limit is not None), None),
            stop=texts(parsed.stop),
            sampling=Sampling(parsed.temperature, parsed.top_p, parsed.top_k),
            stream=bool(parsed.stream),
            stream_usage=bool(parsed.stream_options and parsed.stream_options.include_usage),
            log_probs=bool(parsed.logprobs),
            token_ids=bool(parsed.return_token_ids),
        )

    def answer(self, ask: Ask, answer: Answer) -> Json:
        message = answer.message
        content = message.content or (None if message.tool_calls else "")
        written: dict[str, object] = {"role": "assistant", "content": content, "refusal": None}
        if message.reasoning_content:
            written["reasoning_content"] = message.reasoning_content
        if message.tool_calls:
            written["tool_calls"] = calls(message.tool_calls)
        choice = {
            "index": 0,
            "message": written,
            "finish_reason": FINISH[answer.finish],
            "logprobs": {"content": answer.token_log_probs} if ask.log_probs else None,
            **({"token_ids": answer.token_ids} if ask.token_ids else {}),
        }
        return {
            "id": f"chatcmpl-{answer.id}",
            "object": "chat.completion",
            "created": answer.created,
            "model": ask.model,
            "choices": [choice],
            "usage": usage(answer),
            **({"prompt_token_ids": answer.prompt_ids} if ask.token_ids else {}),
        }

    def events(self, ask: Ask, answer: Answer) -> Iterator[bytes]:
        message = answer.message
        first: Json = {"prompt_token_ids": answer.prompt_ids} if ask.token_ids else {}
        yield _chunk(ask, answer, {"role": "assistant", "content": ""}, more=first)
        if message.reasoning_content:
            yield _chunk(ask, answer, {"reasoning_content": message.reasoning_content})
        if message.content or ask.log_probs or ask.token_ids:
            extra: dict[str, object] = {"token_ids": answer.token_ids} if ask.token_ids else {}
            if ask.log_probs:
                extra["logprobs"] = {"content": answer.token_log_probs}
            yield _chunk(ask, answer, {"content": message.content}, extra)
        for index, call in enumerate(calls(message.tool_calls)):
            yield _chunk(ask, answer, {"tool_calls": [{"index": index, **call}]})
        yield _chunk(ask, answer, {}, {"finish_reason": FINISH[answer.finish]})
        if ask.stream_usage:
            yield _chunk(ask, answer, None, more={"usage": usage(answer)})
        yield b"data: [DONE]\n\n"


def usage(answer: Answer) -> Json:
    prompt, generated = len(answer.prompt_ids), len(answer.token_ids)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }


def calls(generated: Sequence[ToolCall]) -> list[dict[str, object]]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments_text(call)}}
        for call in generated
    ]


def arguments_text(call: ToolCall) -> str:
    return call.arguments if isinstance(call.arguments, str) else msgspec.json.encode(call.arguments).decode()


def content_text(content: str | Sequence[Part] | None, kinds: Sequence[str] = _TEXTS, between: str = "") -> str:
    """The joined text. Raises Refused for content of other kinds."""
    if content is None or isinstance(content, str):
        return content or ""
    unsupported = [part.type for part in content if part.type not in kinds]
    if unsupported:
        raise Refused("invalid", f"content of type {unsupported[0][:40]!r} is not supported; send texts")
    return between.join(part.text or part.refusal for part in content)


def role(name: str) -> Role:
    """A role of the chat format. Raises Refused for an unknown role."""
    if name not in _ROLES:
        raise Refused("invalid", f"a message has role {name[:40]!r}; roles are {', '.join(_ROLES)}")
    return _ROLES[name]


def function_tool(sent: Mapping[str, object], schema: str = "parameters") -> ToolSchema:
    """A tool in the form of chat templates, without other fields of the client. `schema`: the field that has it."""
    name, description, parameters = sent.get("name"), sent.get("description"), sent.get(schema)
    function: dict[str, object] = {"name": name if isinstance(name, str) else ""}
    if isinstance(description, str) and description:
        function["description"] = description
    function["parameters"] = parameters if isinstance(parameters, dict) else {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def _message(sent: ChatMessage) -> Message:
    calls = tuple(ToolCall(call.function.name, call.function.arguments, call.id) for call in sent.tool_calls or ())
    author = role(sent.role)
    return Message(
        author,
        content_text(sent.content),
        sent.reasoning_content or sent.reasoning or "",
        calls,
        sent.tool_call_id or "",
        (sent.name or "") if author == "tool" else "",
    )


def _chunk(ask: Ask, answer: Answer, delta: Json | None, extra: Json | None = None, more: Json | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": None, **(extra or {})}
    return event(
        {
            "id": f"chatcmpl-{answer.id}",
            "object": "chat.completion.chunk",
            "created": answer.created,
            "model": ask.model,
            "choices": [] if delta is None else [choice],
            **(more or {}),
        }
    )
