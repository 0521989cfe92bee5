"""Conversations as tokens: what is appended to a turn, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from configs.schema import Config, DataConfig, EnvironmentConfig, RolloutConfig, ToolsConfig, TrainConfig
from models.tiny import CHAT_TEMPLATE
from stages.chat.bridge import as_mapping
from stages.chat.formats import PARSERS, chat_format, load_chat_format, with_stops
from stages.chat.messages import ChatFormat, ChatFormatError, Message, ToolCall, ToolSchema
from stages.chat.tokenizer import Tokenizer, load_tokenizer
from stages.tools.tool import function_schema
from tests.stages.agents.chat_templates import ALPACA, BROKEN, GLM45, LLAMA3, QWEN3, THINKER, Family, make_checkpoint

TINY = Family(CHAT_TEMPLATE, ("<|pad|>", "<|bos|>", "<|eos|>"), ("<|eos|>",), bos="<|bos|>")
PLAIN = ALPACA._replace(template="")
FAMILIES = {"qwen3": QWEN3, "thinker": THINKER, "llama3": LLAMA3, "tiny": TINY, "alpaca": ALPACA}
TOOLS: tuple[ToolSchema, ...] = (
    function_schema("look", "Looks.", {"place": {"type": "string"}, "times": {"type": "integer"}}, ["place"]),
    function_schema("wait", "Waits.", {}, []),
)
QUESTION = Message("user", "Where is it?")


HOMES: list[TemporaryDirectory[str]] = []  # removed at the end of the process


@cache
def checkpoint(family: Family) -> str:
    HOMES.append(TemporaryDirectory(prefix="chat-"))
    return make_checkpoint(Path(HOMES[-1].name), family)


@cache
def loaded(family: Family, parser: str | None = None) -> tuple[ChatFormat, Tokenizer]:
    return load_chat_format(checkpoint(family), parser=parser), load_tokenizer(checkpoint(family))


def shown(family: Family, ids: Sequence[int]) -> str:
    return loaded(family)[1].decode(ids, skip_special_tokens=False)


def asked(family: Family, turn: str, *messages: Message, tools: Sequence[ToolSchema] = ()) -> str:
    """What is put behind a turn of the model."""
    chat, tokenizer = loaded(family)
    ids = chat.start((QUESTION,), tools) + tokenizer.encode(turn)
    return shown(family, chat.append(ids, messages, tools))


NEXT = Message("user", "And now?")
QWEN3_NEXT = "<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"
LLAMA3_NEXT = (
    "<|start_header_id|>user<|end_header_id|>\n\nAnd now?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
)


@pytest.mark.parametrize(
    ("family", "turn", "expected"),
    [
        # ended: what is left of the end; cut off: all of it; ended by another end token: as ended
        *((QWEN3, f"Here.{end}", f"\n{QWEN3_NEXT}") for end in ("<|im_end|>", "<|endoftext|>")),
        (QWEN3, "Here.<|im_end|>\n", QWEN3_NEXT),
        *((QWEN3, turn, f"<|im_end|>\n{QWEN3_NEXT}") for turn in ("Here.", "Here.\n", "")),
        (THINKER, "Hm", f"<|im_end|>\n{QWEN3_NEXT}<think>\n"),
        (LLAMA3, "Here.<|eot_id|>", LLAMA3_NEXT),
        (LLAMA3, "Here.", f"<|eot_id|>{LLAMA3_NEXT}"),
        (TINY, "Here.<|eos|>", "<|bos|>user\nAnd now?<|eos|><|bos|>assistant\n"),
        (ALPACA, "Here.", "\n\n### Instruction:\nAnd now?\n\n### Response:\n"),
        (ALPACA, "Here.\n", "\n### Instruction:\nAnd now?\n\n### Response:\n"),
        (ALPACA, "Here.\n\n", "### Instruction:\nAnd now?\n\n### Response:\n"),
        (PLAIN, "Here.", "And now?"),
        # what ends a turn opens the next message: it stands there once, if it is the token that is wanted
        (GLM45, "\n<think></think>\nHere.<|user|>", "\nAnd now?<|assistant|>"),
        (GLM45, "\n<think></think>\nHere.<|observation|>", "<|user|>\nAnd now?<|assistant|>"),
        (GLM45, "\n<think></think>\nHere.", "<|user|>\nAnd now?<|assistant|>"),
    ],
)
def test_a_turn_is_closed_once(family: Family, turn: str, expected: str) -> None:
    assert asked(family, turn, NEXT) == expected


def test_an_answer_that_holds_the_mark_of_the_bridge() -> None:
    for text in ("XQZ7MARK", "XQZ7MARKQQ XQZ7MARK"):
        bridged = asked(QWEN3, "a<|im_end|>", Message("user", text))
        assert bridged == f"\n{QWEN3_NEXT}".replace("And now?", text)


@pytest.mark.parametrize("words", BROKEN)
def test_templates_that_cannot_be_bridged(words: str) -> None:
    with pytest.raises(ChatFormatError, match=words) as refused:
        load_chat_format(checkpoint(BROKEN[words]))
    if "refuses" not in words:
        assert "--chat-template-path" in str(refused.value)


def test_tools_that_cannot_be_offered() -> None:
    chat, _ = loaded(ALPACA)
    with pytest.raises(ChatFormatError, match=r"no parser reads .* --tool-call-parser"):
        chat.start((QUESTION,), TOOLS)
    with pytest.raises(ChatFormatError, match=r"'hermse' is unknown; did you mean hermes\?"):
        load_chat_format(checkpoint(QWEN3), parser="hermse")


words = st.text(st.characters(codec="utf-8", exclude_characters="<|>"), max_size=12)
turns = st.builds(Message, st.just("assistant"), words.filter(lambda text: text and text.strip() == text))
users = st.lists(st.builds(Message, st.just("user"), words), min_size=1, max_size=2)


STABLE = ("alpaca", "qwen3", "tiny")  # show every turn as it was, and end it with the end token, or with text


@given(st.sampled_from(sorted(FAMILIES)), st.lists(st.tuples(turns, users), max_size=4), st.booleans())
def test_bridged_tokens_are_those_of_the_whole_conversation(
    name: str, rounds: list[tuple[Message, list[Message]]], ended: bool
) -> None:
    family = FAMILIES[name]
    chat, tokenizer = loaded(family)
    messages: list[Message] = [QUESTION]
    ids = chat.start(messages, ())
    for turn, answers in rounds:
        sampled = ids + tokenizer.encode(turn.content)
        if ended and name != "alpaca":
            sampled.append(tokenizer.eos_ids[0])
        ids = sampled + chat.append(sampled, answers, ())
        assert len(ids) > len(sampled)
        messages += [turn, *answers]
    if name in STABLE:
        whole = tokenizer.apply_chat_template([as_mapping(m) for m in messages])
        assert shown(family, ids) == whole
        assert ids == tokenizer.encode(whole)


@given(st.sampled_from([*FAMILIES, "plain"]), st.data())
def test_a_reply_to_any_tokens(name: str, data: st.DataObject) -> None:
    chat, tokenizer = loaded(FAMILIES.get(name, PLAIN))
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 8), max_size=60))
    reply = chat.reply(ids, TOOLS)
    assert reply.message.role == "assistant"


def read(family: Family, text: str, tools: Sequence[ToolSchema] = TOOLS) -> tuple[Message, str]:
    chat, tokenizer = loaded(family)
    reply = chat.reply(tokenizer.encode(text), tools)
    return reply.message, reply.malformed


CALL = '<tool_call>\n{"name": "look", "arguments": {"place": "under </tool_call>", "times": 2}}\n</tool_call>'
WAIT = '<tool_call>{"name": "wait"}</tool_call>'
LOOKED = ToolCall("look", {"place": "under </tool_call>", "times": 2})


@pytest.mark.parametrize(
    ("family", "text", "message"),
    [
        (QWEN3, "Here.\n<|im_end|>", Message("assistant", "Here.\n")),
        (QWEN3, "<think>\nHm.\n</think>\n\nHere.<|im_end|>", Message("assistant", "Here.", "Hm.")),
        (QWEN3, "<think>\n\n</think>\n\nHere.", Message("assistant", "Here.")),
        (QWEN3, "<think>\nHm", Message("assistant", "", "Hm")),
        (QWEN3, "a <think> b </think> c", Message("assistant", "a <think> b </think> c")),
        (QWEN3, "Hm.</think>Here.", Message("assistant", "Here.", "Hm.")),
        (THINKER, "Hm.\n</think>\n\nHere.<|im_end|>", Message("assistant", "Here.", "Hm.")),
        (THINKER, "Hm.", Message("assistant", "", "Hm.")),
        (QWEN3, f"I look.\n{CALL}<|im_end|>", Message("assistant", "I look.", tool_calls=(LOOKED,))),
        (QWEN3, f"{CALL}\n{WAIT}", Message("assistant", tool_calls=(LOOKED, ToolCall("wait", {})))),
        (QWEN3, f"<think>I{CALL}<|im_end|>", Message("assistant", "", "I", (LOOKED,))),
        (QWEN3, f"<think>I{CALL}", Message("assistant", "", f"I{CALL}")),
        (PLAIN, f"So {WAIT}</s>", Message("assistant", "So", tool_calls=(ToolCall("wait", {}),))),
    ],
)
def test_what_a_turn_says(family: Family, text: str, message: Message) -> None:
    assert read(family, text) == (message, "")


@pytest.mark.parametrize(
    ("text", "words", "calls"),
    [
        ('<tool_call>{"name": "luk", "arguments": {}}</tool_call>', "no tool 'luk'. Tools: look, wait", 0),
        (f"{WAIT}<tool_call>look</tool_call>", "is a JSON object", 1),
        (f'{WAIT}<tool_call>{{"name": "lo', "not closed: end it with </tool_call>", 1),
        ('<tool_call>{"name": "wait", "arguments": [1]}</tool_call>', "must be a JSON object", 0),
        ('<tool_call>{"name": "look", "arguments": {"place": "\\ud800"}}</tool_call>', "not valid JSON", 0),
    ],
)
def test_malformed_calls_are_named_and_stay_in_the_content(text: str, words: str, calls: int) -> None:
    message, malformed = read(QWEN3, text)
    assert words in malformed
    assert len(message.tool_calls) == calls
    assert message.content == text.removeprefix(WAIT)


def test_the_page_of_the_documentation() -> None:
    page = (Path(__file__).parents[3] / "docs" / "chat_formats.md").read_text()
    _, tokenizer = loaded(QWEN3)
    turn = tokenizer.encode('<think>\nHm.\n</think>\n\n<tool_call>{"name": "look"}</tool_call><|im_end|>')
    scope: dict[str, Any] = {"checkpoint": checkpoint(QWEN3), "sample": lambda ids: turn}
    (block,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    exec(compile(block, "docs/chat_formats.md", "exec"), scope)
    assert scope["reply"].message == Message("assistant", "", "Hm.", (ToolCall("look", {}),))
    answered = QWEN3_NEXT.replace("And now?", "<tool_response>\nUnder the table.\n</tool_response>")
    assert shown(QWEN3, scope["ids"]).endswith(f"<|im_end|>\n{answered}")
    with pytest.raises(ChatFormatError) as refused:
        load_chat_format(checkpoint(BROKEN["stand before|stands before"]))
    assert str(refused.value) in page
    (names, _) = get_args(get_type_hints(ToolsConfig)["tool_call_parser"])
    assert get_args(names) == tuple(PARSERS), "each can be named"
    assert all(f"`{name}`" in page for name in PARSERS)


def test_settings_of_a_run() -> None:
    config = Config(
        train=TrainConfig(hf_checkpoint=checkpoint(QWEN3)),
        tools=ToolsConfig(tool_call_parser="pythonic"),
        data=DataConfig(apply_chat_template_kwargs={"enable_thinking": False}),
    )
    chat, (_, tokenizer) = chat_format(config), loaded(QWEN3)
    ids = chat.start((QUESTION,), ())
    for prompt in (ids, chat.append(ids, (NEXT,), ())):
        assert shown(QWEN3, prompt).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert chat.reply(tokenizer.encode("[wait()]"), TOOLS).message.tool_calls == (ToolCall("wait", {}),)


def test_what_ends_a_turn_stops_the_sampling_of_a_run_with_environments() -> None:
    rollout = RolloutConfig(rollout_stop=("!",), rollout_stop_token_ids=(7,))
    for family, stops in ((LLAMA3, (("!",), (7, 259))), (PLAIN, (("!", "</tool_call>"), (7,)))):
        config = Config(train=TrainConfig(hf_checkpoint=checkpoint(family)), rollout=rollout)
        assert with_stops(config) is config, "without, prompts are no conversations"
        said = with_stops(structs.replace(config, environment=(EnvironmentConfig(name="any"),))).rollout
        assert (said.rollout_stop, said.rollout_stop_token_ids) == stops
