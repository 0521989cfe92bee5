"""Tiny checkpoints and arithmetic data: real transformers objects, loaded as any user would load them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.arithmetic import PAIRS, tool_row, write_arithmetic
from models.tiny import ARITHMETIC_CHARACTERS, TinyCheckpointError, TinyRecipe, build_tokenizer, make_tiny_checkpoint

BYTES = build_tokenizer("bytes")
ARITHMETIC = build_tokenizer("arithmetic")


def test_a_complete_directory_is_reused_and_another_one_is_refused(tmp_path: Path) -> None:
    directory = make_tiny_checkpoint(tmp_path / "m", TinyRecipe(num_layers=1))
    before = (directory / "model.safetensors").stat()
    assert make_tiny_checkpoint(tmp_path / "m", TinyRecipe(num_layers=1)) == directory
    after = (directory / "model.safetensors").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    with pytest.raises(TinyCheckpointError, match=r"num_layers=1 \(wanted: 2\).*choose another path"):
        make_tiny_checkpoint(tmp_path / "m", TinyRecipe(num_layers=2))
    (directory / "tiny.json").write_text('{"architecture": "qwen3", "format_version": 1}')
    with pytest.raises(TinyCheckpointError, match=r"another version has made .*Invalid enum value 1.*choose another"):
        make_tiny_checkpoint(directory, TinyRecipe(num_layers=1))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    with pytest.raises(TinyCheckpointError, match="was not made here"):
        make_tiny_checkpoint(tmp_path / "mine", TinyRecipe(num_layers=1))
    assert sorted(os.listdir(tmp_path)) == ["m", "mine"]


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.numpy.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        make_tiny_checkpoint(tmp_path / "m", TinyRecipe(num_layers=1))
    assert os.listdir(tmp_path) == []


def test_impossible_shapes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TinyCheckpointError, match="hidden_size=50 with num_heads=4"):
        make_tiny_checkpoint(tmp_path / "m", TinyRecipe(hidden_size=50))
    with pytest.raises(TinyCheckpointError, match="num_kv_heads=3 does not divide"):
        make_tiny_checkpoint(tmp_path / "m", TinyRecipe(num_kv_heads=3))


@given(st.text())
def test_byte_ids_are_the_utf8_bytes(text: str) -> None:
    if "<|" in text:
        return  # special tokens are matched as such
    ids = BYTES(text)["input_ids"]
    assert bytes(ids) == text.encode()
    assert BYTES.decode(ids) == text


@given(st.text(alphabet=ARITHMETIC_CHARACTERS))
def test_arithmetic_text_has_one_id_per_character(text: str) -> None:
    ids = ARITHMETIC(text)["input_ids"]
    assert ids == [ARITHMETIC_CHARACTERS.index(character) + 1 for character in text]
    assert ARITHMETIC.decode(ids) == text


def test_arithmetic_special_tokens() -> None:
    assert (ARITHMETIC.pad_token_id, ARITHMETIC.eos_token, len(ARITHMETIC)) == (0, "\n", 32)
    assert ARITHMETIC.decode(ARITHMETIC("85\n")["input_ids"], skip_special_tokens=True) == "85"
    assert ARITHMETIC("z")["input_ids"] == [31]


def test_chat_template_renders_every_role_and_tool_calls() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
    messages = [
        {"role": "system", "content": "short"},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2"},
    ]
    text = BYTES.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|bos|>system\nshort<|eos|><|bos|>user\n1+1?<|eos|>"
        '<|bos|>assistant\n<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call><|eos|>'
        "<|bos|>tool\n2<|eos|><|bos|>assistant\n"
    )


@given(train=st.integers(0, 60), heldout=st.integers(0, 60), seed=st.integers(0, 5))
def test_arithmetic_rows_are_true_disjoint_and_reproducible(tmp_path_factory, train, heldout, seed) -> None:
    directory = tmp_path_factory.mktemp("arithmetic")
    files = write_arithmetic(directory, kind="add", train=train, heldout=heldout, seed=seed)
    rows = [[json.loads(line) for line in path.read_text().splitlines()] for path in (files.train, files.heldout)]
    assert [len(part) for part in rows] == [train, heldout]
    inputs = [row["input"] for part in rows for row in part]
    assert len(set(inputs)) == train + heldout
    for row in rows[0] + rows[1]:
        x, y = row["input"].removesuffix("=").split("+")
        assert int(x) + int(y) == int(row["label"])
    before = files.train.read_bytes()
    write_arithmetic(directory, kind="add", train=train, heldout=heldout, seed=seed)
    assert files.train.read_bytes() == before
    assert sorted(os.listdir(directory)) == ["add-heldout.jsonl", "add-train.jsonl"]


def test_all_pairs_are_available_and_no_more(tmp_path: Path) -> None:
    files = write_arithmetic(tmp_path, kind="add", train=PAIRS - 1, heldout=1, seed=0)
    inputs = {json.loads(line)["input"] for path in (files.train, files.heldout) for line in path.open()}
    assert inputs == {f"{x}+{y}=" for x in range(100) for y in range(100)}
    with pytest.raises(ValueError, match="at most 10000 in all"):
        write_arithmetic(tmp_path, kind="add", train=PAIRS, heldout=1, seed=0)


def test_a_demonstration_is_a_call_its_result_and_the_answer(tmp_path: Path) -> None:
    row = tool_row(37, 48)
    assert (row.input, row.label, row.demonstration) == ("37*48=", "1776", "[37*48]1776=1776\n")
    assert [row.demonstration[a:b] for a, b in row.metadata["tool_spans"]] == ["1776"]
    files = write_arithmetic(tmp_path, kind="tools", train=20, heldout=5, seed=3)
    for line in files.train.open():
        found = json.loads(line)
        ids = ARITHMETIC(found["input"] + found["demonstration"])["input_ids"]
        assert 31 not in ids
        (start, end) = found["metadata"]["tool_spans"][0]
        assert found["demonstration"][start:end] == found["label"]
        assert ids[-1] == ARITHMETIC.eos_token_id
