"""The graders of mathematics: pairs of answers and labels for `math`, and the arithmetic of `math:compat`.

The pairs are in answers.txt. Values of `compat` are held against exact fractions.
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stages.graders.math.answer import math_style
from stages.graders.math.compat import NotArithmetic, compat_equal, equal_values, plain_arithmetic
from stages.graders.math.equality import same_answer
from stages.graders.math.mathematics import SYMBOLIC_S, prepare
from stages.workers.serve import CpuLimitError, cpu_limit
from tests.stages.graders.grading_rig import grade

TABLE = Path(__file__).with_name("answers.txt").read_text()
BLOCKS = [block.strip().splitlines() for block in TABLE.split("\n== ")[1:]]
GROUPS = {title: [tuple(line.split(" || ", 1)) for line in lines] for title, *lines in BLOCKS}
PAIRS = [(*pair, int(title.startswith("RIGHT"))) for title, pairs in GROUPS.items() for pair in pairs]
RIGHT = [pair[:2] for pair in PAIRS if pair[2] == 1 and "=" not in str(pair)]


def test_the_table_is_long_and_says_nothing_twice() -> None:
    assert len(PAIRS) >= 400
    assert len({pair[:2] for pair in PAIRS}) == len(PAIRS)
    assert min(sum(score == wanted for *_, score in PAIRS) for wanted in (0, 1)) >= 150


@pytest.mark.parametrize(("answer", "label", "score"), PAIRS)
def test_math(answer: str, label: str, score: int) -> None:
    found = grade("math", rf"so \boxed{{{answer}}}.", label)
    assert (found.score, found.error, found.status) == (score, None, "ok")


@pytest.mark.parametrize("group", ["letters and words", "negations and what is hidden", "thousands"])
def test_math_verify_takes_no_wrong_answer_either(group: str) -> None:
    for answer, label in GROUPS[f"WRONG: {group}"]:
        assert grade("math_verify", rf"\boxed{{{answer}}}", label).score == 0.0, (answer, label)


@pytest.mark.parametrize(("answer", "label"), RIGHT[::5])
def test_equality_has_no_sides(answer: str, label: str) -> None:
    assert same_answer(label, answer) is True


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


def decimals() -> st.SearchStrategy[Sum]:
    return st.decimals(min_value=0, max_value=99, places=2, allow_nan=False).map(
        lambda x: (f"{x:f}", Fraction(f"{x:f}"))
    )


def combined(children: st.SearchStrategy[Sum]) -> st.SearchStrategy[Sum]:
    def join(parts: tuple[Sum, str, Sum]) -> Sum:
        (left, one), sign, (right, other) = parts
        match sign:
            case "+":
                return f"({left}+{right})", one + other
            case "-":
                return f"({left}-{right})", one - other
            case "implied":
                return f"({left})({right})", one * other
            case "*":
                return f"({left}*{right})", one * other
            case _:
                assume(other != 0)
                return f"({left}/({right}))", one / other

    return st.tuples(children, st.sampled_from(["+", "-", "*", "implied", "/"]), children).map(join)


SUMS = st.recursive(decimals(), combined, max_leaves=6)


@settings(max_examples=80, deadline=None)
@given(expression=SUMS, change=st.fractions(max_denominator=50))
def test_values_are_those_of_exact_fractions(expression: Sum, change: Fraction) -> None:
    text, value = expression
    written = f"({value.numerator})/({value.denominator})"
    assert equal_values(text, written)
    if change:
        assert not equal_values(text, f"{written}+({change.numerator})/({change.denominator})")


@settings(max_examples=40, deadline=None)
@given(
    a=st.integers(-9, 9), b=st.integers(-9, 9), c=st.integers(-9, 9), letters=st.sampled_from(["xy", "ab", "nm", "st"])
)
def test_polynomials_multiply_out(a: int, b: int, c: int, letters: str) -> None:
    x, y = letters[0], letters[1]
    product = f"({x}+({a}))({x}+({b}){y})"
    expanded = f"{x}^2+({b}){x}{y}+({a}){x}+({a * b}){y}"
    assert equal_values(product, expanded)
    assert equal_values(f"{product}+{c}", expanded) == (c == 0)


@pytest.mark.parametrize(
    "text",
    [
        *("2^10", "2^(3)", "2^3^2", "x2", "a+b+c", "f'", "1..2", "()", "2+", "sqrt2", "--", "---1", "x_1", "1,2", ""),
        *("__import__('os')", "x.y", "x[0]", "lambda: 1", "1 if 1 else 2", "'a'", "1;2", "sqrt(1,2)", "pi(2", "2^1.5"),
        "(" * 300,
    ],
)
def test_what_is_no_plain_arithmetic_is_refused(text: str) -> None:
    with pytest.raises(NotArithmetic):
        equal_values(text, "x+1")


def test_quotients_by_zero_equal_nothing() -> None:
    assert not equal_values("1/0", "1/0")
    assert not equal_values("1/(x-x)", "2/0")


@settings(max_examples=200, deadline=None)
@given(
    one=st.text(alphabet="0123456789xy+-*/^()[]{},.= \\", max_size=12),
    other=st.text(alphabet="0123456789xy+-*/^()[]{},.= \\", max_size=12),
)
def test_comparison_is_symmetric_and_holds_for_the_same_text(one: str, other: str) -> None:
    assert compat_equal(one, one)
    assert compat_equal(one, other) == compat_equal(other, one)


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        (r"\frac{1}{2}", "1/2"),
        (r"\frac{x+1}{2}", "((x+1)/(2))"),
        (r"\frac{\frac{1}{2}}{x}", "((1/2)/(x))"),
        (r"2\frac{1}{3}", "(2+1/3)"),
        (r"\sqrt{\frac{1}{2}}", "sqrt(1/2)"),
        (r"3\cdot 10^{2}", "3*10^2"),
        (r"x^{n+1}", "x^(n+1)"),
        (r"5\text{ or }6", "5,6"),
        ("3.5 million", "3.5*10^6"),
        ("12 inches", "12"),
        ("1,234,567", "1234567"),
        ("7.000", "7"),
        (r"\left( 1 , 2 \right)", "(1,2)"),
        (r"\mathbb{R}", r"\mathbb{r}"),
    ],
)
def test_one_line_of_arithmetic(text: str, plain: str) -> None:
    assert plain_arithmetic(text) == plain


@pytest.mark.parametrize(
    ("text", "styled"),
    [
        (r"\dfrac12", r"\frac{1}{2}"),
        (r"\frac1{72}", r"\frac{1}{72}"),
        (r"\sqrt3", r"\sqrt{3}"),
        ("x = 7", "7"),
        ("area = 7", "area=7"),
        ("a=b=7", "a=b=7"),
        (".25", "0.25"),
        (".5", r"\frac{1}{2}"),
        ("0.5", r"\frac{1}{2}"),
        ("3/4", r"\frac{3}{4}"),
        ("x/4", "x/4"),
        (r"10\text{ cm}", "10"),
        (r"5 \text{ or } 4", "5"),
        (r"\$12", "12"),
        (r"45^\circ", "45"),
        ("1 \\\\ 2", "1\\2"),
    ],
)
def test_the_form_of_the_math_data_set(text: str, styled: str) -> None:
    assert math_style(text) == styled
