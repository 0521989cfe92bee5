"""Rows: what becomes a prompt, and what is said of a row that does not."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.data.rows import BadValue, RowKeys, label_text, parse_row

KEYS = RowKeys("input", "label", "metadata", "tools")

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("42", "42"),
        (" 42 ", " 42 "),
        (42, "42"),
        (2.5, "2.5"),
        (3.0, "3.0"),
        (True, "true"),
        (None, None),
        (10**30, str(10**30)),
        (["a", 1], '["a",1]'),
        ({"x": None}, '{"x":null}'),
    ],
)
def test_labels_become_text(value: object, text: str | None) -> None:
    assert label_text(value) == text


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_label_that_is_no_number(value: float) -> None:
    with pytest.raises(BadValue, match="not a number that can be compared"):
        label_text(value)


def test_a_full_row() -> None:
    row = parse_row(
        {
            "input": [{"role": "user", "content": "hi"}],
            "label": 4,
            "metadata": {"rm_type": "gsm8k", "n": 1},
            "tools": [{"type": "function"}],
        },
        KEYS,
    )
    assert row.prompt == [{"role": "user", "content": "hi"}]
    assert (row.label, row.rm_type) == ("4", "gsm8k")
    assert json.loads(row.metadata) == {"rm_type": "gsm8k", "n": 1}
    assert json.loads(row.tools) == [{"type": "function"}]


def test_json_text_is_accepted_for_metadata_and_tools() -> None:
    row = parse_row({"input": "p", "metadata": '{"a": 1}', "tools": '[{"name": "f"}]'}, KEYS)
    assert (json.loads(row.metadata), json.loads(row.tools)) == ({"a": 1}, [{"name": "f"}])


def test_optional_fields_have_defaults() -> None:
    row = parse_row({"input": "p", "metadata": None, "tools": None}, KEYS)
    assert (row.prompt, row.label, row.metadata, row.tools) == ("p", None, "{}", "[]")


@pytest.mark.parametrize(
    ("row", "kind", "words"),
    [
        ([], "wrong type", "the row is a list, not an object"),
        (None, "wrong type", "the row is null"),
        ({}, "missing key", "no key 'input' .* keys here: none"),
        ({"inputs": "p", "x": 1}, "missing key", "keys here: inputs, x; did you mean 'inputs'"),
        ({"input": None}, "missing key", "no key 'input' \\(or it is null\\)"),
        ({"input": 3}, "wrong type", "is a number; it must be text or a list"),
        ({"input": " \n"}, "empty prompt", "is empty"),
        ({"input": []}, "empty prompt", "empty list of messages"),
        ({"input": ["hi"]}, "wrong type", "message 0 of the prompt 'input' is text"),
        ({"input": [{"content": "x"}]}, "wrong type", "has no text 'role'"),
        ({"input": [{"role": "user"}]}, "wrong type", "neither 'content' nor 'tool_calls'"),
        ({"input": [{"role": "user", "content": 3}]}, "wrong type", "has a number as 'content'"),
        ({"input": "p", "metadata": [1]}, "wrong type", "metadata 'metadata' is a list"),
        ({"input": "p", "metadata": "{"}, "wrong type", "text that is not JSON"),
        ({"input": "p", "metadata": {"rm_type": 3}}, "wrong type", "rm_type is a number"),
        ({"input": "p", "tools": {}}, "wrong type", "must be a list of tool schemas"),
        ({"input": "p", "tools": ["calculator"]}, "wrong type", "tool 0 of 'tools' is text"),
    ],
)
def test_what_is_said_of_a_bad_row(row: object, kind: str, words: str) -> None:
    with pytest.raises(BadValue, match=words) as caught:
        parse_row(row, KEYS)
    assert caught.value.kind == kind


def test_missing_key_of_a_table_lists_all_its_columns() -> None:
    with pytest.raises(BadValue, match="keys here: question, answer; did you mean 'question'"):
        parse_row({"answer": "4"}, RowKeys("questions", "answer", "m", "t"), ("question", "answer"))


@given(row=json_values | st.fixed_dictionaries({"input": json_values, "label": json_values, "metadata": json_values}))
def test_any_row_is_a_prompt_or_a_reason(row: object) -> None:
    try:
        parsed = parse_row(row, KEYS)
    except BadValue:
        return  # the only error that may come out
    assert parsed.prompt
    assert isinstance(json.loads(parsed.metadata), dict)
    assert isinstance(json.loads(parsed.tools), list)
