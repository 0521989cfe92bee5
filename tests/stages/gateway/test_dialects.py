"""Each dialect as a plain client sees it: the shapes of requests and answers, and what is recorded of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stages.chat.messages import Message, ToolCall
from stages.gateway.chat_completions import arguments_text
from tests.stages.gateway.gateway_rig import (
    ANTHROPIC,
    ASK,
    BODIES,
    CALL,
    CHAT,
    END,
    RESPONSES,
    TOKENS,
    ToyChat,
    log_prob,
    opened,
)


def script(prompt: str) -> str:
    """Calls the tool where one is offered, and answers with what it said."""
    if prompt.startswith("[tools") and "[tool\n" not in prompt:
        return f"<think>easy</think>I add.{CALL}"
    return "It is 3." if "[tool\n" in prompt else "Hello."


def log_probs_of(made: list[int], start: int) -> dict[str, Any]:
    """What is said of tokens that stand from `start` on."""
    shared = {"bytes": None, "top_logprobs": []}
    numbered = enumerate(made, start)
    return {"content": [{"token": f"token_id:{token}", "logprob": log_prob(at), **shared} for at, token in numbered]}


async def test_chat_completions(tmp_path: Path) -> None:
    async with opened(tmp_path, script, max_context=321) as rig:
        status, listed = await rig.get("/v1/models")
        [model] = listed["data"]
        assert (status, model["id"], model["max_model_len"]) == (200, rig.endpoint.model, 321)
        assert (await rig.get("/v1/models/other"))[1]["id"] == "other"
        system = {"role": "system", "content": "Be brief."}
        messages = [system, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
        options = {"temperature": 0, "logprobs": True, "return_token_ids": True, "unknown_field": {"deep": [1]}}
        answer = await rig.ask(CHAT, {"model": "any-name", "messages": messages, **options})
        prompt = ToyChat().start((Message("system", "Be brief."), Message("user", "Hi")), ())
        made = [*b"Hello.", END]
        assert answer.pop("id").startswith("chatcmpl-")
        assert isinstance(answer.pop("created"), int)
        [choice] = answer.pop("choices")
        message = {"role": "assistant", "content": "Hello.", "refusal": None}
        assert choice.pop("logprobs") == log_probs_of(made, len(prompt))
        assert choice == {"index": 0, "message": message, "finish_reason": "stop", "token_ids": made}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": 7, "total_tokens": len(prompt) + 7}
        usage["prompt_tokens_details"] = {"cached_tokens": 0}
        said = {"object": "chat.completion", "model": "any-name", "prompt_token_ids": prompt}
        assert answer == {**said, "usage": usage}
        [sample] = rig.samples()
        assert (sample.index, sample.token_ids.tolist()) == (2, [*prompt, *made])
        assert sample.versions.tolist() == [-1] * len(prompt) + [0] * 7


def gathered(events: list[tuple[str, Any]]) -> dict[str, Any]:
    """The message of a stream of chunks."""
    assert events[-1] == ("", "[DONE]")
    chunks = [data for _, data in events[:-1]]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] > 0
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for [choice] in (chunk["choices"] for chunk in chunks[:-1]):
        delta = choice["delta"]
        for key in ("content", "reasoning_content"):
            if key in delta:
                message[key] = message.get(key, "") + delta[key]
        for call in delta.get("tool_calls", ()):
            assert call.pop("index") == len(message.setdefault("tool_calls", []))
            message["tool_calls"].append(call)
    assert chunks[-2]["choices"][0]["finish_reason"] == ("tool_calls" if "tool_calls" in message else "stop")
    return message


@pytest.mark.parametrize("stream", [False, True])
async def test_tools_of_chat_completions(stream: bool, tmp_path: Path) -> None:
    """A call of a tool, and the answer to its result."""
    body = {**BODIES[CHAT], "stream": stream, "stream_options": {"include_usage": True}}
    said: list[dict[str, Any]] = []
    async with opened(tmp_path, script) as rig:
        for _ in range(2):
            answer = await rig.ask(CHAT, body)
            said.append(gathered(answer) if stream else answer["choices"][0]["message"])
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": "3"} for call in said[-1].get("tool_calls", ())
            ]
            body["messages"] = [*body["messages"], said[-1], *results]
        first, second = said
        assert (first["content"], first["reasoning_content"]) == ("I add.", "easy")
        [call] = first["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2}
        assert (call["type"], call["function"]["name"]) == ("function", "add")
        assert second["content"] == "It is 3."
        [sample] = rig.samples()
        assert (sample.turns, sample.response) == (2, "It is 3.")


async def test_messages_of_anthropic(tmp_path: Path) -> None:
    async with opened(tmp_path, script) as rig:
        known: dict[str, Any] = {
            **{"model": "m", "max_tokens": 100, "thinking": {"type": "adaptive"}},
            **{"context_management": {"edits": []}, "output_config": {"effort": "low"}},
            "tools": [*BODIES[ANTHROPIC]["tools"], {"type": "web_search_20250305", "name": "web_search"}],
            "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        }
        messages: list[Any] = [{"role": "user", "content": "1 + 2?"}]
        body = {**known, "messages": messages}
        first = await rig.ask(f"{ANTHROPIC}?beta=true", body, x_api_key=rig.endpoint.api_key)
        assert first.pop("id").startswith("msg_")
        call_id = first["content"][2]["id"]
        prompt, made = rig.writer.answered[0]
        content = [
            {"type": "thinking", "thinking": "easy", "signature": ""},
            {"type": "text", "text": "I add."},
            {"type": "tool_use", "id": call_id, "name": "add", "input": {"a": 1, "b": 2}},
        ]
        usage = {"input_tokens": len(prompt), "output_tokens": len(made)}
        usage |= {"cache_read_input_tokens": 0, "cache_creation_input_tokens": 0}
        said = {"type": "message", "role": "assistant", "model": "m", "content": content, "usage": usage}
        assert first == {**said, "stop_reason": "tool_use", "stop_sequence": None}
        result = {"type": "tool_result", "tool_use_id": call_id, "content": [{"type": "text", "text": "3"}]}
        messages += [{"role": "assistant", "content": content}]
        messages += [{"role": "user", "content": [result, {"type": "text", "text": "Well?"}]}]
        count = await rig.ask(f"{ANTHROPIC}/count_tokens", body)
        second = await rig.ask(ANTHROPIC, body)
        assert (second["content"], second["stop_reason"]) == ([{"type": "text", "text": "It is 3."}], "end_turn")
        usage = second["usage"]
        assert count == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
        [sample] = rig.samples()
        assert sample.turns == 2


async def test_a_stream_of_anthropic_messages(tmp_path: Path) -> None:
    async with opened(tmp_path, script) as rig:
        events = await rig.ask(ANTHROPIC, {**BODIES[ANTHROPIC], "stream": True})
        assert all(name == data["type"] for name, data in events)
        block = ["content_block_start", "content_block_delta", "content_block_stop"]
        assert [name for name, _ in events] == ["message_start", *block * 3, "message_delta", "message_stop"]
        start, end = events[0][1]["message"], events[-2][1]
        assert (start["role"], start["content"], start["stop_reason"]) == ("assistant", [], None)
        assert start["usage"]["input_tokens"] == len(rig.writer.answered[0][0])
        assert end["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
        assert end["usage"] == {"output_tokens": len(rig.writer.answered[0][1])}
        deltas = [data["delta"] for name, data in events if name == "content_block_delta"]
        assert deltas[:2] == [{"type": "thinking_delta", "thinking": "easy"}, {"type": "text_delta", "text": "I add."}]
        assert deltas[2]["type"] == "input_json_delta"
        assert json.loads(deltas[2]["partial_json"]) == {"a": 1, "b": 2}
        begun = [data["content_block"] for name, data in events if name == "content_block_start"]
        assert begun[0] == {"type": "thinking", "thinking": "", "signature": ""}
        assert (begun[2]["type"], begun[2]["input"]) == ("tool_use", {})


async def test_responses(tmp_path: Path) -> None:
    async with opened(tmp_path, script) as rig:
        known = {
            **{"model": "m", "instructions": "Be brief.", "include": ["reasoning.encrypted_content"], "store": False},
            "tools": [*BODIES[RESPONSES]["tools"], {"type": "web_search"}],
        }
        first = await rig.ask(RESPONSES, {**known, "input": "1 + 2?"})
        assert (first["object"], first["status"]) == ("response", "completed")
        thought, text, call = first["output"]
        assert [item["type"] for item in first["output"]] == ["reasoning", "message", "function_call"]
        assert thought["content"] == [{"type": "reasoning_text", "text": "easy"}]
        assert text["content"] == [{"type": "output_text", "text": "I add.", "annotations": [], "logprobs": []}]
        assert json.loads(call["arguments"]) == {"a": 1, "b": 2}
        usage = first["usage"]
        assert (usage["input_tokens"], usage["output_tokens"]) == tuple(map(len, rig.writer.answered[0]))
        del thought["content"]  # what some clients send back is the other form alone
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "3"}
        question = {"role": "user", "content": [{"type": "input_text", "text": "1 + 2?"}]}
        items = [question, *first["output"], result]
        events = await rig.ask(RESPONSES, {**known, "input": items, "stream": True})
        assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
        assert [name.removeprefix("response.") for name, _ in events] == [
            *("created", "in_progress", "output_item.added", "content_part.added"),
            *("output_text.delta", "output_text.done", "content_part.done", "output_item.done", "completed"),
        ]
        assert events[4][1]["delta"] == "It is 3."
        assert events[-1][1]["response"]["output"][0]["content"][0]["text"] == "It is 3."
        [sample] = rig.samples()
        assert sample.turns == 2
        events = await rig.ask(RESPONSES, {**BODIES[RESPONSES], "stream": True})
        named = {name: data for name, data in events if "function_call" in name or "reasoning" in name}
        assert named["response.reasoning_text.delta"]["delta"] == "easy"
        assert json.loads(named["response.function_call_arguments.delta"]["delta"]) == {"a": 1, "b": 2}
        assert events[-1][0] == "response.completed"


@pytest.mark.parametrize(
    ("text", "requested", "kinds"),
    [
        ("Hello.", 3, {"message": "incomplete"}),
        ("<think>easy</think>It is 3.", 21, {"reasoning": "completed", "message": "incomplete"}),
        ("<think>easy</think>It is 3.", 19, {"reasoning": "incomplete"}),
        (f"I add.{CALL} And", 77, {"message": "incomplete", "function_call": "completed"}),
    ],
    ids=["text", "behind its reasoning", "in its reasoning", "behind a call"],
)
async def test_a_response_that_is_cut_is_incomplete(
    text: str, requested: int, kinds: dict[str, str], tmp_path: Path
) -> None:
    """As the API of OpenAI has it: a status, a reason, and the items as far as they came."""
    async with opened(tmp_path, lambda prompt: text) as rig:
        body = {"input": "Hi", "max_output_tokens": requested}
        whole = await rig.ask(RESPONSES, body)
        events = await rig.ask(RESPONSES, {**body, "input": "Ho", "stream": True})
        assert [sample.status for sample in rig.samples()] == ["truncated", "truncated"]
    assert events[0][1]["response"]["incomplete_details"] is None
    assert events[-1][0] == "response.incomplete"
    for response in (whole, events[-1][1]["response"]):
        assert (response["status"], response["error"]) == ("incomplete", None)
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert (response["max_output_tokens"], response["usage"]["output_tokens"]) == (requested, requested)
        assert {item["type"]: item["status"] for item in response["output"]} == kinds
    done = [data["item"] for name, data in events if name == "response.output_item.done"]
    assert {item["type"]: item["status"] for item in done} == kinds


async def test_tokens_in_and_out(tmp_path: Path) -> None:
    async with opened(tmp_path, lambda prompt: "ab") as rig:
        params = {"max_tokens": 10, "stop_token_ids": [END], "logprobs": 1, "skip_special_tokens": False, "seed": 7}
        body: dict[str, Any] = {"model": "policy", "token_ids": [1, 2, 3], "sampling_params": params}
        answer = await rig.ask("/inference/v1/generate", body)
        assert answer.pop("request_id")
        made = [*b"ab", END]
        [choice] = answer["choices"]
        assert choice.pop("logprobs") == log_probs_of(made, 3)
        assert choice == {"index": 0, "token_ids": made, "finish_reason": "stop"}
        body = {"input_ids": [1, 2, 3, *made, 9], "sampling_params": {"max_new_tokens": 2}, "return_logprob": True}
        native = await rig.ask(TOKENS, body)
        assert (native["output_ids"], native["text"]) == ([*b"ab"], "ab")
        meta = native["meta_info"]
        assert meta["finish_reason"] == {"type": "length", "length": 2}
        assert meta["output_token_logprobs"] == [[log_prob(7), 97, None], [log_prob(8), 98, None]]
        assert (meta["prompt_tokens"], meta["completion_tokens"], meta["weight_version"]) == (7, 2, "0")
        assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": 2}]
        [sample] = rig.samples()
        assert (sample.turns, sample.status, sample.length) == (2, "truncated", 9)
        [(_, chunk), done] = await rig.ask(TOKENS, {"text": "Hm", "sampling_params": {}, "stream": True})
        assert (chunk["text"], done[1]) == ("ab", "[DONE]")
        assert rig.writer.answered[-1][0] == [*b"Hm"]


@pytest.mark.parametrize(
    ("path", "body", "ending"),
    [
        (CHAT, {"stop": ["lo"]}, "stop"),
        (ANTHROPIC, {"stop_sequences": ["lo"], "max_tokens": 50}, "stop_sequence"),
        (CHAT, {"max_tokens": 3}, "length"),
        (ANTHROPIC, {"max_tokens": 3}, "max_tokens"),
    ],
)
async def test_limits_of_the_client_are_kept(path: str, body: dict[str, Any], ending: str, tmp_path: Path) -> None:
    async with opened(tmp_path, script) as rig:
        answer = await rig.ask(path, {**body, "messages": ASK})
        if path == ANTHROPIC:
            assert answer["stop_sequence"] == ("lo" if "stop_sequences" in body else None)
            said = answer["stop_reason"], answer["content"][0]["text"]
        else:
            [choice] = answer["choices"]
            said = choice["finish_reason"], choice["message"]["content"]
        assert said == (ending, "Hel")
        await rig.post(path, {**body, "messages": [*ASK, {"role": "assistant", "content": "Hel"}, *ASK]})
        [sample] = rig.samples()
        assert sample.turns == 2, "what the client has not seen of the first turn is part of it all the same"


def test_arguments_of_a_call_are_text() -> None:
    assert arguments_text(ToolCall("search", {"a": [1]})) == '{"a":[1]}'
    assert arguments_text(ToolCall("search", "no JSON")) == "no JSON"
