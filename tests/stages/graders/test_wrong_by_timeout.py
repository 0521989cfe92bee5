"""Who is to blame when a grader overruns: the text, or the machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stages.graders.grade import Grade, GradeRequest, UnknownGraderError
from stages.graders.math.mathematics import _compare, prepare_symbolic
from stages.graders.pool import GraderPool
from stages.graders.registry import find_grader, refusal
from tests.stages.graders.grading_rig import CountingPool

# Keeps the regular expression (a+)+ busy for ever in one call, which no signal ends: what the deadline is for.
SLOW = "a" * 60 + "b"


def workers_of_this_process() -> list[int]:
    """Those that grade: each has a guard between itself and this process."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
            if b"stages.graders.worker" in command and str(os.getpid()).encode() in command.split(b"\0"):
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                if int(parent) != os.getpid():
                    found.append(int(entry.name))
    return found


@pytest.mark.slow
async def test_a_text_that_keeps_a_grader_busy_is_wrong_and_not_tried_again() -> None:
    items = [GradeRequest("format:(a+)+", response) for response in ("a", SLOW, "aa", "b")]
    async with CountingPool(1, 2.0, retries=3) as pool:
        grades = await pool.grade_many(items)
        assert [found.score for found in grades] == [1.0, 0.0, 1.0, 0.0]
        assert grades[1] == Grade(0.0, False, status="timeout")
        assert [found.error for found in grades] == [None] * 4
        assert (pool.timeouts, pool.retries) == (1, 0)


@pytest.mark.slow
async def test_a_process_that_is_held_up_blames_no_text() -> None:
    """Stopped from outside it uses no processor time: the item is graded by another process."""
    async with CountingPool(1, 2.0, retries=1) as pool:
        request = GradeRequest("math", r"\boxed{10/2}", "5")
        assert (await pool.grade_many([request]))[0].score == 1.0
        (pid,) = workers_of_this_process()
        os.kill(pid, signal.SIGSTOP)
        (found,) = await pool.grade_many([request])
        assert (found.score, found.status) == (1.0, "ok")
        assert (pool.timeouts, pool.retries, pool.started) == (1, 1, 2)


async def test_a_grader_that_sleeps_is_no_wrong_answer() -> None:
    async with GraderPool(1, 0.5, retries=0) as pool:
        (found,) = await pool.grade_many([GradeRequest("sleep:60", "x")])
        assert (found.status, found.is_correct) == ("timeout", None)
        assert "no grade within 0.5 s" in (found.error or "")


def test_which_graders_blame_the_text() -> None:
    wrong = {name: find_grader(name).wrong for name in ("math", "math:compat", "math_verify", "deepscaler", "dapo")}
    assert wrong == {"math": 0.0, "math:compat": 0.0, "math_verify": 0.0, "deepscaler": 0.0, "dapo": -1.0}
    assert find_grader("boxed_dapo").wrong == -1.0
    assert find_grader("sleep:1").wrong is None


async def test_symbolic_graders_are_prepared_in_a_process_and_never_run_in_the_stage() -> None:
    async with GraderPool(1, 20.0) as pool:
        assert (await pool.grade_many([GradeRequest("math", r"\boxed{5}", "5")]))[0].score == 1.0
    async with GraderPool(0, 20.0) as here:
        (refused,) = await here.grade_many([GradeRequest("math", r"\boxed{5}", "5")])
        assert "runs only in a grader process; set --reward-workers to 1" in (refused.error or "")
        assert (await here.grade_many([GradeRequest("math_hendrycks", r"\boxed{5}", "5")]))[0].score == 1.0


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _compare.cache_clear()
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(UnknownGraderError, match=r"need the package math-verify .*install it, or set --rm-type"):
        prepare_symbolic()
    _compare.cache_clear()


def test_unknown_graders_are_refused_without_importing_any() -> None:
    names = [
        "math",
        "mth",
        "boxed_f1",
        "math:compat",
        "math:sloppy",
        "no.such.module:f",
        "exakt:fn",
        "boxed_length:3",
    ]
    assert [name for name in names if refusal(name)] == ["mth", "math:sloppy", "exakt:fn", "boxed_length:3"]
    assert "did you mean 'math'" in (refusal("mth") or "")
    assert "'sloppy' is none of compat, verify, either" in (refusal("math:sloppy") or "")
    assert refusal("math_strict") is None


def test_a_lower_limit_of_memory_is_kept() -> None:
    """A process may not raise the limit that it was started under; graders start all the same."""
    program = """
import asyncio, resource
from stages.graders.pool import GraderPool, GradeRequest
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
async def main():
    async with GraderPool(1, 20.0) as pool:
        (grade,) = await pool.grade_many([GradeRequest("sleep:0", "5", "5")])
        assert grade.error is None, grade
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
