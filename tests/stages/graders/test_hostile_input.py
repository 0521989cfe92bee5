"""Hostile input, for every grader of the table: each grade is defined, valid text, and in time; nobody else suffers."""

from __future__ import annotations

import json
import math
import time

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.graders.grade import Grade, GradeRequest
from stages.graders.math.answer import plain_form
from stages.graders.math.guards import MAX_DEPTH, refusal_of
from stages.graders.registry import GRADERS, NO_TEXT, find_grader, grade_request
from tests.stages.graders.grading_rig import CountingPool, grade

ARGUMENTS = {"length": "length:10", "constant": "constant:0", "sleep": "sleep:0", "crash": "crash:0"}
GIVEN = {"format": ("format:.*a.*",)}
NEIGHBOUR = GradeRequest("exact", "5", "5")
DEADLINE_S = 10.0  # far above the time of any grader, and below the time of anything quadratic
IN_STAGE_S = 2.0  # of processor time, likewise

INSTRUCTIONS: dict[str, dict[str, object]] = {
    "number_words": {"num_words": 1, "relation": "at least"},
    "number_placeholders": {"num_placeholders": 1},
    "number_highlighted_sections": {"num_highlights": 1},
    "json_format": {},
    "title": {},
    "number_sentences": {"num_sentences": 1, "relation": "at least"},
    "number_paragraphs": {"num_paragraphs": 1},
    "postscript": {"postscript_marker": "P.P.S"},
    "multiple_sections": {"section_spliter": "SECTION", "num_sections": 1},
    "keywords:frequency": {"keyword": "a a", "frequency": 1, "relation": "at least"},
}
CHOICES = {"choices": ["red", "green", "blue", "grey"], "correct_letter": "B"}
METADATA = json.dumps({**CHOICES, "instruction_id_list": [*INSTRUCTIONS], "kwargs": [*INSTRUCTIONS.values()]})

# In a box, on the line of the answer, and behind a mark: what sympy, Python or a pattern could choke on.
WORST = (
    "10^10^10", "2^{10^8}", "(10^7)!", "1e999999999", "{" * 2000 + "}" * 2000, "(" * 5000,
    r"\int_0^\infty e^{-x^2}\sin(x^3)dx", "\ud8005\udfff",
)  # fmt: skip
CONTENTS = (
    *WORST, "", " \n\t ", "9^{9^{9^9}}", "((9^{99})^{99})^{99}", "factorial(10^7)", "9!!!!!!", r"\binom{10^9}{10^8}",
    "(a+b+c+d)^{99}(e+f)^{99}", r"(\sqrt2+\sqrt3+\sqrt5+\sqrt7)^{500}", r"\sum_{i=1}^{10^9} i!", r"\sinh(10^{100})",
    r"\frac{1}{1+" * 60 + "1" + "}" * 60, r"\log(" * 60 + "2" + ")" * 60, "{" * 5000, "-" * 900 + "1", "|" * 900,
    "1" * 1000, "a" * 1000, "__import__('os').system('exit 1')", "x.__class__.__mro__", "f'{open(0)}'", "5\x005",
    "\u202e5\u2066\u200b", "e" + "\u0301" * 900, "🙂" * 200, "((((a+)+)+)+" * 80, "nan", "-inf",
    r"the label is 5, so \boxed{5} Answer: 5 #### 5",
)  # fmt: skip
# Whole responses: megabytes, marks and boxes without end, and what patterns that try every start twice are slow on.
WHOLE = (
    "a" * 1_000_000, " " * 1_000_000, "1," * 500_000, "[*<(\\boxed{" * 90_000, "\n" * 1_000_000, "*a" * 500_000,
    "a a. " * 200_000, "Answer: 5\n" * 10_000, "answer " * 100_000, "final  answer  " * 60_000, "#### " * 50_000,
    "\\boxed " * 20_000 + " " * 50_000, "<think>" * 100_000, "\\" * 100_001, '"' * 100_000, "[" * 100_000,
    "\ud800" * 10_000, "```json" + " " * 300_000 + "x", "<<a" * 100_000, "\n \t" * 100_000 + "x", "a." * 150_000,
    "a the " * 100_000, "#### 1e999999999", "#### \ud8005", "####" * 50_000 + "1", "0" * 299 + "5", "1." * 150,
    "#### " + "1" * 300_000, "$-" * 100_000,
    *(sign * 200_000 + "x" for sign in ".!?*_#$-,;:'`~<>[]{}()|^/&%@ \n"),  # a run of one sign, then something else
)  # fmt: skip


def names() -> list[str]:
    """A usable name of every grader of the table, with the box in front where it may stand there."""
    found: list[str] = []
    for name in GRADERS:
        if name == "ifbench":
            continue  # published code, whose import takes seconds; the deadline is what holds for it
        for usable in GIVEN.get(name, (ARGUMENTS.get(name, name),)):
            found.append(usable)
            if name not in NO_TEXT:
                found.append(f"boxed_{usable}")
    return found


def wrapped(content: str) -> str:
    return f"\\boxed{{{content}}} Answer: {content} \n#### {content}\n\\boxed{{{content}}}"


async def attack(responses: list[tuple[str, str]]) -> None:
    """Grade (response, label) with every grader in one pool, a healthy neighbour behind each."""
    async with CountingPool(1, DEADLINE_S, retries=0) as pool:
        for name in names():
            items = []
            for response, label in responses:
                items += [GradeRequest(name, response, label, METADATA, 3, 7), NEIGHBOUR]
            grades = await pool.grade_many(items)
            assert (pool.timeouts, pool.crashes) == (0, 0), name
            for request, found in zip(items, grades, strict=True):
                check(request, found)


def check(request: GradeRequest, found: Grade) -> None:
    about = (request.grader, request.response[:60], found)
    assert isinstance(found, Grade), about
    assert math.isfinite(found.score), about
    assert (found.error is None) == (found.status == "ok"), about
    assert len(found.extracted or "") <= 1024, about
    (found.extracted or "").encode("utf-8")
    msgspec.json.encode(found)
    if request == NEIGHBOUR:
        assert (found.score, found.error) == (1.0, None), about


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in names() if find_grader(name).in_stage])
def test_graders_that_run_in_the_stage_are_quick(name: str) -> None:
    """They have neither a deadline nor a process: a response that is slow to grade would stop the whole stage."""
    many = json.dumps(["a b", "the a", "5"] * 300)
    for response in (*map(wrapped, CONTENTS), *WHOLE):
        response = response[:200_000]
        for label in ("5", many, response[:5_000]):
            began = time.process_time()
            found = grade_request(GradeRequest(name, response, label, METADATA, 3, 7))
            assert time.process_time() - began < IN_STAGE_S, (name, response[:60], label[:60])
            check(GradeRequest(name, response), found)


@pytest.mark.full
async def test_hostile_answers() -> None:
    await attack([(wrapped(content), label) for content in CONTENTS for label in ("5", content)])


@pytest.mark.full
async def test_hostile_responses() -> None:
    await attack([(response, "5") for response in WHOLE])


async def test_the_worst_answers_in_one_process() -> None:
    """The quick version: the graders that ask sympy, one process, nobody dies."""
    items = [
        GradeRequest(name, f"</think>\\boxed{{{content}}}", "5", METADATA)
        for content in WORST
        for name in ("math", "math:compat", "math_verify", "deepscaler")
    ]
    items += [GradeRequest("math", f"\\boxed{{{n}/2}}", f"\\frac{{{n}}}{{2}}") for n in (1, 3)]
    async with CountingPool(1, DEADLINE_S, retries=0) as pool:
        grades = await pool.grade_many(items)
        assert (pool.started, pool.timeouts, pool.crashes) == (1, 0, 0)
    assert [found.score for found in grades] == [0.0] * (len(items) - 2) + [1.0, 1.0]
    assert [found.error for found in grades] == [None] * len(items)


@pytest.mark.parametrize("label", [3, 2.5, True, ["5"], {"a": 1}, float("nan"), None, "", "\ud800", "\x00"])
def test_labels_of_any_type_have_a_defined_outcome(label: object) -> None:
    """A new grader that needs an argument wants a line in ARGUMENTS or GIVEN."""
    for name in names():
        needs_label = find_grader(name).needs_label
        for response in ("5", r"</think>\boxed{5}", ""):
            found = grade(name, response, label, json.loads(METADATA))
            assert math.isfinite(found.score)
            assert (found.error is None) == (found.status == "ok")
            assert not (label in (None, "") and needs_label and found.error is None), name


@pytest.mark.parametrize("name", ["math", "math:compat", "math_verify", "math_strict", "math_hendrycks", "deepscaler"])
def test_a_label_without_an_answer_is_an_error_of_the_data(name: str) -> None:
    for label in (None, "", " ", r"\boxed{}", r" \boxed{ } "):
        found = grade(name, r"</think>\boxed{}", label)
        assert (found.status, found.is_correct) == ("error", None)


def test_the_caps_are_flagged() -> None:
    long_answer = grade("math_strict", r"\boxed{" + "7" * 1025 + "}", "7")
    assert (long_answer.status, long_answer.score, long_answer.parts["oversize"]) == ("ok", 0.0, 1.0)
    cut = grade("math", r"\boxed{7}" + " " * 100_000, "7")
    assert (cut.score, cut.parts["oversize"]) == (0.0, 1.0)
    assert grade("math", r"\boxed{7}" + " " * 90_000, "7").parts == {"oversize": 0.0, "refused": 0.0}
    refused = grade("math", r"\boxed{2^{10^8}}", "7")
    assert (refused.status, refused.parts["refused"]) == ("ok", 1.0)


@pytest.mark.parametrize(("text", "words"), [
    ("2^{10^8}", "an exponent above 9999"), ("9^{9^{9^9}}", "an exponent above 9999"),
    ("x^{y^{z^w}}", "more than 2 powers"), ("2^3^4", "a power of a power without brackets"),
    ("(9^{999})^{999}", "more than 20000 digits"), (r"\frac{2^{9999}}{3}^{99}", "more than 20000 digits"),
    (r"|2^{9999}|^{99}", "more than 20000 digits"), (r"\{2^{9999}\}^{99}", "more than 20000 digits"),
    (r"\left(2^{9999}\right)^{99}", "more than 20000 digits"), ("1001!", "the factorial of a number above 1000"),
    ("7!!", "the factorial of a number above 1000"), ("2^{9!}", "a factorial in an exponent|an exponent above"),
    (r"\binom{10^9}{5}", "of a large number"), ("(x+1)^{999}", "more than 500 terms"),
    (r"(\sqrt{2}+\sqrt{3})^{999}", "more than 500 terms"), (r"\int x", "which would be evaluated"),
    (r"\exp(10^9)", "of a number above 9999"), ("1e10000", "an exponent of 4 digits"),
    ("(" * (MAX_DEPTH + 1), "nested deeper than 64"), (r"\sqrt" * 400 + "2", "nested too deeply"),
    ("-" * 200, "signs in a row"), ("a__b", "double underscore"), ("x" * 64, "a word of 64 letters"),
    ("x+" * 3000, "longer than"),
])  # fmt: skip
def test_the_guards_refuse(text: str, words: str) -> None:
    reason = refusal_of(text) or ""
    assert any(word in reason for word in words.split("|"))


@pytest.mark.parametrize("text", [
    *("2^{2023}-1", "e^{x^2}", "2^{2^3}", "x^{2024}", "1000!", r"\binom{100}{50}", r"\frac12^{10}", "(x+1)^{10}"),
    *("(" * MAX_DEPTH, r"90^\circ", r"x^\frac{1}{3}", r"\left(\frac{1+\sqrt5}{2}\right)^{100}", "1,000,000,007"),
    *(r"(-\infty,2)\cup(3,\infty)", r"|x-3|^2+5", r"2^{50\cdot 99}", r"\sqrt[3]{2}", "1e10", "3.14159", ""),
])  # fmt: skip
def test_the_guards_let_answers_pass(text: str) -> None:
    assert refusal_of(text) is None


@settings(max_examples=300, deadline=None)
@given(text=st.text(alphabet="0123456789xy^{}()[]!+-*/.,|\\ frac sqrt binom", max_size=200))
def test_the_guards_say_something_about_any_text(text: str) -> None:
    refusal_of(text)


@given(text=st.text(max_size=200))
def test_one_unicode_form_is_stable_and_writable(text: str) -> None:
    found = plain_form(text)
    found.encode("utf-8")
    assert plain_form(found) == found
