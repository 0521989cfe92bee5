"""`ifbench`: rows reach the published checkers, and what they need is named where it is missing."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from stages.graders.grade import Grade, UnknownGraderError
from stages.graders.text.ifeval import _checkers, prepare_ifbench
from tests.stages.graders.grading_rig import grade

# (instruction, arguments, response, holds); of rules that need no data of NLTK
CASES: list[tuple[str, dict[str, Any], str, int]] = [
    ("format:no_whitespace", {}, "abc", 1),
    ("format:no_whitespace", {}, "a b", 0),
    ("no_whitespace", {"N": None}, "<think>a b</think>c", 1),
    ("count:word_count_range", {"min_words": 2, "max_words": 3}, "one two", 1),
    ("count:word_count_range", {"min_words": 2, "max_words": 3}, "one", 0),
    ("count:numbers", {"N": 2}, "1 and 2", 1),
    ("count:numbers", {"N": 2}, "1", 0),
    ("format:parentheses", {}, "(((((a)))))", 1),
    ("format:parentheses", {}, "(a)", 0),
    ("words:palindrome", {}, "level", 0),
    ("format:newline", {}, "a\nb\nc", 1),
    ("format:newline", {}, "a b", 0),
    ("custom:reverse_newline", {}, "", 0),
]


def row(instruction: str, arguments: dict[str, Any]) -> dict[str, object]:
    return {"instruction_id_list": [instruction], "kwargs": [arguments]}


@pytest.mark.slow
def test_rows_reach_the_published_checkers() -> None:
    """One test: importing them takes seconds."""
    for instruction, arguments, response, holds in CASES:
        found = grade("ifbench", response, None, row(instruction, arguments))
        assert found == Grade(float(holds), holds == 1, {"followed": float(holds)}), (instruction, response)
    both: dict[str, object] = {"instruction_id_list": ["no_whitespace", "count:numbers"], "kwargs": [{}, {"N": 2}]}
    assert grade("ifbench", "a1", None, both).parts == {"followed": 0.5}
    for metadata, words in (
        (row("count:numbers", {}), "count:numbers needs N in its kwargs"),
        (row("count:numbrs", {}), "ifbench has no instruction 'count:numbrs'; did you mean 'count:numbers'"),
        ({}, "ifbench needs 'instruction_id_list'"),
    ):
        assert words in (grade("ifbench", "a", None, metadata).error or "")
    assert len(_checkers()) == 58


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for cached in (_checkers, prepare_ifbench):
        cached.cache_clear()
    for module in ("if_verifiable", "if_verifiable.ifbench.instructions_registry"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UnknownGraderError, match=r"needs the package if-verifiable .*install it with pip"):
        prepare_ifbench()
    assert "needs the package if-verifiable" in (grade("ifbench", "a", None, row("no_whitespace", {})).error or "")
