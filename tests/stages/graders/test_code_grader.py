"""`code`: programs that are right, wrong and hostile. Hostile ones must fail their tests and touch nothing."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.graders import sandbox
from stages.graders.code import code_grader, extract_program, grade_code, same
from stages.graders.grade import Grade, GradeRequest
from stages.graders.jail import lockdown
from stages.graders.pool import GraderPool
from stages.graders.registry import find_grader
from stages.graders.sandbox import CaseResult, Limits, SandboxError, StdinCase, run_cases

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


def test_input_and_output() -> None:
    assert run(ADD) == Grade(1.0, True, {"pass_frac": 1.0, "timeout_frac": 0.0}, ADD)
    half = run("print(3)")
    assert (half.score, half.is_correct, half.parts["pass_frac"]) == (0.0, False, 0.5)
    assert run("print('3  \\n\\n')", SUMS[:1]).score == 1.0
    assert run("import sys\nprint(sum(map(int, sys.stdin.read().split())))").score == 1.0
    assert run(f"if __name__ == '__main__':\n    {ADD.replace(chr(10), chr(10) + '    ')}").score == 1.0


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
    assert run(
        "def one(x):\n    return [(x, 1), {2, 1}]", [{"input": 5, "output": [[5, 1], [1, 2]]}], fn_name="one"
    ).score
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
    program = (
        "import gc, sys\n"
        "def seen():\n"
        "    frame, found = sys._getframe(), []\n"
        "    while frame:\n"
        "        found.append(repr(frame.f_locals))\n"
        "        frame = frame.f_back\n"
        "    found += [repr(x) for x in gc.get_objects() if isinstance(x, (dict, list, tuple, str))]\n"
        "    return ' '.join(found)\n"
        "text = seen()\n"
        "print(*(''.join(reversed(word)) in text for word in ('1174-detnaw', '5180-nevig')))"
    )
    tests = [{"input": "given-0815", "output": "False True"}, {"input": "given-0815", "output": "wanted-4711"}]
    assert run(program, tests).parts["pass_frac"] == 0.5


@pytest.mark.parametrize(
    "program",
    [
        "import os\nwhile True: os.fork()",
        "import subprocess\nsubprocess.run(['true'])",
        "import multiprocessing\nmultiprocessing.Process(target=print).start()",
        "import os\nos.execv('/bin/true', ['true'])",
        "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
        "import os, signal\nos.kill(-1, signal.SIGTERM)",
        "import socket\nsocket.socket()",
        "import socket\nsocket.socket(socket.AF_UNIX)",
        "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:1')",
        "open('/etc/passwd').read()",
        "import os\nopen(f'/proc/{os.getppid()}/environ').read()",
        "open('/proc/self/environ').read()",
        "import os\nos.listdir('/')",
        "open('/tmp/sluice-was-here', 'w')",
        "open('../escaped', 'w')",
        "import os\nos.chmod('.', 0o777)",
        "import os\nos.symlink('/etc/passwd', 'x')\nopen('x').read()",
        "x = bytearray(1 << 34)",
        "x = [0] * (1 << 33)",
        "import resource, os\nresource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))",
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))",
        "import ctypes\nif ctypes.CDLL(None).prctl(1, 0, 0, 0, 0) != 0: raise PermissionError",
        "import ctypes\nif ctypes.CDLL(None).ptrace(16, 1, 0, 0) != 0: raise PermissionError",
        "import ctypes\nctypes.string_at(0)",
        "def f(): f()\nf()",
        "import numpy",
        "raise KeyboardInterrupt",
        "import os\nos.write(1, b'x' * (1 << 26))\nos.write(1, b'x')",
        "with open('big', 'wb') as f:\n    for _ in range(100): f.write(bytes(1 << 20))",
    ],
)
def test_hostile_programs_fail(program: str) -> None:
    assert attack(program).how in ("failed", "output")
    assert not Path("/tmp/sluice-was-here").exists()
    assert not list(Path(tempfile.gettempdir()).glob(f"sluice-jail-*-{os.getpid()}-*")), "its directory is removed"


def test_what_is_allowed() -> None:
    program = (
        "import asyncio, threading, random, math, re, json, heapq, sqlite3, ssl, decimal, dataclasses\n"
        "@dataclasses.dataclass\nclass P:\n    x: 'int'\n"
        "found = []\n"
        "t = threading.Thread(target=found.append, args=(1,)); t.start(); t.join()\n"
        "async def two(): return 2\n"
        "found.append(asyncio.run(two()))\n"
        "open('note', 'w').write('3'); found.append(int(open('note').read()))\n"
        "print(found, P(4))"
    )
    assert attack(program) == CaseResult("ok", "[1, 2, 3] P(x=4)\n", "")


def test_the_environment_and_the_descriptors_of_the_caller_stay_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_SECRET", "hunter2")
    ours, theirs = socket.socketpair()
    os.set_inheritable(theirs.fileno(), True)
    program = (
        "import os\n"
        "def open_(fd):\n"
        "    try: os.fstat(fd)\n"
        "    except OSError: return False\n"
        "    return True\n"
        "print(sorted(os.environ), [fd for fd in range(1000) if open_(fd)], os.getcwd() != '/')"
    )
    try:
        # The C library adds LC_CTYPE by itself.
        names, _, rest = attack(program).stdout.partition("] ")
        assert set(eval(names + "]")) <= {"LANG", "LC_CTYPE", "PATH", "PYTHONHASHSEED"}
        assert rest == "[0, 1, 2, 3] True\n"
    finally:
        ours.close()
        theirs.close()


def test_programs_see_nothing_of_each_other() -> None:
    program = "import os\nprint(os.listdir('.'))\nopen('left', 'w').write('x')"
    for _ in range(2):
        assert attack(program).stdout == "[]\n"


def test_strings_hash_alike_in_every_run() -> None:
    assert len({attack("print(hash('a'), list({'b', 'c', 'd'}))").stdout for _ in range(3)}) == 1


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
    assert found == Grade(0.0, False, {"pass_frac": 0.0, "timeout_frac": 1.0}, "import time\ntime.sleep(60)")


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
    away = "import stages.graders.jail.lockdown as l; l._landlock = lambda *_: 0; "
    monkeypatch.setattr(sandbox, "_PROGRAM", sandbox._PROGRAM.replace("from stages", away + "from stages"))
    assert attack("print(open('/etc/hostname').read() != '')").how == "ok"
    for program in (
        "open('x', 'w')",
        "open('x', 'ab')",
        "import os\nos.mkdir('x')",
        "import os\nos.open('.', os.O_TMPFILE | os.O_RDWR)",
        "import os\nos.unlink('/etc/hostname')",
        "import os\nos.rename('/etc/hostname', '/etc/x')",
        "import socket\nsocket.socket()",
    ):
        assert attack(program).how == "failed", program
    assert run(ADD).score == 1.0


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("without", [False, True])
def test_the_filter_is_well_formed(machine: str, without: bool) -> None:
    """Every jump lands inside of the program, and its last instruction returns."""
    program = [struct.unpack("=HBBI", word) for word in lockdown.filter_program(machine, without_landlock=without)]
    assert len(program) < 4096
    for place, (code, if_true, if_false, _) in enumerate(program):
        if code in (0x15, 0x35, 0x45):
            assert place + 1 + max(if_true, if_false) < len(program)
    assert program[-1] == (0x06, 0, 0, 0x7FFF0000)


def verdict_of(machine: str, number: int, *arguments: int, architecture: int | None = None) -> int:
    """Run the filter on a made-up call."""
    audit = lockdown._ARCHITECTURES[machine][0] if architecture is None else architecture
    data = struct.pack("<IIQ6Q", number, audit, 0, *[*arguments, 0, 0, 0, 0, 0, 0][:6])
    program = [struct.unpack("=HBBI", word) for word in lockdown.filter_program(machine)]
    register, place = 0, 0
    while True:
        code, if_true, if_false, value = program[place]
        place += 1
        if code == 0x20:
            register = struct.unpack_from("<I", data, value)[0]
        elif code == 0x06:
            return value
        else:
            held = {0x15: register == value, 0x35: register >= value, 0x45: register & value != 0}[code]
            place += if_true if held else if_false


ALLOWED, REFUSED = 0x7FFF0000, 0x00050001


@pytest.mark.parametrize(
    ("machine", "clone", "prlimit", "prctl", "socket_", "read"),
    [("x86_64", 56, 302, 157, 41, 0), ("aarch64", 220, 261, 167, 198, 63)],
)
def test_what_the_filter_says(machine: str, clone: int, prlimit: int, prctl: int, socket_: int, read: int) -> None:
    assert verdict_of(machine, read) == ALLOWED
    assert verdict_of(machine, socket_) == REFUSED
    assert verdict_of(machine, clone, 0x10000 | 0x100) == ALLOWED
    assert verdict_of(machine, clone, 17) == REFUSED
    assert verdict_of(machine, 435) == 0x00050026  # clone3: not implemented, so that clone is asked
    assert [verdict_of(machine, prlimit, pid) for pid in (0, 1)] == [ALLOWED, REFUSED]
    assert [verdict_of(machine, prctl, option) for option in (1, 4, 15)] == [REFUSED, REFUSED, ALLOWED]
    assert verdict_of(machine, read, architecture=0x40000003) == 0x80000000  # 32-bit calls end the process
    assert verdict_of(machine, 0x40000000 + 59) == REFUSED


@pytest.mark.parametrize(("column", "header"), [(0, "x86_64-linux-gnu/asm/unistd_64.h"), (1, "asm-generic/unistd.h")])
def test_call_numbers_are_those_of_the_kernel_headers(column: int, header: str) -> None:
    path = Path("/usr/include") / header
    if not path.exists():
        pytest.skip("no kernel headers here")
    found = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", path.read_text())
    numbers = {name: int(number) for name, number in found}
    special = {"clone": lockdown._CLONE, "clone3": lockdown._CLONE3, "prlimit64": lockdown._PRLIMIT}
    special |= {"prctl": lockdown._PRCTL, "openat": lockdown._OPENAT, "open": lockdown._OPEN}
    for name, both in {**lockdown._DENIED, **lockdown._DENIED_WITHOUT_LANDLOCK, **special}.items():
        if name in numbers:
            assert numbers[name] == both[column], name
        else:
            assert both[column] == -1 or name == "fchmodat2", f"{name} is not in {header}"


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("Here:\n```python\nx = 1\n```\ndone", "x = 1"),
        ("```python\na\n```\n```py\nb\n```\n```\nout\n```", "b"),
        ("```\nx = 1\n```", "x = 1"),
        ("```Python3\nx = 1", "x = 1"),
        ("x = 1", "x = 1"),
        ("<think>```python\nno\n```</think>\n```python\nyes\n```", "yes"),
        ("<think>```python\nno\n```", None),
        ("  ```python\n  x = 1\n  ```", "  x = 1"),
        ("", ""),
    ],
)
def test_where_the_program_stands(response: str, program: str | None) -> None:
    assert extract_program(response) == program


@given(st.lists(st.sampled_from(["```", "```python", "```cpp", "x = 1", "</think>", "y\r", "\x00"]), max_size=12))
def test_a_program_holds_no_fence_and_only_what_was_said(lines: list[str]) -> None:
    program = extract_program("\n".join(lines))
    assert program is not None
    said = {part for line in lines for part in line.split("\r")} | {""}
    assert set(program.splitlines()) <= said - {"```", "```python", "```cpp"}


@pytest.mark.parametrize("response", ["", "   ", "```python\n```", "<think>still", "\ud800", "\x00"])
def test_a_response_without_a_program_is_wrong(response: str) -> None:
    found = grade_code(20.0, GradeRequest("code", response, None, json.dumps({"tests": SUMS})))
    assert (found.score, found.is_correct, found.error) == (0.0, False, None)


@pytest.mark.parametrize(
    ("tests", "label", "words"),
    [
        (None, None, "there are none in metadata.tests and the label is empty"),
        ([], None, "a list of at least one test"),
        ("assert x", None, "a list of at least one test"),
        ([{"input": "1"}], None, "a dict with 'input' and 'output', or an assertion"),
        ([{"input": [1], "output": 1}], None, "for a function's arguments set fn_name"),
        ({"inputs": ["1"], "outputs": []}, None, "two lists of one length"),
        (SUMS * 501, None, "1002 tests are too many"),
    ],
)
def test_a_row_without_usable_tests_is_an_error(tests: object, label: str | None, words: str) -> None:
    found = run("x", tests, label=label)
    assert words in (found.error or "")


@pytest.mark.parametrize("limit", [0, -1, "nan", "soon", None, []])
def test_a_time_limit_that_is_none_is_an_error(limit: object) -> None:
    found = run("x", time_limit_s=limit)
    assert (found.error or "").startswith("the tests of the row cannot be used: ")


def test_equality_of_values() -> None:
    assert same([1, {"a": 0.1 + 0.2}], [1, {"a": 0.3}])
    assert same(1, 1.0)
    for value, wanted in ((True, 1), (1, True), ("1", 1), (0.1, 0.2), ([1], [1, 2]), ({"a": 1}, {"b": 1}), (None, 0)):
        assert not same(value, wanted)


def test_the_table_knows_code() -> None:
    assert find_grader("code:2.5").in_stage is False
    with pytest.raises(ValueError, match="above 0"):
        code_grader("0")


async def test_in_the_pool_a_killed_grader_takes_its_program_with_it(tmp_path: Path) -> None:
    """The deadline of the pool is shorter than that of the tests: worker, jail and program go together."""
    mark = f"sluice-{os.getpid()}-{time.monotonic_ns()}"
    program = f"x = '{mark}'\nimport time\ntime.sleep(600)"
    request = GradeRequest(
        "code:500", f"```python\n{program}\n```", None, json.dumps({"tests": SUMS, "time_limit_s": 500})
    )
    before = jails()
    async with GraderPool(1, 2.0, retries=0) as pool:
        (found,) = await pool.grade_many([request])
        assert found.status == "timeout"
    mine = jails() - before  # and those of tests beside this one, which end by themselves
    until = time.monotonic() + 20
    while jails() & mine and time.monotonic() < until:  # noqa: ASYNC110 - looks from outside
        await asyncio.sleep(0.02)
    assert not jails() & mine


def jails() -> set[str]:
    """Processes that serve or run programs."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if b"stages.graders.jail.serve" in command and sys.executable.encode() in command:
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
