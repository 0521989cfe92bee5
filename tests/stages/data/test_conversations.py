"""Conversations as demonstrations: what is learned of a chat that a real template renders."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from stages.chat.tokenizer import Tokenizer, load_tokenizer
from stages.data.prepare import PreparedPrompt, demonstrated
from stages.data.prompt_set import load_train_prompts
from stages.data.rows import BadValue
from stages.errors import EmptyDataError
from stages.prompts.prompt_sources import demonstration
from tests.stages.agents import chat_templates
from tests.stages.agents.chat_templates import make_checkpoint
from tests.stages.stage_rig import make_config, numbers

ASK, ADD = {"role": "user", "content": "1+1?"}, {"role": "user", "content": "and 3?"}
TWO, FIVE = {"role": "assistant", "content": "two"}, {"role": "assistant", "content": "five"}
SYSTEM = {"role": "system", "content": "be brief"}


def prepared(
    tmp_path: Path, family: str, *rows: Sequence[Any], context: int | None = None, **settings: Any
) -> tuple[list[PreparedPrompt], Tokenizer]:
    checkpoint = make_checkpoint(tmp_path / family, getattr(chat_templates, family))
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    data = {"prompt_data": (str(path),), "input_key": "messages", **settings}
    train = {"hf_checkpoint": checkpoint, "loss_type": "sft_loss"}
    config = make_config(train=train, data=data, rollout={"rollout_max_context_len": context})
    tokenizer = load_tokenizer(checkpoint, None)
    prompts = load_train_prompts(config, tokenizer)
    return [prompts.get(index) for index in range(len(prompts))], tokenizer


def learned(prompt: PreparedPrompt, tokenizer: Tokenizer) -> list[str]:
    """The text of each run of trained tokens, as the sample carries it."""
    group = prompt.group(0, 0, 1, 0)
    (sample,) = demonstration(group, prompt, 0, eos_id=tokenizer.eos_ids[0], encode=tokenizer.encode).samples
    assert sample.fault() is None
    ids, mask = numbers(sample.token_ids), numbers(sample.loss_mask)
    runs: list[list[int]] = []
    for place, (id, trained) in enumerate(zip(ids, mask, strict=True)):
        if trained and (not place or not mask[place - 1]):
            runs.append([])
        if trained:
            runs[-1].append(id)
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs]


TOOL_TURN = [
    {"role": "assistant", "content": "", "tool_calls": [
        {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]},
    {"role": "tool", "content": "2", "tool_call_id": "abcdefghi", "name": "add"},
]  # fmt: skip
THOUGHT = {"role": "assistant", "content": "six", "reasoning_content": "hm"}

# family -> what is learned of two answers; of a call, an answer, and an answer with reasoning
LEARNED = {
    "QWEN3": (
        ["two<|im_end|>", "five<|im_end|>"],
        ['<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>', "two<|im_end|>",
         "<think>\nhm\n</think>\n\nsix<|im_end|>"],
    ),
    "LLAMA3": (
        ["two<|eot_id|>", "five<|eot_id|>"],
        ['{"name": "add", "parameters": {"a": 1}}<|eot_id|>', "two<|eot_id|>", "six<|eot_id|>"],
    ),
    "GLM45": (  # the next role's token ends a turn
        ["\n<think></think>\ntwo<|user|>", "\n<think></think>\nfive<|endoftext|>"],
        ["\n<think></think>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
         "<|observation|>", "\n<think></think>\ntwo<|user|>", "\n<think>hm</think>\nsix<|endoftext|>"],
    ),
    "MISTRAL": (
        [" two</s>", " five</s>"],
        ['[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}]</s>', " two</s>", " six</s>"],
    ),
    "HARMONY": (  # refuses an answer to a call that is not there
        ["<|channel|>final<|message|>two<|end|>", "<|channel|>final<|message|>five<|return|>"],
        [' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>',
         "<|channel|>final<|message|>two<|end|>",
         "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>six<|return|>"],
    ),
    "ALPACA": (["two", "five</s>"], ["", "two", "six</s>"]),  # writes no calls, and no token between turns
}  # fmt: skip


@pytest.mark.parametrize("family", LEARNED)
def test_all_that_the_assistant_says_is_learned_and_nothing_else(tmp_path: Path, family: str) -> None:
    plain, tools = [SYSTEM, ASK, TWO, ADD, FIVE], [ASK, *TOOL_TURN, TWO, ADD, THOUGHT]
    (answers, calls), tokenizer = prepared(tmp_path, family, plain, tools)
    wanted = LEARNED[family]
    assert learned(answers, tokenizer) == wanted[0]
    assert learned(calls, tokenizer) == [text for text in wanted[1] if text]
    assert answers.prompt == tokenizer.apply_chat_template([SYSTEM, ASK]), "as an engine would be asked"
    whole = tokenizer.apply_chat_template(plain, add_generation_prompt=False)
    assert whole.startswith(answers.prompt + (answers.label or ""))


def test_messages_that_a_row_leaves_out_are_context(tmp_path: Path) -> None:
    """So is what comes after the last answer."""
    (one,), tokenizer = prepared(tmp_path, "QWEN3", [ASK, TWO | {"step_loss_mask": 0}, ADD, FIVE, ASK])
    assert learned(one, tokenizer) == ["five<|im_end|>"]
    assert "two<|im_end|>" in one.prompt


def test_spans_of_the_row_itself_are_replaced_and_its_other_metadata_stays(tmp_path: Path) -> None:
    (one,), _ = prepared(tmp_path, "QWEN3", [ASK, TWO, ADD, FIVE], metadata_key="meta")
    start, end = json.loads(one.metadata)["tool_spans"][0]
    assert (one.label or "")[start:end] == "\n<|im_start|>user\nand 3?<|im_end|>\n<|im_start|>assistant\n"


def test_rows_with_nothing_to_learn_or_too_long_are_skipped(tmp_path: Path) -> None:
    with pytest.raises(EmptyDataError, match="no label None and no assistant message in 'messages'"):
        prepared(tmp_path, "QWEN3", [ASK], [ASK, TWO | {"step_loss_mask": 0}])
    long = TWO | {"content": "x" * 100}
    (one,), _ = prepared(tmp_path, "QWEN3", [ASK, TWO], [ASK, long], context=120)
    assert "two" in (one.label or "")
    with pytest.raises(EmptyDataError, match="prompt and answer have 124 tokens, above 120"):
        prepared(tmp_path, "QWEN3", [ASK, long], context=120)


def test_a_template_that_hides_where_an_answer_ends_is_refused() -> None:
    def render(messages: Sequence[Any], _: bool) -> str:
        return "".join(str(len(messages)) + one["content"][::-1] for one in messages)

    with pytest.raises(BadValue, match="renders message 2 in a way that does not show"):
        demonstrated([ASK, TWO, ADD], render, lambda _: "")
