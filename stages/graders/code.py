"""`code`: a Python program passes tests, each in a process that is locked down (see `stages/sandbox`).

The program is the last ```python block of the answer, else its last block, else all of it. The tests are in the row's
metadata under `tests`, or in the label:

- a list of `{"input": text, "output": text}`: the program reads the input and prints the output;
- the same with a function's name in `fn_name`: it is called with `input` (a list of arguments) and returns `output`;
- a list of assertions, or the label as plain text: Python that runs after the program, in its namespace;
- `{"inputs": [...], "outputs": [...]}`, optionally with `fn_name`, is read as the first or second form.

Printed text is compared line by line without trailing spaces and blank lines at the end; numbers that a function
returns may differ by 1e-9 of their size unless both are integers.

Invariants: the score is 1 if every test passed, else 0; `pass_frac` is the share of passed tests; a response without a
program is wrong, a row without tests is an error; expected results never enter the process that runs the program,
except as assertions.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from stages.graders.grade import EXTRACTED_CHARS, Grade, Grader, GradeRequest, clean, failed
from stages.graders.math.answer import after_thought
from stages.sandbox.run import CallCase, Case, CaseResult, CheckCase, Limits, SandboxError, StdinCase, run_cases

DEFAULT_TOTAL_S: Final = 8.0
CASE_S: Final = 4.0  # of one test, unless the metadata has `time_limit_s`
PROGRAM_CHARS: Final = 100_000
MAX_TESTS: Final = 1000
BAD_ENDS: Final = ("failed", "exit", "killed", "timeout", "output")  # of a test; see `sandbox.cases.Result`
_LANGUAGES = frozenset(("python", "py", "python3"))
_TOLERANCE = 1e-9


Test = tuple[Case, Any]  # one case and its expected output: text (stdin), a JSON value (call) or the token (check)


def code_grader(argument: str | None) -> Grader:
    """`code` or `code:SECONDS`, the time of all tests of one response. Raises ValueError."""
    total_s = DEFAULT_TOTAL_S if argument is None else float(argument)
    if not (math.isfinite(total_s) and total_s > 0):
        raise ValueError("the time must be above 0 seconds")
    return Grader(partial(grade_code, total_s), in_stage=False)


def grade_code(total_s: float, request: GradeRequest) -> Grade:
    """Run all tests. An unusable row or machine is a failed grade; everything a program can do is 0 or 1."""
    metadata = json.loads(request.metadata)
    try:
        tests = read_tests(metadata, request.label)
        case_s = float(limit := metadata.get("time_limit_s", CASE_S))
        if not (math.isfinite(case_s) and case_s > 0):
            raise ValueError(f"time_limit_s is {limit}, and must be a number of seconds above 0")
    except (ValueError, TypeError) as error:
        return failed(f"the tests of the row cannot be used: {error}")
    program = extract_program(request.response)
    if program is None or not program.strip():
        return Grade(0.0, False, {"pass_frac": 0.0})
    try:
        results = run_cases(clean(program), [case for case, _ in tests], Limits(total_s, case_s))
    except SandboxError as error:
        return failed(str(error))
    passed = sum(passes(test, result) for test, result in zip(tests, results, strict=True))
    parts = {"pass_frac": passed / len(tests)}
    for reason in BAD_ENDS:
        parts[f"{reason}_frac"] = sum(result.how == reason for result in results) / len(tests)
    correct = passed == len(tests)
    return Grade(float(correct), correct, parts, clean(program[:EXTRACTED_CHARS]))


def extract_program(response: str) -> str | None:
    """The program of a response; None if its thought never ended. A block that is not closed goes to the end."""
    text = after_thought(response[-PROGRAM_CHARS:])
    if text is None:
        return None
    blocks: list[tuple[str, list[str]]] = []
    inside = False
    for line in text.splitlines():
        fence = line.strip()
        if fence.startswith("```"):
            if not inside:
                blocks.append((fence.strip("`").strip().lower(), []))
            inside = not inside
        elif inside:
            blocks[-1][1].append(line)
    python = [lines for language, lines in blocks if language in _LANGUAGES]
    chosen = python or [lines for _, lines in blocks]
    return "\n".join(chosen[-1]) if chosen else text


def read_tests(metadata: dict[str, Any], label: str | None) -> list[Test]:
    """The tests of a row. Raises ValueError with the reason."""
    given = metadata.get("tests")
    if given is None:
        given = _from_label(label)
    name = metadata.get("fn_name")
    if isinstance(given, dict):
        name, inputs, outputs = given.get("fn_name", name), given.get("inputs"), given.get("outputs")
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise ValueError("a dict of tests needs 'inputs' and 'outputs', two lists of one length")
        given = [{"input": a, "output": b} for a, b in zip(inputs, outputs, strict=True)]
    if not isinstance(given, list) or not given:
        raise ValueError("metadata.tests (or the label) must be a list of at least one test")
    if len(given) > MAX_TESTS:
        raise ValueError(f"{len(given)} tests are too many, at most {MAX_TESTS}")
    if name is not None and not isinstance(name, str):
        raise ValueError("fn_name must be the name of a function")
    return [_read_test(entry, name) for entry in given]


def _from_label(label: str | None) -> Any:
    if label is None or not label.strip():
        raise ValueError("there are none in metadata.tests and the label is empty; check --label-key and the data")
    try:
        value = json.loads(label)
    except ValueError:
        return [label]  # assertions as they stand
    return value if isinstance(value, list | dict) else [label]


def _read_test(entry: Any, name: str | None) -> Test:
    if isinstance(entry, str):
        token = secrets.token_hex(16)
        return CheckCase(entry, token), token
    if not isinstance(entry, dict) or "input" not in entry or "output" not in entry:
        raise ValueError("a test is a dict with 'input' and 'output', or an assertion as text")
    given, wanted = entry["input"], entry["output"]
    if name is not None:
        return CallCase(name, given if isinstance(given, list) else [given]), wanted
    if not isinstance(given, str) or not isinstance(wanted, str):
        raise ValueError("'input' and 'output' of a test are text; for a function's arguments set fn_name")
    return StdinCase(given), wanted


def passes(test: Test, result: CaseResult) -> bool:
    """Whether a result is what the test wants."""
    case, output = test
    if result.how != "ok":
        return False
    if isinstance(case, StdinCase):
        return _lines(result.stdout) == _lines(output)
    if isinstance(case, CheckCase):
        return bool(result.value == output)
    try:
        value = json.loads(result.value)
    except (ValueError, RecursionError):
        return False
    return same(value, output)


def _lines(text: str) -> Sequence[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def same(value: Any, wanted: Any) -> bool:
    """Whether two JSON values are equal; true is not 1, and numbers with a fraction may differ by a 1e-9th."""
    if isinstance(value, list) and isinstance(wanted, list):
        return len(value) == len(wanted) and all(map(same, value, wanted))
    if isinstance(value, dict) and isinstance(wanted, dict):
        return value.keys() == wanted.keys() and all(same(value[key], wanted[key]) for key in wanted)
    if isinstance(value, bool) or isinstance(wanted, bool):
        return value is wanted
    if isinstance(value, float) or isinstance(wanted, float):
        if not (isinstance(value, int | float) and isinstance(wanted, int | float)):
            return False
        try:
            return value == wanted or math.isclose(value, wanted, rel_tol=_TOLERANCE)
        except OverflowError:  # an integer beyond the range of floats
            return False
    return bool(value == wanted)
