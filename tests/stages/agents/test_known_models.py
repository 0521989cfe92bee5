"""The package `renderers` beside the template's bridge: two writers of the same markup that share no code."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.agents.chat_formats.errors import ChatFormatError
from stages.agents.chat_formats.known_models import BridgedByPackage, KnownModel, known_model
from stages.agents.chat_formats.load import chat_format, load_chat_format
from stages.agents.messages import Message, ToolCall
from stages.data.tokenizer import load_tokenizer
from tests.stages.agents.chat_templates import LLAMA3, QWEN3
from tests.stages.agents.test_chat_format import NEXT, QUESTION, TOOLS, checkpoint, loaded

pytest.importorskip("renderers", reason="the extra `renderers` is not installed: pip install renderers httpx")

QWEN = QWEN3._replace(plain=(*QWEN3.plain, "<tool_response>", "</tool_response>"))
LLAMA = LLAMA3._replace(special=(*LLAMA3.special, "<|python_tag|>", "<|eom_id|>"))
MODELS = {"Qwen/Qwen3-0.6B": QWEN, "meta-llama/Llama-3.2-1B-Instruct": LLAMA}
ANSWERS = (
    Message("tool", "No.", tool_call_id="a", name="look"),
    Message("tool", "Yes.", tool_call_id="b", name="wait"),
)


@cache
def known(name: str) -> KnownModel:
    found = known_model(name, load_tokenizer(checkpoint(MODELS[name])), {})
    assert found is not None
    return found


@settings(deadline=None)
@given(
    st.sampled_from(sorted(MODELS)),
    st.sampled_from(["Here.", "<think>\nHm.\n</think>\n\nHere.", "a\nb"]),
    st.booleans(),
    st.lists(st.text(st.characters(codec="ascii", exclude_characters="<|>")).map(str.strip), min_size=1, max_size=2),
    st.booleans(),
)
def test_both_write_the_same(name: str, turn: str, ended: bool, texts: list[str], tools: bool) -> None:
    own, tokenizer = loaded(MODELS[name])
    ids = own.start((QUESTION,), ()) + tokenizer.encode(turn) + (list(tokenizer.eos_ids[:1]) if ended else [])
    role = "tool" if tools else "user"
    messages = [Message(role, text, name="look" if tools else "") for text in texts]
    assert known(name).bridge(ids, messages, TOOLS) == own.append(ids, messages, TOOLS)


def test_a_turn_cut_off_in_its_reasoning_is_closed_by_the_package() -> None:
    own, tokenizer = loaded(QWEN)
    chat = chat_format(tokenizer, checkpoint="/hub/models--Qwen--Qwen3-0.6B/snapshots/0a1b")
    assert isinstance(chat, BridgedByPackage)
    ids = chat.start((QUESTION,), TOOLS)
    assert ids == own.start((QUESTION,), TOOLS)
    ids += tokenizer.encode("<think>\nHm")
    assert chat.append(ids, (NEXT,), TOOLS) == tokenizer.encode("</think>") + own.append(ids, (NEXT,), TOOLS)


def test_what_the_package_does_not_answer_is_left_to_the_template() -> None:
    own, tokenizer = loaded(QWEN)
    chat = chat_format(tokenizer, checkpoint="Qwen/Qwen3-0.6B")
    ids = chat.start((QUESTION,), ()) + tokenizer.encode("<think>\nHm<|im_end|>")  # ended, but not its reasoning
    assert known("Qwen/Qwen3-0.6B").bridge(ids, (NEXT,), ()) is None
    assert chat.append(ids, (NEXT,), ()) == own.append(ids, (NEXT,), ())
    assert chat.reply(ids[-5:], TOOLS) == own.reply(ids[-5:], TOOLS)


def test_a_known_model_without_a_template() -> None:
    tokenizer = load_tokenizer(checkpoint(QWEN._replace(template="")))
    chat = chat_format(tokenizer, checkpoint="Qwen/Qwen3-0.6B")
    assert isinstance(chat, KnownModel)
    assert chat.start((QUESTION,), ()) == loaded(QWEN)[0].start((QUESTION,), ())
    reply = chat.reply(
        tokenizer.encode('<think>\nHm\n</think>\n\n<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>'), TOOLS
    )
    assert reply.message == Message("assistant", "", "Hm", (ToolCall("wait", {}),))
    wrong = chat.reply(tokenizer.encode("<tool_call>\n{\n</tool_call><|im_end|>"), TOOLS)
    assert "invalid json" in wrong.malformed
    assert wrong.message.tool_calls == ()


def test_names_that_are_not_known_and_tokenizers_that_do_not_fit() -> None:
    tokenizer = load_tokenizer(checkpoint(QWEN))
    assert known_model("my/finetune", tokenizer, {}) is None
    assert not isinstance(load_chat_format(checkpoint(QWEN)), BridgedByPackage)
    with pytest.raises(ChatFormatError, match="knows 'openai/gpt-oss-20b' as gpt-oss, but cannot be used"):
        known_model("openai/gpt-oss-20b", tokenizer, {"no_such_argument": 1})
