"""Prompt files: slices, formats, and what is said when a file cannot be used."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.data.sources import open_source, parse_spec, without_nulls
from stages.errors import RowError, SourceError

KEYS = ("input", "label", "metadata", "tools")
bounds = st.one_of(st.none(), st.integers(-15, 15))


def write_jsonl(path: Path, count: int) -> Path:
    path.write_text("".join(json.dumps({"input": f"p{i}", "label": i}) + "\n" for i in range(count)))
    return path


def inputs(spec: str) -> list[object]:
    source = open_source(spec, KEYS)
    return [source.row(index)["input"] for index in range(len(source))]  # type: ignore[index]


@given(start=bounds, stop=bounds)
def test_slices_are_pythons(tmp_path_factory: pytest.TempPathFactory, start: int | None, stop: int | None) -> None:
    path = write_jsonl(tmp_path_factory.mktemp("slices") / "rows.jsonl", 10)
    written = f"{path}@[{'' if start is None else start}:{'' if stop is None else stop}]"
    expected = [f"p{i}" for i in range(10)][start:stop]
    if expected:
        assert inputs(written) == expected
    else:
        with pytest.raises(SourceError, match="the slice of 10 rows is empty"):
            open_source(written, KEYS)


@pytest.mark.parametrize(
    ("spec", "path", "rows"),
    [
        ("a.jsonl", "a.jsonl", slice(None)),
        ("a.jsonl@[2:5]", "a.jsonl", slice(2, 5)),
        ("a@b.jsonl@[-3:]", "a@b.jsonl", slice(-3, None)),
        ("a@b.jsonl", "a@b.jsonl", slice(None)),
        ("a.jsonl@[ +1 : -1 ]", "a.jsonl", slice(1, -1)),
        ("x[1:2].jsonl", "x[1:2].jsonl", slice(None)),
    ],
)
def test_spec(spec: str, path: str, rows: slice) -> None:
    assert parse_spec(spec) == (path, rows)


@pytest.mark.parametrize("body", ["3", "", "1:2:3", "a:b", "1.5:"])
def test_malformed_slice_shows_the_form(body: str) -> None:
    with pytest.raises(SourceError, match=r"not of the form \[a:b\]"):
        parse_spec(f"a.jsonl@[{body}]")


def test_lines_keep_their_numbers(tmp_path: Path) -> None:
    """A byte order mark, blank lines, CRLF and a last line without an end are all of no consequence."""
    path = tmp_path / "odd.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"input": "a"}\r\n\n   \n{"input": "b\xc3\xa9"}\nnot json\n{"input": "c"}')
    source = open_source(str(path), KEYS)
    assert len(source) == 4
    assert [source.line(index) for index in range(4)] == [1, 4, 5, 6]
    assert source.row(3) == {"input": "c"}
    assert source.row(1) == {"input": "bé"}
    with pytest.raises(RowError, match="not valid JSON"):
        source.row(2)


def test_invalid_utf8_is_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"input": "\xe9"}\n{"input": "\\ud800"}\n{"input": "fine"}\n')
    source = open_source(str(path), KEYS)
    for index in range(2):
        with pytest.raises(RowError, match="not valid JSON"):
            source.row(index)
    assert source.row(2) == {"input": "fine"}


def test_deeply_nested_line_is_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "deep.jsonl"
    path.write_text("[" * 100_000 + "]" * 100_000 + "\n")
    with pytest.raises(RowError, match="not valid JSON"):
        open_source(str(path), KEYS).row(0)


def test_pretty_printed_json_is_recognised(tmp_path: Path) -> None:
    path = tmp_path / "pretty.json"
    path.write_text(json.dumps([{"input": "a"}], indent=2))
    with pytest.raises(SourceError, match="one JSON document over several lines; write one JSON object per line"):
        open_source(str(path), KEYS)


def test_missing_file_names_path_and_cure(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"no file or directory '.*nowhere\.jsonl'.*give the path of JSONL"):
        open_source(str(tmp_path / "nowhere.jsonl"), KEYS)


def test_unknown_suffix_names_the_formats(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("input\n")
    with pytest.raises(SourceError, match=r"suffix '.csv' names no known format; use JSONL"):
        open_source(str(tmp_path / "rows.csv"), KEYS)


def test_empty_file(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(SourceError, match="the file has no rows"):
        open_source(str(tmp_path / "empty.jsonl"), KEYS)


MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]
ROWS = [
    {"input": MESSAGES, "label": 4, "metadata": {"source": "x", "level": None}, "other": 1},
    {"input": MESSAGES[:1], "label": None, "metadata": None, "other": 2},
]


def test_parquet_with_nested_columns(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    source = open_source(f"{tmp_path / 'rows.parquet'}@[-1:]", KEYS)
    assert source.columns == ("input", "label", "metadata", "other")
    assert (len(source), source.line(0)) == (1, 2)
    assert source.row(0) == {"input": [{"role": "user", "content": "hi"}]}
    first = open_source(str(tmp_path / "rows.parquet"), KEYS).row(0)
    assert first == {"input": [MESSAGES[0], without_nulls(MESSAGES[1])], "label": 4, "metadata": {"source": "x"}}


def test_parquet_without_any_wanted_column_still_has_rows(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    assert len(open_source(str(tmp_path / "rows.parquet"), ("prompt",))) == 2


def test_broken_parquet(tmp_path: Path) -> None:
    (tmp_path / "bad.parquet").write_text("{}")
    with pytest.raises(SourceError, match=r"cannot be read as Parquet .*check the file or its suffix"):
        open_source(str(tmp_path / "bad.parquet"), KEYS)


def test_dataset_directory(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"input": f"p{i}", "label": str(i), "extra": i} for i in range(5)])
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(str(tmp_path / "both"))
    source = open_source(f"{tmp_path / 'both' / 'train'}@[3:]", KEYS)
    assert source.row(0) == {"input": "p3", "label": "3"}
    assert source.columns == ("input", "label", "extra")
    with pytest.raises(SourceError, match=r"several splits \(test, train\); name one, as in .*both/test"):
        open_source(str(tmp_path / "both"), KEYS)


def test_any_other_directory(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"not one written by Dataset\.save_to_disk"):
        open_source(str(tmp_path), KEYS)


def test_dataset_directory_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dataset_info.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(SourceError, match="needs the package `datasets`; install it"):
        open_source(str(tmp_path), KEYS)
