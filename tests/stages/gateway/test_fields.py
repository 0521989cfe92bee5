"""What becomes of every field of the three dialects: honoured, without effect, or refused with its name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from models.engines.client import EngineClient
from models.engines.protocol import GenerateRequest
from tests.stages.gateway.gateway_rig import ANTHROPIC, BODIES, CALL, CHAT, PARAMETERS, RESPONSES, Rig, opened

# Kept to by SGLang alone, and without tools.
FORM = {"type": "json_schema", "schema": PARAMETERS}
FORMS: dict[str, dict[str, Any]] = {
    CHAT: {
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": PARAMETERS, "strict": True}}
    },
    RESPONSES: {"text.format": {**FORM, "name": "a", "strict": True}},
    ANTHROPIC: {"output_config.format": FORM, "output_format": FORM},
}
EACH: dict[str, Any] = {"model": "m", "tools": [], "stream": True}
OTHER = [{"role": "user", "content": "Ho"}]
HONOURED: dict[str, dict[str, Any]] = {
    CHAT: {
        **(EACH | {"messages": OTHER, "tool_choice": "none", "parallel_tool_calls": False, "stop": "add"}),
        **{"max_tokens": 3, "max_completion_tokens": 3, "stream_options": {"include_usage": True}},
        **{"logprobs": True, "return_token_ids": True},
    },
    RESPONSES: {
        **(EACH | {"input": "Ho", "instructions": "Be brief.", "max_output_tokens": 3}),
        **{"tool_choice": "none", "parallel_tool_calls": False},
    },
    ANTHROPIC: {
        **(EACH | {"messages": OTHER, "system": "Be brief.", "max_tokens": 3, "stop_sequences": ["add"]}),
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    },
}
SAMPLING = {"temperature": 0.5, "top_p": 0.5}
PENALTIES = {"presence_penalty": 1.0, "frequency_penalty": 1.0, "repetition_penalty": 1.1}
KEPT = {"metadata": {"a": "b"}, "service_tier": "auto"}
OPENAI = {
    **{"store": True, "user": "u", "safety_identifier": "u"},
    **{"prompt_cache_key": "k", "prompt_cache_retention": "24h"},
}
NO_EFFECT: dict[str, dict[str, Any]] = {
    CHAT: {
        **(SAMPLING | PENALTIES | KEPT | OPENAI),
        **{"top_k": 5, "min_p": 0.1, "seed": 1, "reasoning_effort": "low", "verbosity": "low"},
        "prediction": {"type": "content", "content": "a"},
    },
    RESPONSES: {
        **(SAMPLING | KEPT | OPENAI),
        **{"reasoning": {"effort": "low"}, "include": ["reasoning.encrypted_content"], "truncation": "auto"},
        **{"max_tool_calls": 1, "stream_options": {"include_obfuscation": False}, "text.verbosity": "low"},
        "context_management": [{"type": "compaction", "compact_threshold": 1000}],
    },
    ANTHROPIC: {
        **(SAMPLING | KEPT),
        **{"top_k": 5, "inference_geo": "us", "cache_control": {"type": "ephemeral"}},
        **{"thinking": {"type": "enabled", "budget_tokens": 1024}, "context_management": {"edits": []}},
        "output_config.effort": "low",
    },
}
REFUSED: dict[str, dict[str, Any]] = {
    CHAT: {
        **{"n": 2, "audio": {"voice": "a"}, "modalities": ["text", "audio"], "logit_bias": {"5": 1}, "top_logprobs": 2},
        **{"functions": [{"name": "add"}], "function_call": "auto", "web_search_options": {"user_location": {}}},
        **{"prompt_logprobs": 1, "echo": True, "min_tokens": 2, "ignore_eos": True, "stop_token_ids": [1]},
        **{"chat_template": "{{ 1 }}", "chat_template_kwargs": {"a": 1}, "continue_final_message": True},
        **{"add_generation_prompt": False, "guided_json": PARAMETERS, "guided_regex": "a", "guided_choice": ["a"]},
        **{"guided_grammar": "a", "structured_outputs": {"regex": "a"}, "regex": "a", "ebnf": "a", "stop_regex": "a"},
        **{"bad_words": ["a"], "logits_processors": ["a"], "input_ids": [1], "lora_path": "a"},
        **{"tool_choice": "required", "response_format": {"type": "grammar"}},
    },
    RESPONSES: {
        **{"previous_response_id": "resp_1", "background": True, "conversation": "c", "prompt": {"id": "p"}},
        **{"tool_choice": {"type": "function", "name": "add"}, "text.format": {"type": "grammar"}, "top_logprobs": 2},
        "include": ["message.output_text.logprobs"],
    },
    ANTHROPIC: {
        **{"container": "c", "mcp_servers": [{"type": "url"}]},
        **{"tool_choice": {"type": "any"}, "output_config.format": {"type": "grammar"}},
    },
}


def body(path: str, field: str, value: Any) -> dict[str, Any]:
    """The request with one field more."""
    outer, _, inner = field.partition(".")
    return {**BODIES[path], outer: {inner: value} if inner else value}


async def seen(rig: Rig, path: str, sent: dict[str, Any]) -> tuple[Any, ...]:
    """The engine's request and the client's answer, without what differs in every answer."""
    before = len(rig.writer.planned)
    answer = await rig.ask(path, sent)
    differs = r"[0-9a-f]{24}|call_[0-9a-f]{16}_\d+|\"(created(_at)?|cached_tokens|(cache_read_)?input_tokens)\":\d+"
    return *rig.writer.planned[before:], re.sub(differs, "", msgspec.json.encode(answer).decode())


@pytest.mark.parametrize("path", BODIES)
async def test_a_field_is_honoured_without_effect_or_refused(path: str, tmp_path: Path) -> None:
    async with opened(tmp_path, lambda prompt: f"I add.{CALL}{CALL}") as rig:
        plain = await seen(rig, path, BODIES[path])
        for field in HONOURED[path] | NO_EFFECT[path] | REFUSED[path]:
            if field in NO_EFFECT[path]:
                assert await seen(rig, path, body(path, field, NO_EFFECT[path][field])) == plain, field
            if field in HONOURED[path]:
                more = {"stream": True} if field == "stream_options" else {}
                before = await seen(rig, path, {**BODIES[path], **more})
                assert await seen(rig, path, {**body(path, field, HONOURED[path][field]), **more}) != before, field
            if field in REFUSED[path]:
                turns = rig.place.session.turns
                status, answer = await rig.post(path, body(path, field, REFUSED[path][field]))
                assert (status, rig.place.session.turns) == (400, turns), (field, answer)
                assert str(answer["error"]["message"]).startswith(field), answer
                status, answer = await rig.post(path, body(path, field, None))
                assert status == 200 or "." in field, (field, answer)


@pytest.mark.parametrize(("path", "field"), [(path, field) for path, fields in FORMS.items() for field in fields])
async def test_the_form_of_an_answer(path: str, field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang gets it, and what it makes is not trained; other engines' runs refuse the field."""
    schemas: list[str | None] = []
    original = EngineClient.generate

    async def generate(client: EngineClient, request: GenerateRequest, **options: Any) -> Any:
        assert not isinstance(request.sampling_params, list)
        schemas.append(request.sampling_params.json_schema)
        params = msgspec.structs.replace(request.sampling_params, json_schema=None)
        return await original(client, msgspec.structs.replace(request, sampling_params=params), **options)

    monkeypatch.setattr(EngineClient, "generate", generate)
    sent = body(path, field, FORMS[path][field])
    async with opened(tmp_path, lambda prompt: '{"a": 1}') as rig:
        requests = rig.gateway._answers.requests
        for name in ("embedded", "sglang"):
            engine = msgspec.structs.replace(requests.config.engine, engine=name)
            requests.config = msgspec.structs.replace(requests.config, engine=engine)
            status, answer = await rig.post(path, sent)
            assert (status, f"{field} and tools exclude" in answer["error"]["message"]) == (400, True), answer
            status, answer = await rig.post(path, {**sent, "tools": []})
            if name == "embedded":
                assert (status, answer["error"]["message"].startswith(f"{field}: ")) == (400, True), answer
        assert status == 200, answer
        await rig.post(path, {**BODIES[path], "tools": []})
        constrained, free = rig.place.session.samples()
    assert [None if schema is None else msgspec.json.decode(schema) for schema in schemas] == [PARAMETERS, None]
    assert (bool(constrained.loss_mask.any()), bool(free.loss_mask.any())) == (False, True)


def test_the_documentation_has_every_field() -> None:
    page = (Path(__file__).parents[3] / "docs" / "gateway.md").read_text()
    for path in BODIES:
        [row] = [line for line in page.splitlines() if line.startswith(f"| fields of `{path}` |")]
        cells = [set(re.findall(r"`([^`]+)`", cell)) for cell in row.split("|")[2:5]]
        refused = set(REFUSED[path]) - set(FORMS[path]) - {"tool_choice", "include"}
        assert cells == [{*HONOURED[path], *FORMS[path]}, set(NO_EFFECT[path]), refused]
