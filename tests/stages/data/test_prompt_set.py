"""Prompts: which rows become prompts, what a prompt looks like, and in which order prompts come."""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from configs.schema.data import DataConfig
from models.tiny import TinyRecipe, make_tiny_checkpoint
from stages.data.prepare import Preparer
from stages.data.prompt_set import PromptSet, load_eval_prompts
from stages.data.rows import BadValue, RowKeys, label_text, parse_row, trusted_functions
from stages.data.sources import open_source, parse_spec, without_nulls
from stages.errors import DataError, EmptyDataError, RowError, SourceError
from stages.prompts.prompt_sources import PromptOrder, WeightedOrder
from tests.stages.stage_rig import make_config


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
Prompts = Callable[..., PromptSet]
LIMITS = ("max_prompt_tokens", "trusted")
PLAIN = Preparer(False, byte_ids, byte_ids, None)


@pytest.fixture
def prompts_of(tmp_path: Path) -> Prompts:
    """Makes the prompts of a.jsonl, of these rows if they are given, with these settings of the data."""

    def made(rows: Sequence[object] = (), encode: Any = byte_ids, given: Any = None, **settings: Any) -> PromptSet:
        path = write(tmp_path / "a.jsonl", rows) if rows else str(tmp_path / "a.jsonl")
        config, limits = DataConfig(**settings), {key: value for key, value in (given or {}).items() if key in LIMITS}
        prepared = {"render": None} | {key: value for key, value in (given or {}).items() if key not in LIMITS}
        return PromptSet([path], config, Preparer(config.apply_chat_template, encode, encode, **prepared), **limits)

    return made


def test_bad_rows_are_skipped_counted_and_named(prompts_of: Prompts, tmp_path: Path) -> None:
    prompts = prompts_of([GOOD[0], "{broken", {"text": "x"}, GOOD[1], {"input": ""}, {"input": 7}], label_key="label")
    assert [prompts.get(index).prompt for index in range(len(prompts))] == ["prompt 0", "prompt 1"]
    report = prompts.report
    assert (report.rows, report.kept) == (6, 2)
    assert report.skipped == {"bad json": 1, "missing key": 1, "empty prompt": 1, "wrong type": 1}
    assert [bad.line for bad in report.bad_rows] == [2, 3, 5, 6]
    assert "a.jsonl:3: no key 'input'" in "\n".join(report.lines())
    assert report.lines()[0] == f"{tmp_path / 'a.jsonl'}: 2 of 6 rows usable"
    report = prompts_of([GOOD[0], *["{"] * 500]).report
    assert report.skipped == {"bad json": 500}
    assert len(report.bad_rows) == 20, "the list is bounded, the count is not"


def test_one_bad_row_too_many_names_file_line_reason_and_cure(prompts_of: Prompts) -> None:
    rows = [GOOD[0], {"inptu": "x"}, "{", GOOD[0]]
    with pytest.raises(
        RowError, match=r"a\.jsonl:2: no key 'input'.*1 rows are malformed, above --max-bad-rows 0; corr"
    ):
        prompts_of(rows, max_bad_rows=0)
    with pytest.raises(
        RowError, match=r"a\.jsonl:3: not valid JSON.*2 rows are malformed, above --max-bad-rows 1; corr"
    ):
        prompts_of(rows, max_bad_rows=1)
    assert len(prompts_of(rows, max_bad_rows=2)) == len(prompts_of(rows)) == 2


def test_long_prompts_are_filtered_also_when_strict(prompts_of: Prompts) -> None:
    rows = [{"input": "x" * n} for n in (3, 11, 10, 12)]
    prompts = prompts_of(rows, rollout_max_prompt_len=10, max_bad_rows=0)
    assert [len(prompts.get(index).prompt_ids) for index in range(len(prompts))] == [3, 10]
    assert prompts.report.skipped == {"too long": 2}
    assert prompts.report.longest_tokens == 10
    of_the_run = {"max_prompt_tokens": 10}
    assert len(prompts_of(given=of_the_run)) == len(prompts_of(given=of_the_run, rollout_max_prompt_len=11)) == 2


def test_a_prompt_of_megabytes_is_refused_by_its_beginning(prompts_of: Prompts) -> None:
    """50 MB of digits took a tokenizer minutes and 8 GB."""
    seen: list[str] = []

    def counted(text: str) -> list[int]:
        seen.append(text)
        return byte_ids(text)

    rows = [{"input": "x"}, {"input": "1" * 2_000_000}, {"input": "y" * 90}]
    report = prompts_of(rows, counted, rollout_max_prompt_len=100).report
    assert report.skipped == {"too long": 1}
    assert "of 2000000 characters are 808 tokens, above the limit of 100" in report.bad_rows[0].reason
    assert max(map(len, seen)) == 808
    seen.clear()
    prompts = prompts_of(GOOD, counted)
    assert seen == ["prompt 0"], "one is tried, so that a broken template shows at the start"
    for _ in range(3):
        prompts.get(3)
    assert seen == ["prompt 0", "prompt 3"], "without a limit they are tokenised on request and once"


def test_a_row_that_fits_into_no_message_is_skipped(prompts_of: Prompts) -> None:
    prompts = prompts_of([{"input": "x", "label": "1" * n} for n in (1, 17 << 20)], label_key="label")
    assert len(prompts) == 1
    assert prompts.report.skipped == {"too large": 1}


def test_several_sources_keep_their_order_and_counts(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", GOOD)
    second = write(tmp_path / "b.jsonl", [{"input": "other"}, "{"])
    prompts = PromptSet([f"{first}@[3:]", second], DataConfig(), PLAIN)
    assert [prompts.get(index).prompt for index in range(3)] == ["prompt 3", "prompt 4", "other"]
    assert [(source.rows, source.kept) for source in prompts.report.sources] == [(2, 2), (2, 1)]
    with pytest.raises(EmptyDataError, match="prompt_data is empty: name at least one"):
        PromptSet([], DataConfig(), PLAIN)


def test_tools_of_the_run_come_before_those_of_the_row(prompts_of: Prompts) -> None:
    rows = [{"input": "a", "tools": [{"name": "row"}]}, {"input": "b"}]
    given = {"render": render, "tools": [{"name": "run"}]}
    prompts = prompts_of(rows, given=given, apply_chat_template=True)
    assert json.loads(prompts.get(0).tools) == [{"name": "run"}, {"name": "row"}]
    assert prompts.get(0).prompt.startswith("[2 tools]")
    assert json.loads(prompts.get(1).tools) == [{"name": "run"}]


def test_messages_without_a_template_are_bad_rows(prompts_of: Prompts) -> None:
    with pytest.raises(EmptyDataError, match=r"skipped \(template: 1\).*no chat template"):
        prompts_of([{"input": [{"role": "user", "content": "hi"}]}])
    with pytest.raises(DataError, match="has no chat template; give one with --chat-template-path"):
        prompts_of(GOOD, apply_chat_template=True)


def test_a_template_that_refuses_one_row(prompts_of: Prompts) -> None:
    rows = [{"input": [{"role": role, "content": "x"}]} for role in ("martian", "user", "martian")]
    given = {"render": render}
    prompts = prompts_of(rows, given=given)
    assert prompts.report.skipped == {"template": 1}  # found while looking for the first usable prompt
    assert len(prompts) == 2
    words = r"a\.jsonl:3: the chat template refuses .*ValueError: roles must be of this world"
    with pytest.raises(RowError, match=words):
        prompts.get(1)
    assert prompts_of(given=given, rollout_max_prompt_len=100).report.skipped == {"template": 2}


def test_labels_may_be_missing_in_some_rows_but_not_in_all(prompts_of: Prompts) -> None:
    report = prompts_of([GOOD[1], {"input": "no label"}], label_key="label").report
    assert (report.unlabelled, report.labels) == (1, ["1"])
    with pytest.raises(DataError, match=r"none of the 2 usable rows has a label; .*did you mean 'label'"):
        prompts_of(label_key="labels")


def test_grader_names_of_rows_are_reported(prompts_of: Prompts) -> None:
    rows = [{"input": "a", "metadata": {"rm_type": name}} for name in ("gsm8k", "exakt")] * 2
    assert prompts_of(rows).report.rm_types == {"gsm8k": 2, "exakt": 2}


RUNS_CODE = {"rm_type": "timeit:timeit"}


@pytest.mark.parametrize("metadata", [
    RUNS_CODE,
    {"custom_rm_path": "os:system"},
    {"generate_function_path": "os.system"},
    {"rm_type": "remote:http://x"},
])  # fmt: skip
def test_a_row_may_not_name_code_that_the_run_does_not_name(prompts_of: Prompts, metadata: dict[str, str]) -> None:
    [name] = metadata.values()
    with pytest.raises(RowError, match=r"a.jsonl:2: metadata.\w+ is .*which no setting .* or add --trust-data-code"):
        prompts_of([{"input": "a"}, {"input": "b", "metadata": metadata}])
    for trusted in (frozenset([name, name.replace(".", ":")]), None):
        assert len(prompts_of(given={"trusted": trusted})) == 2


def test_a_row_that_changes_after_loading_may_not_name_code_either(prompts_of: Prompts, tmp_path: Path) -> None:
    row = {"input": "a", "metadata": {"rm_type": "gsm8k", "pad": "x" * 5}}
    prompts = prompts_of([row, row])
    write(tmp_path / "a.jsonl", [row, {"input": "a", "metadata": {**RUNS_CODE, "pad": "x" * 6}}])
    with pytest.raises(RowError):
        prompts.get(1)


def test_functions_that_the_settings_name_are_trusted() -> None:
    reward = {"custom_rm_path": "a:f", "reward_component": ["x=b.c:g@0.5"]}
    config = make_config(reward=reward, rollout={"custom_generate_function_path": "d:h"})
    assert {"a:f", "b.c:g", "d:h"} <= (trusted_functions(config) or set())
    assert trusted_functions(make_config(reward=reward, data={"trust_data_code": True})) is None


def test_supervised_labels_are_tokenised(prompts_of: Prompts) -> None:
    rows = [{"input": "q", "label": "answer"}, {"input": "no label"}]
    prompts = prompts_of(rows, given={"tokenize_labels": True}, label_key="label")
    assert prompts.get(0).label_ids.tolist() == byte_ids("answer")
    assert prompts.report.skipped == {"missing key": 1}
    assert len(prompts_of(label_key="label").get(0).label_ids) == 0


sizes = st.integers(1, 60)
seeds = st.integers(-(2**70), 2**70)


@given(n=sizes, seed=seeds, epoch=st.integers(0, 5), shuffle=st.booleans())
def test_each_epoch_is_a_permutation(n: int, seed: int, epoch: int, shuffle: bool) -> None:
    order = PromptOrder(n, seed, shuffle)
    seen = [order.index(epoch * n + offset) for offset in range(n)]
    assert {found for found, _ in seen} == {epoch}
    assert sorted(index for _, index in seen) == list(range(n))


@given(n=sizes, seed=seeds, picks=st.randoms(use_true_random=False))
def test_access_pattern_does_not_matter(n: int, seed: int, picks: random.Random) -> None:
    forward = {position: PromptOrder(n, seed, True).index(position) for position in range(3 * n)}
    again = PromptOrder(n, seed, True)
    assert {position: again.index(position) for position in picks.sample(range(3 * n), 3 * n)} == forward


def test_no_prompts_no_order() -> None:
    with pytest.raises(ValueError, match="at least one prompt"):
        PromptOrder(0, 0, True)


mixes = st.lists(st.tuples(st.integers(1, 40), st.floats(0.02, 5.0)), min_size=1, max_size=5)


@given(mix=mixes, seed=seeds, shuffle=st.booleans(), cursor=st.integers(0, 1200))
@settings(max_examples=25, phases=[Phase.generate])
def test_shares_are_as_asked_and_a_resumed_order_is_the_uninterrupted_one(
    mix: list[tuple[int, float]], seed: int, shuffle: bool, cursor: int
) -> None:
    """From any position on. Each source goes through its own rows, all of them before one comes again."""
    sizes, weights = [n for n, _ in mix], [weight for _, weight in mix]
    order = WeightedOrder(sizes, weights, seed, shuffle)
    visits = [order.index(position) for position in range(1200 + 10)]
    resumed = WeightedOrder(sizes, weights, seed, shuffle)
    assert [resumed.index(cursor + step) for step in range(10)] == visits[cursor : cursor + 10]
    ends = list(itertools.accumulate(sizes))
    for place, (n, weight) in enumerate(mix):
        start, end, share = ends[place] - n, ends[place], weight / sum(weights)
        seen = [(epoch, index - start) for epoch, index in visits if start <= index < end]
        assert abs(len(seen) - share * len(visits)) <= len(mix) + len(visits) / 1000
        assert [epoch for epoch, _ in seen] == [visit // n for visit in range(len(seen))]
        whole = [[index for epoch, index in seen if epoch == e] for e in range(len(seen) // n)]
        assert all(sorted(indices) == list(range(n)) for indices in whole)
        assert shuffle or all(indices == sorted(indices) for indices in whole)
        if shuffle and n > 8 and len(whole) > 2:
            assert whole[0] != whole[1] or whole[1] != whole[2]


def test_sources_take_turns_by_their_weights() -> None:
    order = WeightedOrder([2, 5], [3.0, 1.0], seed=0, shuffle=False)
    assert order.n == 7, "all prompts, for lengths in epochs and the search of a curriculum"
    assert [order.index(position) for position in range(8)] == [
        (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (0, 3), (2, 1),
    ]  # fmt: skip
    one, other = (WeightedOrder([50, 50], [1.0, 2.0], seed, shuffle=True) for seed in (1, 2))
    assert [one.index(position) for position in range(30)] != [other.index(position) for position in range(30)]
    with pytest.raises(EmptyDataError, match="source 2 of --prompt-data has a weight, but no usable row"):
        WeightedOrder([3, 0], [1.0, 1.0], 0, shuffle=False)


KEYS = RowKeys("input", "label", "metadata", "tools")

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


def test_a_full_row() -> None:
    given: dict[str, Any] = {"input": MESSAGES[:1], "tools": [{"type": "function"}], "label": 4}
    given["metadata"] = {"rm_type": "gsm8k", "n": 1}
    row = parse_row(given, KEYS)
    assert (row.prompt, row.label, row.rm_type) == (given["input"], "4", "gsm8k")
    assert (json.loads(row.metadata), json.loads(row.tools)) == (given["metadata"], given["tools"])
    for value in (float("nan"), float("inf")):
        with pytest.raises(BadValue, match="not a number that can be compared"):
            label_text(value)
    text = parse_row({"input": "p", "metadata": '{"a": 1}', "tools": '[{"name": "f"}]'}, KEYS)
    assert (json.loads(text.metadata), json.loads(text.tools)) == ({"a": 1}, [{"name": "f"}])


@pytest.mark.parametrize(("row", "kind", "words"), [
    ([], "wrong type", "the row is a list, not an object"),
    (None, "wrong type", "the row is null"),
    ({}, "missing key", "no key 'input' .* keys here: none"),
    ({"inputs": "p", "x": 1}, "missing key", "keys here: inputs, x; did you mean 'inputs'"),
    ({"input": None}, "missing key", "no key 'input' \\(or it is null\\)"),
    ({"input": 3}, "wrong type", "is a number, not text or a list"),
    ({"input": " \n"}, "empty prompt", "is empty"),
    ({"input": []}, "empty prompt", "empty list of messages"),
    ({"input": ["hi"]}, "wrong type", "message 0 of the prompt 'input' is text"),
    ({"input": [{"content": "x"}]}, "wrong type", "has no text 'role'"),
    ({"input": [{"role": "user"}]}, "wrong type", "neither 'content' nor 'tool_calls'"),
    ({"input": [{"role": "user", "content": 3}]}, "wrong type", "has a number as 'content'"),
    ({"input": "p", "metadata": [1]}, "wrong type", "metadata 'metadata' is a list"),
    ({"input": "p", "metadata": "{"}, "wrong type", "is no JSON text"),
    ({"input": "p", "metadata": {"rm_type": 3}}, "wrong type", "rm_type is a number"),
    ({"input": "p", "tools": {}}, "wrong type", "must be a list of tool schemas"),
    ({"input": "p", "tools": ["calculator"]}, "wrong type", "tool 0 of 'tools' is text"),
])  # fmt: skip
def test_what_is_reported_about_a_bad_row(row: object, kind: str, words: str) -> None:
    with pytest.raises(BadValue, match=words) as caught:
        parse_row(row, KEYS)
    assert caught.value.kind == kind


@given(row=json_values | st.fixed_dictionaries({"input": json_values, "label": json_values, "metadata": json_values}))
def test_any_row_is_a_prompt_or_a_reason(row: object) -> None:
    try:
        parsed = parse_row(row, KEYS)
    except BadValue:
        return  # the only error that may come out
    assert parsed.prompt
    assert isinstance(json.loads(parsed.metadata), dict)
    assert isinstance(json.loads(parsed.tools), list)


# Prompt files: slices, formats, and what is said when a file cannot be used.


ROW_KEYS = ("input", "label", "metadata", "tools")
bounds = st.one_of(st.none(), st.integers(-15, 15))


def inputs(spec: str) -> list[object]:
    source = open_source(spec, ROW_KEYS)
    return [source.row(index)["input"] for index in range(len(source))]  # type: ignore[index]


@given(start=bounds, stop=bounds)
def test_slices_are_pythons(tmp_path_factory: pytest.TempPathFactory, start: int | None, stop: int | None) -> None:
    path = write(tmp_path_factory.mktemp("slices") / "rows.jsonl", [{"input": f"p{i}", "label": i} for i in range(10)])
    written = f"{path}@[{'' if start is None else start}:{'' if stop is None else stop}]"
    expected = [f"p{i}" for i in range(10)][start:stop]
    if expected:
        assert inputs(written) == expected
    else:
        with pytest.raises(SourceError, match="the slice of 10 rows is empty"):
            open_source(written, ROW_KEYS)


@pytest.mark.parametrize("body", ["3", "", "1:2:3", "a:b", "1.5:"])
def test_malformed_slice_shows_the_form(body: str) -> None:
    with pytest.raises(SourceError, match=r"not of the form \[a:b\]"):
        parse_spec(f"a.jsonl@[{body}]")


def test_lines_keep_their_numbers(tmp_path: Path) -> None:
    """A byte order mark, blank lines, CRLF and a last line without an end are all of no consequence."""
    path = tmp_path / "odd.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"input": "a"}\r\n\n   \n{"input": "b\xc3\xa9"}\nnot json\n{"input": "c"}')
    source = open_source(str(path), ROW_KEYS)
    assert len(source) == 4
    assert [source.line(index) for index in range(4)] == [1, 4, 5, 6]
    assert source.row(3) == {"input": "c"}
    assert source.row(1) == {"input": "bé"}
    with pytest.raises(RowError, match="not valid JSON"):
        source.row(2)


@pytest.mark.parametrize(("name", "content", "words"), [
    ("pretty.json", '[\n  {\n    "input": "a"\n  }\n]', "one JSON document over several lines; write one"),
    ("nowhere.jsonl", None, r"no file or directory '.*nowhere\.jsonl'.*give the path of JSONL"),
    ("rows.csv", "input\n", "suffix '.csv' names no known format; use JSONL"),
    ("empty.jsonl", "\n\n", "the file has no rows"),
    ("bad.parquet", "{}", "cannot be read as Parquet .*check file and suffix"),
    ("", None, r"not one written by Dataset\.save_to_disk"),
])  # fmt: skip
def test_a_file_that_cannot_be_used_is_named_with_the_cure(
    name: str, content: str | None, words: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(SourceError, match=words):
        open_source(str(tmp_path / name), ROW_KEYS)


MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]
ROWS = [
    {"input": MESSAGES, "label": 4, "metadata": {"source": "x", "level": None}, "other": 1},
    {"input": MESSAGES[:1], "label": None, "metadata": None, "other": 2},
]


def test_parquet_with_nested_columns(tmp_path: Path) -> None:
    path = str(tmp_path / "rows.parquet")
    pq.write_table(pa.Table.from_pylist(ROWS), path)
    source = open_source(f"{path}@[-1:]", ROW_KEYS)
    assert source.columns == ("input", "label", "metadata", "other")
    assert (len(source), source.line(0)) == (1, 2)
    assert source.row(0) == {"input": [{"role": "user", "content": "hi"}]}
    first = open_source(path, ROW_KEYS).row(0)
    assert first == {"input": [MESSAGES[0], without_nulls(MESSAGES[1])], "label": 4, "metadata": {"source": "x"}}
    assert len(open_source(path, ("prompt",))) == 2, "without any wanted column it still has rows"


def test_dataset_directory(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"input": f"p{i}", "label": str(i), "extra": i} for i in range(5)])
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(str(tmp_path / "both"))
    source = open_source(f"{tmp_path / 'both' / 'train'}@[3:]", ROW_KEYS)
    assert source.row(0) == {"input": "p3", "label": "3"}
    assert source.columns == ("input", "label", "extra")
    with pytest.raises(SourceError, match=r"several splits \(test, train\); name one, as in .*both/test"):
        open_source(str(tmp_path / "both"), ROW_KEYS)


def test_dataset_directory_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dataset_info.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(SourceError, match="needs the package `datasets`; install it"):
        open_source(str(tmp_path), ROW_KEYS)


def test_a_held_out_set_is_read_with_its_own_keys_and_template(tmp_path: Path) -> None:
    model = make_tiny_checkpoint(tmp_path / "tiny", TinyRecipe(tokenizer="arithmetic"))
    (tmp_path / "sums.jinja").write_text("{{ messages[0]['content'] }}=")
    rows = [{"q": "1+2", "a": "3", "about": {"from": "me"}, "label": "no", "metadata": {"from": "others"}}]
    path = write(tmp_path / "held.jsonl", rows)
    own = {"input_key": "q", "metadata_key": "about", "apply_chat_template": True}
    own["chat_template_path"] = str(tmp_path / "sums.jinja")
    evaluation = {"eval_label_key": "a", "eval_sets": {"held": own}, "eval_prompt_data": (f"held={path}", path)}
    config = make_config(data={"label_key": "label"}, train={"hf_checkpoint": str(model)}, eval=evaluation)
    prompt = load_eval_prompts(config, "held", path).get(0)
    assert (prompt.prompt, prompt.label, json.loads(prompt.metadata)) == ("1+2=", "3", {"from": "me"})
    with pytest.raises(EmptyDataError, match="input"):
        load_eval_prompts(config, "another", path)
