"""The calculator: equal to exact arithmetic on safe expressions, an instant answer on hostile ones."""

from __future__ import annotations

import asyncio
import json
import sys
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema.data import ToolsConfig
from stages.agents.stage import PlainTools
from stages.tools.calculator import Calculator, evaluate, format_number
from stages.tools.registry import ToolProcess
from stages.tools.tool import RESULT_CHARS, Tool, ToolCallError
from stages.workers import process as worker_process
from tests.stages.stage_rig import alive, ended, until
from tests.stages.toolkit.test_tool_calls import PATH, call_text, opened

integers = st.integers(0, 10_000).map(str)
integer_expressions = st.recursive(
    integers,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "//", "%"]), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        inner.map(lambda text: f"(-{text})"),
        st.tuples(inner, st.integers(0, 4)).map(lambda t: f"({t[0]} ** {t[1]})"),
    ),
    max_leaves=6,
)
rational_expressions = st.recursive(
    st.integers(0, 99).map(lambda n: f"Fraction({n})") | st.integers(1, 99).map(lambda n: f"Fraction('0.{n:02}')"),
    lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
    max_leaves=6,
)


def python_value(expression: str) -> int | Fraction | None:
    """What the interpreter makes of an expression that the test itself wrote; None for a division by zero."""
    try:
        value: int | Fraction = eval(expression, {"Fraction": Fraction})  # the test's own text
    except ZeroDivisionError:
        return None
    return value


@given(expression=integer_expressions)
def test_integers_equal_pythons(expression: str) -> None:
    wanted = python_value(expression)
    try:
        found = evaluate(expression)
    except ToolCallError as error:
        refused = str(error)
        assert (wanted is None and refused == "division by zero") or "too large" in refused
    else:
        assert found == str(wanted)


@given(expression=rational_expressions)
def test_rationals_equal_fractions(expression: str) -> None:
    wanted = python_value(expression)
    written = expression.replace("Fraction('", "").replace("')", "").replace("Fraction(", "(")
    if wanted is None:
        with pytest.raises(ToolCallError, match="division by zero"):
            evaluate(written)
        return
    found = evaluate(written)
    assert Fraction(found) == pytest.approx(wanted, rel=1e-14)
    if Fraction(wanted).denominator in (1, 2, 4, 5, 8, 10, 16, 20, 25, 100):
        assert Fraction(found) == wanted


@given(value=st.fractions())
def test_what_is_written_is_what_is_meant(value: Fraction) -> None:
    assert float(Fraction(format_number(value))) == pytest.approx(float(value), rel=1e-14)


@pytest.mark.parametrize(("expression", "answer"), [
    ("7/2", "3.5"), ("0.1+0.2", "0.3"), ("1/3", "0.333333333333333"), ("-1/3", "-0.333333333333333"),
    ("-1/8", "-0.125"), ("-7//2", "-4"), ("7.5//2", "3"), ("2**-1", "0.5"), ("2**0.5", "1.4142135623731"),
    ("4**0.5", "2"), ("0**0", "1"), ("(-1)**1000000001", "-1"), ("(-1)**(10**30)", "1"), ("0**(10**9)", "0"),
    ("1e3", "1000"), ("1e-7", "0.0000001"), ("1_000", "1000"), (" ( 3 +\n4 ) * 2 ", "14"), ("6 × 7 ÷ 2 − 1", "20"),
    ("10**20 / 3", "3.33333333333333e+19"), ("2**1000 // 2**990", "1024"), ("0.0", "0"), ("-0.0", "0"),
])  # fmt: skip
def test_answers(expression: str, answer: str) -> None:
    assert evaluate(expression) == answer


@pytest.mark.parametrize(("expression", "words"), [
    ("", "is empty"), (" \n", "is empty"), ("9**9**9", "the power is too large"),
    ("(9**999)**(9**999)", "the power is too large"), ("2**-100000000", "the power is too large"),
    ("(2**4000)*(2**4000)", "too large"), ("1e999", "too large"), ("9" * 900 + "**9", "the power is too large"),
    ("1/0", "division by zero"), ("1//(2-2)", "division by zero"), ("0**-1", "division by zero"),
    ("(-8)**0.5", "no real power"), ("(2**3000)**0.5", "too large"), ("2^3", "write \\*\\* for a power"),
    ("1,000+1", "without thousands separators"), ("1+", "not valid arithmetic"), ("x=1", "not valid arithmetic"),
    ("1\x00", "not valid arithmetic"), ("(" * 400 + ")" * 400, "not valid arithmetic"),
    ("-" * 999 + "1", "nested deeper|not valid arithmetic"), ("1" + "+1" * 400, "nested deeper|not valid arithmetic"),
    ("1" * 1001, "longer than 1000 characters"), ("__import__('os').system('true')", "only numbers"),
    ("().__class__.__bases__", "only numbers"), ("'a'*10", "only numbers"), ("True+1", "only numbers"),
    ("1j", "only numbers"), ("~1", "only numbers"), ("1<<100000000000", "only numbers"), ("x", "only numbers"),
    ("\ud800", "not valid arithmetic"),
])  # fmt: skip
def test_refusals(expression: str, words: str) -> None:
    with pytest.raises(ToolCallError, match=words):
        evaluate(expression)


@given(expression=st.text(alphabet="0123456789.eEj+-*/%()_,^ ~<>=xX'\"[]{}:;\n", max_size=60) | st.text(max_size=60))
def test_any_text_is_answered_or_refused(expression: str) -> None:
    try:
        assert evaluate(expression)
    except ToolCallError as error:
        assert str(error)  # noqa: PT017


async def test_arguments_of_the_tool() -> None:
    tool = Calculator()
    assert await tool.call({"expression": "2*3"}) == "6"
    assert await tool.call("2*3") == "6"
    assert await tool.call({"expression": 7}) == "7"
    for bad in ({}, {"expression": None}, {"expression": True}, {"expr": "1"}):
        with pytest.raises(ToolCallError, match="needs the text argument 'expression'"):
            await tool.call(bad)


# Tools that misbehave, in their processes: a call has an answer in time, and the next one is served.


LONG_S = 60.0  # never reached
CRASHED = "this call or another one crashed or blocked it"


async def ask(tools: dict[str, Tool], text: str, deadline_s: float = LONG_S) -> str:
    """Of the only tool."""
    return await ask_one(tools, *tools, text, deadline_s)


async def ask_one(tools: dict[str, Tool], name: str, text: str, deadline_s: float = LONG_S) -> str:
    """Of several tools."""
    tool = tools[name]
    assert isinstance(tool, ToolProcess)
    tool.deadline_s = deadline_s
    content = json.dumps({"name": name, "arguments": {"text": text}})
    return await PlainTools(tools, ToolsConfig()).answer(call_text(content))


@pytest.mark.slow
@pytest.mark.parametrize(("tool", "text", "answer"), [
    ("give_up", "x", "error: CancelledError: "),
    ("leave", "x", "error: SystemExit: 3"),
    ("crash", "crash", "error: its worker process ended with exit status 7; " + CRASHED),
    ("block", "block", "error: no answer within 0.2 s"),
    ("spin", "spin", "error: no answer within 0.2 s"),
    ("deaf", "deaf", "error: no answer within 0.2 s"),
])  # fmt: skip
async def test_a_tool_that_misbehaves_is_answered_for_and_serves_again(
    tool: str, text: str, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_process, "_CANCEL_S", 0.2)
    async with opened(f"{PATH}:{tool}") as tools, asyncio.timeout(LONG_S):
        for _ in range(2):  # each time after a call that was served
            # A process that is killed for its deaf call takes the calls along that it serves beside it.
            while (found := await ask(tools, text, 0.2 if "within" in answer else LONG_S)) != answer:
                assert found.endswith(CRASHED)
            while (found := await ask(tools, "again")) not in ("again", answer):
                assert found.endswith(CRASHED)
        assert found == ("again" if text != "x" else answer)


@pytest.mark.slow
async def test_a_blocked_tool_holds_up_no_other_tool_and_loses_only_its_own_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_process, "_CANCEL_S", 0.2)
    async with opened(f"{PATH}:block", f"{PATH}:echo") as tools, asyncio.timeout(LONG_S), asyncio.TaskGroup() as tasks:
        assert await ask_one(tools, "block", "served") == "served"
        waits = tasks.create_task(ask_one(tools, "block", "wait"))
        blocked = tasks.create_task(ask_one(tools, "block", "block", 0.5))
        assert [await ask_one(tools, "echo", str(n)) for n in range(5)] == ["0", "1", "2", "3", "4"]
        assert await blocked == "error: no answer within 0.5 s"
        assert (await waits).endswith(CRASHED)
        assert await ask_one(tools, "block", "served") == "served"


@pytest.mark.slow
async def test_a_result_without_end_is_cut() -> None:
    async with opened(f"{PATH}:much") as tools:
        found = await ask(tools, "x")
    assert found == "x" * RESULT_CHARS + f"\n[cut: the first {RESULT_CHARS} of 100000000 characters]"


@pytest.mark.slow
async def test_a_cancelled_call_is_reported_to_the_tool_and_its_process_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "note"
    async with opened(f"{PATH}:note") as tools, asyncio.timeout(LONG_S):
        call = asyncio.ensure_future(ask(tools, str(file)))
        await until(lambda: file.exists() and file.read_text() != "")
        worker, daemon = map(int, file.read_text().split())
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await until(lambda: file.read_text() == "cancelled")
        assert alive(worker)
        assert alive(daemon)
    for pid in (worker, daemon):
        await ended(pid)


@pytest.mark.slow
async def test_a_tool_that_cannot_start_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    async with opened(f"{PATH}:echo") as tools:
        assert await ask(tools, "x") == "error: its worker process does not start: the error output says why"


@pytest.mark.slow
async def test_a_tool_that_allocates_without_bound_ends_alone_with_the_reason() -> None:
    async with opened(f"{PATH}:hoard", f"{PATH}:echo", memory_gb=0.25) as tools, asyncio.timeout(LONG_S):
        assert await ask_one(tools, "echo", "served") == "served"
        hoarded = await ask_one(tools, "hoard", "all")
        assert hoarded.endswith("process ended: this call or another one wanted more memory than it may have")
        assert await ask_one(tools, "hoard", "nothing") == "nothing", "another process serves"
        assert await ask_one(tools, "echo", "served") == "served"
