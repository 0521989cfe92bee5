"""`code`: programs that are right, wrong and hostile. Hostile ones must fail their tests and touch nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.graders.code import BAD_ENDS, code_grader, extract_program, grade_code, same
from stages.graders.grade import Grade, GradeRequest
from stages.graders.pool import GraderPool
from stages.graders.registry import find_grader
from stages.sandbox import run as sandbox
from stages.sandbox.lockdown import Deadline
from stages.sandbox.run import CaseResult, Limits, SandboxError, StdinCase, run_cases
from tests.stages.stage_rig import until

SUMS = [{"input": "1 2\n", "output": "3\n"}, {"input": "5 6", "output": "11"}]
ADD = "a, b = map(int, input().split())\nprint(a + b)"


def run(
    program: str, tests: object = SUMS, *, total_s: float = 20.0, label: str | None = None, **metadata: Any
) -> Grade:
    row = metadata if tests is None else {"tests": tests, **metadata}
    return grade_code(total_s, GradeRequest("code", f"```python\n{program}\n```", label, json.dumps(row)))


def attack(program: str, **limits: Any) -> CaseResult:
    """Run one program and say how it went."""
    (result,) = run_cases(program, [StdinCase("")], Limits(total_s=20.0, case_s=5.0, **limits))
    return result


def parts(**shares: float) -> dict[str, float]:
    """Of a grade: what is not named is 0."""
    return dict.fromkeys(("pass_frac", *(f"{how}_frac" for how in BAD_ENDS)), 0.0) | shares


def test_input_and_output() -> None:
    assert find_grader("code:2.5").in_stage is False
    assert run(ADD) == Grade(1.0, True, parts(pass_frac=1.0), ADD)
    half = run("print(3)")
    assert (half.score, half.is_correct, half.parts["pass_frac"]) == (0.0, False, 0.5)
    assert run("print('3  \\n\\n')", SUMS[:1]).score == 1.0
    assert run("import sys\nprint(sum(map(int, sys.stdin.read().split())))").score == 1.0
    assert run(f"if __name__ == '__main__':\n    {ADD.replace(chr(10), chr(10) + '    ')}").score == 1.0


def test_a_deadline_leaves_out_the_time_in_which_the_watcher_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    deadline = Deadline(10.0)
    now += 0.5  # a busy machine
    assert deadline.left_s() == 9.5
    now += 45.0
    assert deadline.left_s() == pytest.approx(9.5, abs=0.1)
    now += 0.9
    assert deadline.left_s() == pytest.approx(8.6, abs=0.1)


def test_a_program_that_ends_badly_fails_though_it_printed_the_answer() -> None:
    assert run("print(3)\nraise ValueError", SUMS[:1]).score == 0.0
    assert run("print(3)\nimport sys\nsys.exit(2)", SUMS[:1]).score == 0.0
    assert run("print(3)\nimport sys\nsys.exit()", SUMS[:1]).score == 1.0
    assert run("print(3", SUMS[:1]).score == 0.0


def test_functions() -> None:
    tests = [{"input": [1, 2], "output": 3}, {"input": [0.1, 0.2], "output": 0.3}]
    assert run("def add(a, b):\n    return a + b", tests, fn_name="add").score == 1.0
    assert run("class Solution:\n    def add(self, a, b):\n        return a + b", tests, fn_name="add").score == 1.0
    assert run("def plus(a, b):\n    return a + b", tests, fn_name="add").score == 0.0
    nested = [{"input": 5, "output": [[5, 1], [1, 2]]}]
    assert run("def one(x):\n    return [(x, 1), {2, 1}]", nested, fn_name="one").score
    pairs = {"inputs": [[1], [2]], "outputs": [1, 4], "fn_name": "square"}
    assert run("def square(x):\n    return x * x", pairs).score == 1.0
    assert run(ADD, {"inputs": ["1 2"], "outputs": ["3"]}).score == 1.0


def test_assertions_in_metadata_and_in_the_label() -> None:
    program = "def double(x):\n    return 2 * x"
    found = run(program, ["assert double(2) == 4", "assert double(2) == 5"])
    assert (found.score, found.parts["pass_frac"]) == (0.0, 0.5)
    assert run(program, None, label="assert double(1) == 2\nassert double('a') == 'aa'").score == 1.0
    assert run(program, None, label='["assert double(1) == 2"]').score == 1.0
    assert run(ADD, None, label=json.dumps(SUMS)).score == 1.0


@pytest.mark.parametrize("leave", ["import os\nos._exit(0)", "import sys\nsys.exit(0)", "raise SystemExit"])
def test_leaving_early_passes_no_assertion_and_no_call(leave: str) -> None:
    assert run(leave, ["assert False"]).score == 0.0
    assert run(leave, [{"input": [], "output": None}], fn_name="f").score == 0.0
    assert run(f"def f():\n    {leave.replace(chr(10), chr(10) + '    ')}", ["f()\nassert False"]).score == 0.0


def test_what_is_expected_is_not_in_the_process_that_runs_the_program() -> None:
    """A program that looks through all objects and frames around it finds the input, and nothing that was wanted."""
    program = """
import gc, sys
def seen():
    frame, found = sys._getframe(), []
    while frame:
        found.append(repr(frame.f_locals))
        frame = frame.f_back
    found += [repr(x) for x in gc.get_objects() if isinstance(x, (dict, list, tuple, str))]
    return ' '.join(found)
text = seen()
print(*(''.join(reversed(word)) in text for word in ('1174-detnaw', '5180-nevig')))"""
    tests = [{"input": "given-0815", "output": "False True"}, {"input": "given-0815", "output": "wanted-4711"}]
    assert run(program, tests).parts["pass_frac"] == 0.5


@pytest.mark.slow
@pytest.mark.parametrize(("program", "how"), [
    ("import os\nwhile True: os.fork()", "failed"),
    ("import ctypes\nctypes.string_at(0)", "killed"),
    ("import os\nos.abort()", "killed"),
    ("def f(): f()\nf()", "failed"),
    ("import numpy", "failed"),
    ("raise KeyboardInterrupt", "failed"),
    ("import os\nos.write(3, bytes(range(256)) * 5000)", "output"),
    ("import os\nwhile True: os.write(1, b'x' * (1 << 20))", "failed"),
    ("with open('big', 'wb') as f:\n    for _ in range(100): f.write(bytes(1 << 20))", "failed"),
    ("for n in range(1 << 20): open(str(n), 'wb').write(bytes(1 << 20))", "killed"),
    ("import os, time\nfor n in range(10**6):\n    os.mkdir(str(n))\n    time.sleep((n > 200) / 99)", "killed"),
    ("import threading, time\nthreading.stack_size(1 << 15)\n"
     "while True: threading.Thread(target=time.sleep, args=(60,)).start()", "killed"),
    ("import signal, os\nsignal.setitimer(signal.ITIMER_REAL, 0.01)\nsignal.pause()", "killed"),
])  # fmt: skip
def test_hostile_programs_fail(program: str, how: str) -> None:
    assert attack(program).how == how
    assert not list(Path(tempfile.gettempdir()).glob(f"sluice-jail-*-{os.getpid()}-*")), "its directory is removed"


def test_tests_that_are_quick_share_one_directory_with_one_limit() -> None:
    program = "n = int(input())\nfor k in range(5): open(f'{n}-{k}', 'wb').write(bytes(1 << 20))"
    results = run_cases(program, [StdinCase(str(n)) for n in range(9)], Limits(total_s=200.0, case_s=30.0))
    assert [result.how for result in results] == ["ok"] * 3 + ["killed"] * 6


def test_no_way_to_leave_looks_like_a_machine_that_cannot_isolate() -> None:
    """A failed grade counts nowhere: a program that could make one would lose nothing by being wrong."""
    program = "import os\nos.write(3, b'IsolationError: none')\nos._exit(int(input()))"
    codes = (0, 1, 2, 3, 96, 97, 98, 126, 127, 128, 137, 255)
    results = run_cases(program, [StdinCase(str(code)) for code in codes], Limits(total_s=200.0, case_s=30.0))
    assert [result.how for result in results] == ["ok", "failed", *["exit"] * 10]
    found = run("import os\nos._exit(97)", SUMS)
    assert (found.score, found.is_correct, found.error, found.parts) == (0.0, False, None, parts(exit_frac=1.0))


ODD_RETURNS = (
    "return 10**400", "return -(10**4000)", "return 10**5000", "return float('nan')", "return float('inf')",
    "x = []\nfor _ in range(900): x = [x]\nreturn x", "x = []\nfor _ in range(100_000): x = [x]\nreturn x",
    "x = []\nx.append(x)\nreturn x", "return '\\ud800'", "return {1: 2, (3, 4): 5}",
    "os.write(3, b'\\xff\\xfe{[')", "os.write(3, b'[' * 100_000)\nos._exit(0)",
    "os.close(3)", "os.ftruncate(3, 4 << 20)\nos._exit(0)",
)  # fmt: skip


def test_whatever_a_function_returns_is_a_grade() -> None:
    bodies = [body.replace("\n", "\n    ") for body in ODD_RETURNS]
    program = "import os\n" + "\n".join(f"def f{n}():\n    {body}" for n, body in enumerate(bodies))
    program += "\ndef f(n):\n    return globals()[f'f{n}']()"
    tests = [{"input": [n], "output": wanted} for wanted in (1.5, [[1.5]]) for n in range(len(bodies))]
    found = run(program, tests, total_s=60.0, fn_name="f")
    assert (found.score, found.is_correct, found.error, found.status) == (0.0, False, None, "ok")
    assert found.parts["pass_frac"] == 0.0


def test_what_is_allowed() -> None:
    program = """
import asyncio, threading, random, math, re, json, heapq, sqlite3, ssl, decimal, dataclasses
@dataclasses.dataclass
class P:
    x: 'int'
found = []
t = threading.Thread(target=found.append, args=(1,)); t.start(); t.join()
async def two(): return 2
found.append(asyncio.run(two()))
open('note', 'w').write('3'); found.append(int(open('note').read()))
print(found, P(4))"""
    assert attack(program) == CaseResult("ok", "[1, 2, 3] P(x=4)\n", "")


def test_the_environment_and_the_descriptors_of_the_caller_stay_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_SECRET", "hunter2")
    ours, theirs = socket.socketpair()
    os.set_inheritable(theirs.fileno(), True)
    program = """
import os
def open_(fd):
    try: os.fstat(fd)
    except OSError: return False
    return True
print(sorted(os.environ), [fd for fd in range(1000) if open_(fd)], os.getcwd() != '/')"""
    try:
        # The C library adds LC_CTYPE by itself.
        names, _, rest = attack(program).stdout.partition("] ")
        assert set(eval(names + "]")) <= {"LANG", "LC_CTYPE", "PATH", "PYTHONHASHSEED"}
        assert rest == "[0, 1, 2, 3] True\n"
    finally:
        ours.close()
        theirs.close()


def test_programs_see_nothing_of_each_other_and_strings_hash_alike_in_every_run() -> None:
    program = "import os\nprint(os.listdir('.'), hash('a'), list({'b', 'c', 'd'}))\nopen('left', 'w').write('x')"
    first, *others = (attack(program).stdout for _ in range(3))
    assert first.startswith("[] ")
    assert others == [first] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "program", ["while True: pass", "import time\ntime.sleep(60)", "input()\nwhile True: print('x')"]
)
def test_endless_programs_are_ended(program: str) -> None:
    began = time.monotonic()
    results = run_cases(program, [StdinCase("1"), StdinCase("2"), StdinCase("3")], Limits(total_s=1.0, case_s=0.6))
    assert {result.how for result in results} <= {"timeout", "failed"}
    assert time.monotonic() - began < 15, "the jail's grace was needed"


def test_later_tests_of_a_slow_program_fail_without_being_run() -> None:
    found = run("import time\ntime.sleep(60)", SUMS * 50, total_s=0.8)
    assert found == Grade(0.0, False, parts(timeout_frac=1.0), "import time\ntime.sleep(60)")


def test_threads_of_a_finished_program_do_not_delay_it() -> None:
    program = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\nprint(3)"
    assert run(program, SUMS[:1]).score == 1.0


def test_without_isolation_nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The jail is told that this is a processor without a filter; the program would print."""
    monkeypatch.setattr(sandbox, "_PROGRAM", "import platform; platform.machine = lambda: 'vax'; " + sandbox._PROGRAM)
    with pytest.raises(SandboxError, match=r"there is no filter for the processor 'vax', .*so none is run"):
        attack("print(3)")
    found = run("print(3)", SUMS[:1])
    assert (found.status, found.is_correct) == ("error", None)


def test_without_landlock_nothing_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a kernel before 5.13: reading stays, and writing, making and removing files go."""
    away = "import stages.sandbox.lockdown as l; l.landlock_version = lambda _: 0; "
    monkeypatch.setattr(sandbox, "_PROGRAM", sandbox._PROGRAM.replace("from stages", away + "from stages"))
    assert attack("print(open('/etc/hostname').read() != '')").how == "ok"
    lines = (
        "open('x', 'w')", "open('x', 'ab')", "os.mkdir('x')", "os.open('.', os.O_TMPFILE | os.O_RDWR)",
        "os.unlink('/etc/hostname')", "os.rename('/etc/hostname', '/etc/x')", "socket.socket()",
    )  # fmt: skip
    cases = [StdinCase(line) for line in (*lines, "pass")]
    results = run_cases("import os, socket\nexec(input())", cases, Limits(total_s=200.0, case_s=30.0))
    assert [result.how for result in results] == ["failed"] * len(lines) + ["ok"]


@pytest.mark.parametrize(("response", "program"), [
    ("Here:\n```python\nx = 1\n```\ndone", "x = 1"), ("```python\na\n```\n```py\nb\n```\n```\nout\n```", "b"),
    ("```\nx = 1\n```", "x = 1"), ("```Python3\nx = 1", "x = 1"), ("x = 1", "x = 1"),
    ("<think>```python\nno\n```</think>\n```python\nyes\n```", "yes"), ("<think>```python\nno\n```", None),
    ("  ```python\n  x = 1\n  ```", "  x = 1"), ("", ""),
])  # fmt: skip
def test_where_the_program_stands(response: str, program: str | None) -> None:
    assert extract_program(response) == program


@given(st.lists(st.sampled_from(["```", "```python", "```cpp", "x = 1", "</think>", "y\r", "\x00"]), max_size=12))
def test_a_program_holds_no_fence_and_only_what_was_written(lines: list[str]) -> None:
    program = extract_program("\n".join(lines))
    assert program is not None
    messages = {part for line in lines for part in line.split("\r")} | {""}
    assert set(program.splitlines()) <= messages - {"```", "```python", "```cpp"}


@pytest.mark.parametrize("response", ["", "   ", "```python\n```", "<think>still", "\ud800", "\x00"])
def test_a_response_without_a_program_is_wrong(response: str) -> None:
    found = grade_code(20.0, GradeRequest("code", response, None, json.dumps({"tests": SUMS})))
    assert (found.score, found.is_correct, found.error) == (0.0, False, None)


@pytest.mark.parametrize(("tests", "words"), [
    (None, "there are none in metadata.tests and the label is empty"),
    ([], "a list of at least one test"),
    ("assert x", "a list of at least one test"),
    ([{"input": "1"}], "a dict with 'input' and 'output', or an assertion"),
    ([{"input": [1], "output": 1}], "for a function's arguments set fn_name"),
    ({"inputs": ["1"], "outputs": []}, "two lists of one length"),
    (SUMS * 501, "1002 tests are too many"),
])  # fmt: skip
def test_a_row_without_usable_tests_is_an_error(tests: object, words: str) -> None:
    assert words in (run("x", tests).error or "")


def test_a_time_limit_that_is_none_is_an_error() -> None:
    for limit in (0, -1, "nan", "soon", None, []):
        found = run("x", time_limit_s=limit)
        assert (found.error or "").startswith("the tests of the row cannot be used: "), limit
    with pytest.raises(ValueError, match="above 0"):
        code_grader("0")


def test_equality_of_values() -> None:
    assert same([1, {"a": 0.1 + 0.2}], [1, {"a": 0.3}])
    assert same(1, 1.0)
    for value, wanted in ((True, 1), (1, True), ("1", 1), (0.1, 0.2), ([1], [1, 2]), ({"a": 1}, {"b": 1}), (None, 0)):
        assert not same(value, wanted)


async def test_in_the_pool_a_killed_grader_takes_its_program_with_it(tmp_path: Path) -> None:
    """The deadline of the pool is shorter than that of the tests: worker, jail and program go together."""
    mark = f"sluice-{os.getpid()}-{time.monotonic_ns()}"
    program = f"x = '{mark}'\nimport time\ntime.sleep(600)"
    tests = json.dumps({"tests": SUMS, "time_limit_s": 500})
    before = jails()
    async with GraderPool(1, 1.0, retries=0) as pool:
        (found,) = await pool.grade_many([GradeRequest("code:500", f"```python\n{program}\n```", None, tests)])
        assert found.status == "timeout"
    mine = jails() - before  # and those of tests beside this one, which end by themselves
    async with asyncio.timeout(20):
        await until(lambda: not jails() & mine)


def jails() -> set[str]:
    """Processes that serve or run programs."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes()
            if b"stages.sandbox.cases" in command and sys.executable.encode() in command:
                found.add(entry.name)
    return found


def test_leftovers_of_killed_graders_are_swept() -> None:
    here, number = os.stat("/proc/self/ns/pid").st_ino, 4194305  # above the largest process number
    gone = Path(tempfile.mkdtemp(prefix=f"sluice-jail-{here}-{number}-"))
    alive = Path(tempfile.mkdtemp(prefix=f"sluice-jail-{here}-{os.getppid()}-"))
    elsewhere = Path(tempfile.mkdtemp(prefix=f"sluice-jail-{here + 1}-{number}-"))
    (gone / "file").write_text("x")
    sandbox._sweep.cache_clear()
    attack("pass")
    assert [path.exists() for path in (gone, alive, elsewhere)] == [False, True, True]
    alive.rmdir()
    elsewhere.rmdir()
