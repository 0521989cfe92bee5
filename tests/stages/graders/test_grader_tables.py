"""The tables of cases, grader by grader, each row with its reason; the worked lines of docs/rewards.md; `ifbench`."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from stages.graders.grade import Grade, GradeRequest, UnknownGraderError
from stages.graders.registry import GRADERS, find_grader, grade_request
from stages.graders.text.ifeval import checkers
from tests.stages.graders import cases_math, cases_text
from tests.stages.graders.grading_rig import grade

ALL_MATH = [*cases_math.GOLDEN, *cases_math.MORE]


@pytest.mark.parametrize("row", ALL_MATH, ids=[f"{row[-1]}-{n}" for n, row in enumerate(ALL_MATH)])
def test_mathematics(row: tuple[str, str, int, int, int, int, str]) -> None:
    response, label, *scores, _ = row
    grades = [grade(name, response, label) for name in cases_math.DIALECTS]
    assert [found.error for found in grades] == [None] * 4
    assert [found.score for found in grades] == scores
    assert [found.is_correct for found in grades] == [score == 1 for score in scores]
    compat, verify = grades[2:]
    assert grade("math", response, label).score == max(compat.score, verify.score)


def test_graders_with_two_names() -> None:
    for name, other in (("math", "math:either"), ("math_verify", "math:verify"), ("math_strict", "boxed")):
        assert find_grader(name) == find_grader(other)


@pytest.mark.parametrize(("name", "row"), [(name, row) for name, rows in cases_text.TEXT.items() for row in rows])
def test_text(name: str, row: tuple[str, str, float, str]) -> None:
    response, label, score, why = row
    found = grade(name, response, label)
    assert found.score == (pytest.approx(score, abs=1e-6) if name == "f1" else score), why
    assert (found.is_correct, found.error, found.status) == (score == 1.0, None, "ok")
    assert name != "dapo" or found.parts == {"acc": float(score == 1)}


def test_f1_may_call_two_empty_sides_equal() -> None:
    assert grade("f1:exact_empty=1", "the", "a").score == 1.0
    assert grade("f1:exact_empty=1", "the cat", "a").score == 0.0
    assert grade("f1:exact_empty=0", "the", "the").score == 0.0


@pytest.mark.parametrize("row", [*cases_text.GOLDEN_GPQA, *cases_text.GPQA])
def test_gpqa(row: tuple[str, str, int, str]) -> None:
    response, correct, score, why = row
    lettered = dict(zip("ABCD", cases_text.CHOICES, strict=True))
    text = lettered[correct]
    for label, metadata in (
        (correct, {"choices": cases_text.CHOICES}),
        (None, {"choices": lettered, "correct_letter": correct}),
        (text, {"choices": cases_text.CHOICES}),
    ):
        found = grade("gpqa", response, label, metadata)
        assert (found.score, found.is_correct, found.error) == (score, score == 1, None), why


@pytest.mark.parametrize(("label", "metadata", "words"), [
    (None, {}, "no correct choice: '' is neither one of A, B, C, D nor the text or number of one"),
    ("E", {}, "no correct choice: 'E'"),
    ("purple", {"choices": ["red", "green"]}, "no correct choice: 'purple'"),
    ("2", {"choices": ["red", "green"]}, "no correct choice: '2'"),
    ("-1", {}, "no correct choice: '-1'"),
    ("red", {"choices": ["red", "red"]}, "no correct choice: 'red'"),
    ("A", {"choices": "red"}, "cannot read the row's metadata"),
    ("A", {"valid_letters": ["AB"]}, "one capital letter for each choice, and finds AB"),
])  # fmt: skip
def test_gpqa_refuses_questions_without_an_answer(label: str | None, metadata: dict[str, object], words: str) -> None:
    found = grade("gpqa", "A", label, metadata)
    assert found.status == "error"
    assert words in (found.error or "")


@pytest.mark.parametrize(("label", "choices", "correct"), [
    ("GREEN", ["red", "Green"], "B"),
    ("light  blue", ["Light Blue", "red"], "A"),
    ("0", ["red", "green"], "A"),
    ("1", ["red", "green"], "B"),
    ("1.0", ["red", "green"], "B"),
    ("3", None, "D"),
    ("0", ["1", "0"], "B"),  # the text of a choice goes before its number
    ("b", ["red", "green"], "B"),
])  # fmt: skip
def test_gpqa_labels_are_letters_texts_in_any_case_or_numbers(
    label: str, choices: list[str] | None, correct: str
) -> None:
    metadata: dict[str, object] = {} if choices is None else {"choices": choices}
    for letter in "ABCD":
        found = grade("gpqa", f"The answer is {letter}", label, metadata)
        assert (found.error, found.score) == (None, float(letter == correct))


def test_gpqa_takes_as_many_letters_as_there_are_choices() -> None:
    metadata: dict[str, object] = {"choices": [f"choice {n}" for n in range(10)]}
    assert grade("gpqa", "answer: J", "J", metadata).score == 1.0
    assert grade("gpqa", "answer: D", "D", {"valid_letters": "ABC"}).status == "error"


@pytest.mark.parametrize("row", [*cases_text.GOLDEN_IFEVAL, *cases_text.IFEVAL])
def test_ifeval(row: tuple[str, dict[str, object], str, int, str]) -> None:
    instruction, arguments, response, holds, why = row
    metadata: dict[str, object] = {"instruction_id_list": [instruction], "kwargs": [arguments]}
    found = grade("ifeval", response, None, metadata)
    assert (found.error, found.score, found.parts) == (None, holds, {"followed": float(holds)}), why
    assert grade("ifeval", "", None, metadata).score == 0.0, "an empty response follows no instruction"


def test_ifeval_wants_all_instructions_and_reports_the_share() -> None:
    metadata: dict[str, object] = {"instruction_id_list": ["no_comma", "quotation", "title", "english_lowercase"]}
    found = grade("ifeval", '"a, <<b>>"', None, metadata)
    assert (found.score, found.is_correct, found.parts) == (0.0, False, {"followed": 0.75})
    assert grade("ifeval", '"<<b>>"', None, metadata).score == 1.0


@pytest.mark.parametrize(("metadata", "words"), [
    ({}, "needs 'instruction_id_list' in the row's metadata"),
    ({"instruction_id_list": ["no_coma"]}, "no instruction 'no_coma'; did you mean 'no_comma'"),
    ({"instruction_id_list": ["no_comma"], "kwargs": [{}, {}]}, "1 instructions and 2 kwargs; give one for each"),
    ({"instruction_id_list": "no_comma"}, "cannot read the row's metadata"),
    ({"instruction_id_list": ["number_words"]}, "needs a number from 0 on under 'num_words', not None"),
    ({"instruction_id_list": ["number_words"], "kwargs": [{"num_words": 5, "relation": "about"}]},
     "needs 'at least' or 'less than' under 'relation', not 'about'"),
    ({"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": []}]}, "needs a list of texts"),
    ({"instruction_id_list": ["end_checker"], "kwargs": [{"end_phrase": " "}]}, "needs a text under 'end_phrase'"),
])  # fmt: skip
def test_ifeval_names_what_is_wrong_with_the_row(metadata: dict[str, object], words: str) -> None:
    for response in ("some response", ""):
        found = grade("ifeval", response, None, metadata)
        assert found.status == "error"
        assert words in (found.error or "")


PAGE = (Path(__file__).resolve().parents[3] / "docs" / "rewards.md").read_text()
SECTION = PAGE.partition("### One worked line each\n")[2].partition("\n## ")[0]
LINES = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in SECTION.splitlines() if line[:3] == "| `"]
# Importing the published code of ifbench takes seconds.
WORKED = [pytest.param(*line, marks=pytest.mark.slow if line[0] == "`ifbench`" else ()) for line in LINES]


def plain(cell: str) -> str:
    return cell.strip("`") if cell.startswith("`") else cell


@pytest.mark.parametrize(("name", "response", "given", "score"), WORKED)
def test_worked_lines(name: str, response: str, given: str, score: str) -> None:
    reference = plain(given)
    label, metadata = (None, reference) if reference.startswith('{"') else (reference, "{}")
    tokens = re.fullmatch(r"(\d+) tokens", response)
    n_tokens = int(tokens[1]) if tokens else 0
    found = grade_request(GradeRequest(plain(name), plain(response), label, metadata, n_tokens))
    assert found.error is None
    assert found.score == pytest.approx(float(score.strip(" |")))


def test_the_examples_run() -> None:
    scope: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        exec(block, scope)
    assert asyncio.run(scope["fresh"]("7", "7", {}, "3 + 4 = ")) == 1.0
    assert scope["score"](" 7", "7", {}) == {"score": 1.0, "is_correct": True, "digits": 1}
    assert scope["rank"](["long one", "x", "xy"], None, {}) == [1.0, 0.0, 0.5]


def test_every_grader_of_the_table_is_documented() -> None:
    overview = PAGE.partition("### One worked line each")[0]
    assert [name for name in GRADERS if not re.search(rf"`{name}[`:]", overview)] == []
    shown = {plain(line[0]).partition(":")[0] for line in LINES}
    elsewhere = {"auto", "boxed", "remote", "judge", "random", "constant", "sleep", "crash"}
    assert set(GRADERS) - shown - elsewhere == set()


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
    assert len(checkers()) == 58


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    checkers.cache_clear()
    for module in ("if_verifiable", "if_verifiable.ifbench.instructions_registry"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UnknownGraderError, match=r"needs the package if-verifiable .*install it with pip"):
        checkers()
    assert "needs the package if-verifiable" in (grade("ifbench", "a", None, row("no_whitespace", {})).error or "")
