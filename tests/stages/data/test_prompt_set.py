"""Prompt sets: what is kept, skipped and reported, and what a prompt looks like."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.schema.data import DataConfig
from stages.data.prompt_set import PromptSet
from stages.errors import DataError, EmptyDataError, RowError


def byte_ids(text: str) -> list[int]:
    return list(text.encode())


def render(messages: Sequence[Any], tools: Sequence[Any]) -> str:
    if any(message["role"] == "martian" for message in messages):
        raise ValueError("roles must be of this world")
    head = f"[{len(tools)} tools]" if tools else ""
    return head + "".join(f"<{message['role']}>{message['content']}" for message in messages) + "<assistant>"


def write(path: Path, rows: Sequence[object]) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


GOOD = [{"input": f"prompt {i}", "label": i} for i in range(5)]


def test_bad_rows_are_skipped_counted_and_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [GOOD[0], "{broken", {"text": "x"}, GOOD[1], {"input": ""}, {"input": 7}])
    prompts = PromptSet([path], DataConfig(label_key="label"), byte_ids)
    assert [prompts.get(index).prompt for index in range(len(prompts))] == ["prompt 0", "prompt 1"]
    report = prompts.report
    assert (report.rows, report.kept) == (6, 2)
    assert report.skipped == {"bad json": 1, "missing key": 1, "empty prompt": 1, "wrong type": 1}
    assert [bad.line for bad in report.bad_rows] == [2, 3, 5, 6]
    assert "a.jsonl:3: no key 'input'" in "\n".join(report.lines())
    assert report.lines()[0] == f"{path}: 2 of 6 rows usable"


def test_the_list_of_bad_rows_is_bounded_but_not_their_count(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [GOOD[0], *["{"] * 500])
    report = PromptSet([path], DataConfig(), byte_ids).report
    assert report.skipped == {"bad json": 500}
    assert len(report.bad_rows) == 20


def test_strict_data_names_file_line_reason_and_cure(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [GOOD[0], {"inptu": "x"}])
    with pytest.raises(RowError, match=r"a\.jsonl:2: no key 'input'.*correct the row, or leave strict_data off"):
        PromptSet([path], DataConfig(strict_data=True), byte_ids)


def test_long_prompts_are_filtered_also_when_strict(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"input": "x" * n} for n in (3, 11, 10, 12)])
    prompts = PromptSet([path], DataConfig(rollout_max_prompt_len=10, strict_data=True), byte_ids)
    assert [len(prompts.get(index).prompt_ids) for index in range(len(prompts))] == [3, 10]
    assert prompts.report.skipped == {"too long": 2}
    assert prompts.report.longest_tokens == 10


def test_a_prompt_of_megabytes_is_refused_by_its_beginning(tmp_path: Path) -> None:
    """50 MB of digits took a tokenizer minutes and 8 GB."""
    seen: list[int] = []

    def counted(text: str) -> list[int]:
        seen.append(len(text))
        return byte_ids(text)

    rows = [{"input": "x"}, {"input": "1" * 2_000_000}, {"input": "y" * 90}]
    report = PromptSet([write(tmp_path / "a.jsonl", rows)], DataConfig(rollout_max_prompt_len=100), counted).report
    assert report.skipped == {"too long": 1}
    assert "of 2000000 characters are 808 tokens, above the limit of 100" in report.bad_rows[0].reason
    assert max(seen) == 808


def test_a_row_that_fits_into_no_message_is_skipped(tmp_path: Path) -> None:
    rows = [{"input": "x", "label": "1"}, {"input": "x", "label": "1" * (17 << 20)}]
    prompts = PromptSet([write(tmp_path / "a.jsonl", rows)], DataConfig(label_key="label"), byte_ids)
    assert len(prompts) == 1
    assert prompts.report.skipped == {"too large": 1}


def test_the_runs_limit_holds_where_none_is_configured(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"input": "x" * n} for n in (3, 11)])
    assert len(PromptSet([path], DataConfig(), byte_ids, max_prompt_tokens=10)) == 1
    assert len(PromptSet([path], DataConfig(rollout_max_prompt_len=11), byte_ids, max_prompt_tokens=10)) == 1


def test_without_a_limit_prompts_are_tokenised_when_asked_for_and_once(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", GOOD)
    calls: list[str] = []

    def counting(text: str) -> list[int]:
        calls.append(text)
        return byte_ids(text)

    prompts = PromptSet([path], DataConfig(), counting)
    assert calls == ["prompt 0"]  # one is tried, so that a broken template shows at the start
    for _ in range(3):
        prompts.get(3)
    assert calls == ["prompt 0", "prompt 3"]


def test_prompt_ids_are_read_only_int32(tmp_path: Path) -> None:
    prompts = PromptSet([write(tmp_path / "a.jsonl", GOOD)], DataConfig(), byte_ids)
    ids = prompts.get(1).prompt_ids
    assert ids.dtype == np.int32
    assert ids.tolist() == byte_ids("prompt 1")
    with pytest.raises(ValueError, match="read-only"):
        ids[0] = 1


def test_several_sources_keep_their_order_and_counts(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", GOOD)
    second = write(tmp_path / "b.jsonl", [{"input": "other"}, "{"])
    prompts = PromptSet([f"{first}@[3:]", second], DataConfig(), byte_ids)
    assert [prompts.get(index).prompt for index in range(3)] == ["prompt 3", "prompt 4", "other"]
    assert [(source.rows, source.kept) for source in prompts.report.sources] == [(2, 2), (2, 1)]


def test_messages_are_rendered_and_text_passes_through(tmp_path: Path) -> None:
    rows = [{"input": [{"role": "user", "content": "hi"}]}, {"input": "plain"}]
    path = write(tmp_path / "a.jsonl", rows)
    prompts = PromptSet([path], DataConfig(), lambda text: [1, *byte_ids(text)], render, tokenize_rendered=byte_ids)
    assert prompts.get(0).prompt == "<user>hi<assistant>"
    assert prompts.get(0).prompt_ids.tolist() == byte_ids("<user>hi<assistant>")
    assert prompts.get(1).prompt == "plain"
    assert prompts.get(1).prompt_ids.tolist() == [1, *byte_ids("plain")]


def test_apply_chat_template_wraps_text_as_one_user_turn(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"input": "plain"}])
    prompts = PromptSet([path], DataConfig(apply_chat_template=True), byte_ids, render)
    assert prompts.get(0).prompt == "<user>plain<assistant>"


def test_tools_of_the_run_come_before_those_of_the_row(tmp_path: Path) -> None:
    rows = [{"input": "a", "tools": [{"name": "row"}]}, {"input": "b"}]
    path = write(tmp_path / "a.jsonl", rows)
    run_tools = [{"name": "run"}]
    prompts = PromptSet([path], DataConfig(apply_chat_template=True), byte_ids, render, tools=run_tools)
    assert json.loads(prompts.get(0).tools) == [{"name": "run"}, {"name": "row"}]
    assert prompts.get(0).prompt.startswith("[2 tools]")
    assert json.loads(prompts.get(1).tools) == [{"name": "run"}]


def test_template_without_tokenizer_support_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", GOOD)
    with pytest.raises(DataError, match="has no chat template; give one with --chat-template-path"):
        PromptSet([path], DataConfig(apply_chat_template=True), byte_ids)


def test_messages_without_a_template_are_bad_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"input": [{"role": "user", "content": "hi"}]}])
    with pytest.raises(EmptyDataError, match=r"skipped \(template: 1\).*no chat template"):
        PromptSet([path], DataConfig(), byte_ids)


def test_a_template_that_refuses_one_row(tmp_path: Path) -> None:
    rows = [{"input": [{"role": role, "content": "x"}]} for role in ("martian", "user", "martian")]
    path = write(tmp_path / "a.jsonl", rows)
    prompts = PromptSet([path], DataConfig(), byte_ids, render)
    assert prompts.report.skipped == {"template": 1}  # found while looking for the first usable prompt
    assert len(prompts) == 2
    with pytest.raises(
        RowError, match=r"a\.jsonl:3: the chat template refuses .*ValueError: roles must be of this world"
    ):
        prompts.get(1)
    limited = PromptSet([path], DataConfig(rollout_max_prompt_len=100), byte_ids, render)
    assert limited.report.skipped == {"template": 2}


def test_nothing_usable(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"question": "x"}] * 3)
    with pytest.raises(EmptyDataError, match=r"all 3 rows were skipped \(missing key: 3\); first: .*:1: .*question"):
        PromptSet([path], DataConfig(), byte_ids)


def test_no_files_at_all() -> None:
    with pytest.raises(EmptyDataError, match="prompt_data is empty: name at least one"):
        PromptSet([], DataConfig(), byte_ids)


def test_labels_may_be_missing_in_some_rows_but_not_in_all(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [GOOD[1], {"input": "no label"}])
    report = PromptSet([path], DataConfig(label_key="label"), byte_ids).report
    assert (report.unlabelled, report.labels) == (1, ["1"])
    with pytest.raises(DataError, match=r"none of the 2 usable rows has a label; .*did you mean 'label'"):
        PromptSet([path], DataConfig(label_key="labels"), byte_ids)


def test_grader_names_of_rows_are_reported(tmp_path: Path) -> None:
    rows = [{"input": "a", "metadata": {"rm_type": "gsm8k"}}, {"input": "b", "metadata": {"rm_type": "exakt"}}] * 2
    report = PromptSet([write(tmp_path / "a.jsonl", rows)], DataConfig(), byte_ids).report
    assert report.rm_types == {"gsm8k": 2, "exakt": 2}


def test_supervised_labels_are_tokenised(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"input": "q", "label": "answer"}, {"input": "no label"}])
    config = DataConfig(label_key="label")
    prompts = PromptSet([path], config, byte_ids, tokenize_labels=True)
    assert prompts.get(0).label_ids.tolist() == byte_ids("answer")
    assert prompts.report.skipped == {"missing key": 1}
    assert len(PromptSet([path], config, byte_ids).get(0).label_ids) == 0


def test_fingerprint_tells_data_apart(tmp_path: Path) -> None:
    def fingerprint(rows: Sequence[object], name: str = "a.jsonl") -> str:
        return PromptSet([write(tmp_path / name, rows)], DataConfig(label_key="label"), byte_ids).fingerprint

    same = fingerprint(GOOD)
    assert fingerprint([*GOOD, "{not a row"], "b.jsonl") == same  # neither the name nor skipped rows matter
    assert fingerprint([{**GOOD[0], "label": 9}, *GOOD[1:]]) != same
    assert fingerprint(GOOD[1:]) != same
    assert fingerprint(GOOD[::-1]) != same
