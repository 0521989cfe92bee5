"""Rule graders: golden tables, names and arguments."""

from __future__ import annotations

import math
import sys
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stages.graders.grade import Grade, GradeRequest, UnknownGraderError, as_grade
from stages.graders.math.answer import last_box, unboxed
from stages.graders.math.compat import NotArithmetic, compat_equal, equal_values
from stages.graders.math.equality import same_answer
from stages.graders.math.final_line import label_number, last_number, marked_number, math_dapo_compute_score
from stages.graders.math.mathematics import SYMBOLIC_S, prepare
from stages.graders.math.reading import MAX_DEPTH, UnreadableError, read
from stages.graders.registry import choose_auto, find_grader, grade_request, refusal
from stages.graders.synthetic import parse_durations, uniform
from stages.workers.serve import CpuLimitError, cpu_limit
from tests.stages.graders.grading_rig import grade

PATH = "tests.stages.graders.sample_graders"
TEXT_GRADERS = ["auto", "exact", "contains", "boxed", "gsm8k", "gsm8k_flex", "boxed_exact", "boxed_gsm8k_flex"]


@given(value=st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-(10**9), max_value=10**9))
def test_gsm8k_reads_numbers_as_they_are_written(value: Decimal) -> None:
    for written in (f"{value:f}", f"{value:,f}"):
        assert label_number(written) == value
        marked: Any = marked_number(f"noise 12 #### {written}.")
        flexible: Any = last_number(f"noise 12 = {written} apples")
        assert Decimal(marked.replace(",", "")) == Decimal(flexible.replace(",", "")) == value


@given(content=st.text(alphabet="ab{}\\ ^,", max_size=30))
def test_a_balanced_box_gives_its_content(content: str) -> None:
    depths, escaped = [0], False
    for sign in content:
        depths.append(depths[-1] + (0 if escaped else {"{": 1, "}": -1}.get(sign, 0)))
        escaped = sign == "\\" and not escaped
    if min(depths) == depths[-1] == 0 and not escaped:
        assert last_box("x \\boxed{y} \\boxed{" + content + "} z") == (content.strip() or None)


def test_unboxing_of_labels_is_done_once() -> None:
    assert unboxed(r" \boxed{\text{a}} ") == r"\text{a}"
    assert unboxed(" 5 ") == "5"


@pytest.mark.parametrize(("name", "response", "label", "score"), [
    ("exact", " 42\n", "42 ", 1), ("exact", "42.", "42", 0), ("exact", "the answer is 42", "42", 0),
    ("contains", "the answer is 42", " 42 ", 1), ("contains", "no", "42", 0), ("contains:bc", "abcd", None, 1),
    ("contains:a:b", "xa:by", None, 1), ("contains:bd", "abcd", None, 0), ("boxed_exact", r"so \boxed{42}", "42", 1),
    ("boxed_gsm8k_flex", r"17 \boxed{about 42}", "42", 1), ("boxed_exact", "42", "42", 0),
    ("auto", "#### 5", "x #### 5", 1), ("auto", "5", "5", 1), ("auto", "#### 5", "5", 0),
])  # fmt: skip
def test_text_graders(name: str, response: str, label: str | None, score: int) -> None:
    found = grade(name, response, label)
    assert (found.score, found.is_correct, found.error) == (float(score), bool(score), None)


@pytest.mark.parametrize(("n_tokens", "score"), [(50, -0.5), (100, 0.0), (300, -1.0), (0, -1.0), (125, -0.25)])
def test_length(n_tokens: int, score: float) -> None:
    found = grade("length:100", "whatever", None, n_tokens=n_tokens)
    assert (found.score, found.is_correct) == (score, None)


def test_random_follows_from_the_seed_alone() -> None:
    first = [grade("random", f"response {seed}", None, seed=seed).score for seed in range(200)]
    assert first == [grade("random", "other", "label", seed=seed).score for seed in range(200)]
    assert 70 < sum(first) < 130
    rare = [grade("random:0.1", "", None, seed=seed).score for seed in range(2000)]
    assert 140 < sum(rare) < 260
    assert sum(grade("random:0", "", None, seed=seed).score for seed in range(50)) == 0
    assert sum(grade("random:1", "", None, seed=seed).score for seed in range(50)) == 50


@pytest.mark.parametrize(
    ("text", "mean"), [("0.25", 0.25), ("uniform(0.5, 1.5)", 1.0), ("exponential(2)", 2.0), ("lognormal(1,0)", 1.0)]
)
def test_distributions_of_sleep(text: str, mean: float) -> None:
    draw = parse_durations(text)
    drawn = [draw(uniform(seed, 1), uniform(seed, 2)) for seed in range(4000)]
    assert min(drawn) >= 0
    assert sum(drawn) / len(drawn) == pytest.approx(mean, rel=0.06)


def test_constant_sleep_and_crash() -> None:
    assert grade("constant:-0.5", "x", None) == Grade(-0.5)
    found = grade("sleep:0.001", "x", None, seed=3)
    assert found.score == grade("random", "x", None, seed=3).score
    assert found.parts == {"slept_s": 0.001}
    found = grade("crash", "x", None)
    assert found.status == "error"
    assert "kills grader processes only" in (found.error or "")
    assert grade("crash:0", "x", None).error is None


@pytest.mark.parametrize(("name", "words"), [
    ("exakt", "did you mean 'exact'.*Known: .*gsm8k"),
    ("boxed_exat", "did you mean 'boxed_exact'"),
    ("lenght:5", "did you mean 'length'"),
    ("", "rm_type '' is no grader"),
    ("length", "write length:N"),
    ("length:0", "at least 1 token"),
    ("length:x", "cannot be used"),
    ("constant:nan", "must be finite\\); write constant:X"),
    ("random:1.5", "between 0 and 1"),
    ("exact:1", "takes no argument"),
    ("contains:", "every response contains it"),
    ("sleep:forever", "write sleep:SECONDS"),
    ("sleep:-1", "no number of seconds"),
    ("sleep:uniform(2,1)", "no distribution"),
    ("boxed_length:5", "needs a grader that reads the response"),
    ("no.such.module:f", "importing 'no.such.module' failed"),
    ("os.path:nothing", "has no 'nothing'; check the name after the colon"),
    ("asyncio:sleep", "take these 3 arguments"),
    ("json:dumps", "cannot be called as function\\(response, label, metadata\\)"),
    (f"{PATH}:two_arguments", "take these 3 arguments"),
    (f"{PATH}:prompt_first", "move it behind them"),
    (f"{PATH}:two_more", "take these 3 arguments"),
    (f"{PATH}:not_callable", "no function"),
])  # fmt: skip
def test_names_that_are_refused(name: str, words: str) -> None:
    with pytest.raises(UnknownGraderError, match=words):
        find_grader(name)
    found = grade(name, "x", "x")
    assert found.status == "error"
    assert "UnknownGraderError" in (found.error or "")


@pytest.mark.parametrize("name", TEXT_GRADERS)
@given(response=st.text(), label=st.none() | st.text())
def test_any_text_has_a_defined_score(name: str, response: str, label: str | None) -> None:
    found = grade(name, response, label)
    assert math.isfinite(found.score)
    assert (found.error is None) == (found.status == "ok")
    assert found.error is not None or found.is_correct is (found.score == 1.0)


@pytest.mark.parametrize(
    ("labels", "name"),
    [(["a #### 1", "b\n#### 2,000"], "gsm8k"), (["yes", "no", None, ""], "exact"), (["1", "2"], "exact")],
)
def test_auto_follows_the_labels(labels: list[str | None], name: str) -> None:
    chosen, why = choose_auto(labels)
    assert chosen == name
    assert "sampled labels" in why


def test_auto_does_not_guess() -> None:
    with pytest.raises(UnknownGraderError, match="there are none; set --label-key, or set --rm-type"):
        choose_auto([None, ""])
    with pytest.raises(UnknownGraderError, match="in 1 of 2 sampled labels; set --rm-type"):
        choose_auto(["#### 1", "2"])


def test_custom_graders() -> None:
    assert grade(f"{PATH}:word_count", "a b c", None) == Grade(3.0)
    found = grade(f"{PATH}:detailed", "x", "x", {"level": 2})
    assert found == Grade(0.5, True, {"format": 1.0, "level": 2.0}, "x")
    assert grade(f"{PATH}:async_detailed", "x", "x", {"level": 2}).score == 2.0
    for name in ("detailed", "async_detailed"):
        assert "KeyError: 'level'" in (grade(f"{PATH}:{name}", "x", "x").error or "")


def test_custom_graders_may_be_async_and_get_the_prompt() -> None:
    for name in ("asynchronous", "with_prompt", "any_keywords"):
        request = GradeRequest(f"{PATH}:{name}", "b", prompt="a?")
        assert grade_request(request) == Grade(1.0, extracted="a?b"), name
    group = GradeRequest(f"{PATH}:async_group", "", responses=("b", "cc"), prompt="a?")
    assert [member.score for member in grade_request(group).members] == [3.0, 4.0]


@pytest.mark.parametrize("module", ["my_code", "math_reward", "gsm8k_reward", "my_math"])
def test_a_module_of_the_user_may_be_called_almost_as_a_grader(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no grader" in (refusal(f"{module}:score") or "") or module == "gsm8k_reward"
    (tmp_path / f"{module}.py").write_text("def score(response, label, metadata):\n    return 7.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert refusal(f"{module}:score") is None
    assert module not in sys.modules, "only a grader process imports it"
    assert grade(f"{module}:score", "x", None) == Grade(7.0)


class Scalar:
    """What numpy and torch scalars look like."""

    size = 1

    def item(self) -> float:
        return 0.25


class Text(Scalar):
    """An array of one text."""

    def item(self) -> Any:
        return "7"


@pytest.mark.parametrize(
    ("value", "score"), [(1, 1.0), (0.5, 0.5), (True, 1.0), (Scalar(), 0.25), ({"score": Scalar()}, 0.25)]
)
def test_what_a_grader_may_return(value: object, score: float) -> None:
    assert as_grade(value).score == score


@pytest.mark.parametrize(("value", "words"), [
    (None, "returned NoneType"),
    ("1", "returned str"),
    (float("nan"), "'score' is nan; a grade must be a finite number"),
    (10**400, "'score' is inf"),
    ({"scores": 1}, "needs a number under 'score'; its keys: scores"),
    ({"score": 1, "part": float("inf")}, "'part' is inf"),
    ({"score": 1, "part": [1]}, "'part' in the grader's dict is list"),
    ({"score": 1, "is_correct": 1}, "'is_correct' in the grader's dict is int"),
    ([1.0], "returned list"),
    (Text(), "returned Text"),
    (Grade(float("inf")), "'score' is inf"),
])  # fmt: skip
def test_what_a_grader_may_not_return(value: Any, words: str) -> None:
    found = as_grade(value)
    assert (found.score, found.status) == (0.0, "error")
    assert words in (found.error or "")


# The graders of mathematics: pairs of answers and labels for `math`, and the arithmetic of `math:compat`.


def test_brackets_that_nothing_closes_and_trees_without_end_are_not_read() -> None:
    assert same_answer("(3", "3") is same_answer(r"\frac{1", "1") is False
    for opening, closing in ("(1,", ")"), (r"\{", r"\}"), ("(", ")"):
        read(opening * MAX_DEPTH + "1" + closing * MAX_DEPTH)
        with pytest.raises(UnreadableError, match="nested too deeply"):
            read(opening * (MAX_DEPTH + 1) + "1" + closing * (MAX_DEPTH + 1))


TABLE = Path(__file__).with_name("answers.txt").read_text()
BLOCKS = [block.strip().splitlines() for block in TABLE.split("\n== ")[1:]]
GROUPS = {title: [tuple(line.split(" || ", 1)) for line in lines] for title, *lines in BLOCKS}
PAIRS = [(title, pair) for title, pairs in GROUPS.items() for pair in pairs]
RIGHT = [pair for title, pair in PAIRS if title.startswith("RIGHT") and "=" not in str(pair)]


@pytest.mark.parametrize("title", GROUPS)
def test_math(title: str) -> None:
    wanted = (float(title.startswith("RIGHT")), None, "ok")
    for answer, label in GROUPS[title]:
        found = grade("math", rf"so \boxed{{{answer}}}.", label)
        assert (found.score, found.error, found.status) == wanted, (answer, label)


@pytest.mark.parametrize("group", ["letters and words", "negations and what is hidden", "thousands"])
def test_math_verify_takes_no_wrong_answer_either(group: str) -> None:
    for answer, label in GROUPS[f"WRONG: {group}"]:
        assert grade("math_verify", rf"\boxed{{{answer}}}", label).score == 0.0, (answer, label)


def test_equality_has_no_sides() -> None:
    for answer, label in RIGHT[::5]:
        assert same_answer(label, answer) is True, (answer, label)


def deaf() -> None:
    """What a library catches does not hold the limit up."""
    while True:
        try:
            sum(range(1000))
        except Exception:
            continue


def test_the_limit_of_processor_time_ends_what_takes_too_long_and_nothing_else() -> None:
    with pytest.raises(CpuLimitError, match=r"0\.05 s of processor time"), cpu_limit(0.05):
        deaf()
    with cpu_limit(SYMBOLIC_S):
        sum(range(1000))
    for _ in range(2_000_000):  # no timer is left that would go off now
        pass


def test_a_text_that_uses_up_its_time_is_wrong_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(_answer: str, _label: str) -> bool:
        while True:
            pass

    prepare()  # which compares once, without a limit
    with monkeypatch.context() as patched:
        patched.setattr("stages.graders.math.mathematics.same_answer", endless)
        patched.setattr("stages.graders.math.mathematics.SYMBOLIC_S", 0.05)
        found = grade("math", r"\boxed{x+1}", "x+2")
    assert (found.score, found.is_correct, found.error, found.status) == (0.0, False, None, "timeout")
    assert grade("math", r"\boxed{x+1}", "1+x").score == 1.0


Sum = tuple[str, Fraction]


def combined(children: st.SearchStrategy[Sum]) -> st.SearchStrategy[Sum]:
    def join(parts: tuple[Sum, str, Sum]) -> Sum:
        (left, one), sign, (right, other) = parts
        if sign == "/":
            assume(other != 0)
            return f"({left}/({right}))", one / other
        if sign == "implied":
            return f"({left})({right})", one * other
        return f"({left}{sign}{right})", {"+": one + other, "-": one - other, "*": one * other}[sign]

    return st.tuples(children, st.sampled_from(["+", "-", "*", "implied", "/"]), children).map(join)


DECIMALS = st.decimals(min_value=0, max_value=99, places=2, allow_nan=False).map(lambda x: f"{x:f}")
SUMS = st.recursive(DECIMALS.map(lambda text: (text, Fraction(text))), combined, max_leaves=6)


@settings(max_examples=80, deadline=None)
@given(expression=SUMS, change=st.fractions(max_denominator=50))
def test_values_are_those_of_exact_fractions(expression: Sum, change: Fraction) -> None:
    text, value = expression
    written = f"({value.numerator})/({value.denominator})"
    assert equal_values(text, written)
    if change:
        assert not equal_values(text, f"{written}+({change.numerator})/({change.denominator})")


@settings(max_examples=15)
@given(
    a=st.integers(-9, 9), b=st.integers(-9, 9), c=st.integers(-9, 9), letters=st.sampled_from(["xy", "ab", "nm", "st"])
)
def test_polynomials_multiply_out(a: int, b: int, c: int, letters: str) -> None:
    x, y = letters[0], letters[1]
    product = f"({x}+({a}))({x}+({b}){y})"
    expanded = f"{x}^2+({b}){x}{y}+({a}){x}+({a * b}){y}"
    assert equal_values(product, expanded)
    assert equal_values(f"{product}+{c}", expanded) == (c == 0)


@pytest.mark.parametrize("text", [
    *("2^10", "2^(3)", "2^3^2", "x2", "a+b+c", "f'", "1..2", "()", "2+", "sqrt2", "--", "---1", "x_1", "1,2", ""),
    *("__import__('os')", "x.y", "x[0]", "lambda: 1", "1 if 1 else 2", "'a'", "1;2", "sqrt(1,2)", "pi(2", "2^1.5"),
    "(" * 300,
])  # fmt: skip
def test_what_is_no_plain_arithmetic_is_refused(text: str) -> None:
    with pytest.raises(NotArithmetic):
        equal_values(text, "x+1")


def test_quotients_by_zero_equal_nothing() -> None:
    assert not equal_values("1/0", "1/0")
    assert not equal_values("1/(x-x)", "2/0")


ANSWERS = st.text(alphabet="0123456789xy+-*/^()[]{},.= \\", max_size=12)


@settings(max_examples=200, deadline=None)
@given(one=ANSWERS, other=ANSWERS)
def test_comparison_is_symmetric_and_holds_for_the_same_text(one: str, other: str) -> None:
    assert compat_equal(one, one)
    assert compat_equal(one, other) == compat_equal(other, one)


def test_slimes_score_of_a_maths_answer() -> None:
    """By the answer line, or strictly by the last box of the last 100 characters, which must be the label itself."""
    assert math_dapo_compute_score("so\nAnswer: 34 dollars", "34") == {"score": 1.0, "acc": True, "pred": "34"}
    assert math_dapo_compute_score("Answer: 35", "34") == {"score": -1.0, "acc": False, "pred": "35"}
    assert math_dapo_compute_score("it is \\boxed{34}", "34", strict_box_verify=True)["score"] == 1.0
    assert math_dapo_compute_score("it is \\boxed{34.0}", "34", True) == {"score": -1.0, "acc": False, "pred": "34.0"}
    assert math_dapo_compute_score("\\boxed{34}" + 100 * " ", "34", True) == {"score": -1.0, "acc": False, "pred": None}
