"""The arithmetic of the `compat` dialect against exact fractions, and properties of its comparisons."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stages.graders.math.answer import math_style
from stages.graders.math.compat import NotArithmetic, compat_equal, equal_values, plain_arithmetic

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
