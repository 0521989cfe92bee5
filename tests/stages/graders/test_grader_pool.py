"""The grader pool: real processes, real hangs, crashes and kills, and whether an overrun is the text's fault."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stages.graders import pool as grader_pool
from stages.graders.grade import Grade, GradeRequest, PoolError, UnknownGraderError
from stages.graders.math.mathematics import prepare
from stages.graders.pool import GraderPool
from stages.graders.registry import find_grader, refusal
from stages.workers.process import LOAD_LIMIT_S
from tests.stages.graders.grading_rig import CountingPool
from tests.stages.stage_rig import alive, ended, until

pytestmark = pytest.mark.slow

PATH = "tests.stages.graders.sample_graders"


def behave(*responses: str) -> list[GradeRequest]:
    return [GradeRequest(f"{PATH}:behave", response) for response in responses]


def noted(log: Path, response: str = "x", grader: str = "note") -> GradeRequest:
    """A request whose grader writes down its process."""
    return GradeRequest(f"{PATH}:{grader}", response, None, json.dumps({"log": str(log)}))


async def test_grades_come_back_in_order_and_processes_start_when_needed() -> None:
    async with CountingPool(2, 20.0) as pool:
        assert await pool.grade_many([]) == []
        assert pool.started == 0
        grades = await pool.grade_many(behave(*("x" * (n % 3) for n in range(100))))
        assert [grade.score for grade in grades] == [float(n % 3) for n in range(100)]
        assert 1 <= pool.started <= 2
        async with asyncio.TaskGroup() as tasks:  # concurrent calls do not mix
            calls = [
                tasks.create_task(pool.grade_many([*behave("x" * n), GradeRequest(f"constant:{n}", ""), *behave("y")]))
                for n in range(50)
            ]
        scores = [[grade.score for grade in call.result()] for call in calls]
        assert scores == [[float(n), float(n), 1.0] for n in range(50)]


async def test_a_bad_item_fails_alone() -> None:
    async with GraderPool(1, 20.0, retries=0) as pool:
        for bad, words in (
            ("os._exit", "the grader process died (exit status 7)"),
            ("segfault", "the grader process died (signal SIGSEGV)"),
            ("raise", "ValueError: no such answer"),
            ("exit", "SystemExit: 3"),
            ("nan", "'score' is nan; a grade must be a finite number"),
            ("memory", "MemoryError"),
            ("surrogate", "? is not text"),
            ("recurse", "RecursionError"),
        ):
            grades = await pool.grade_many(behave("a", "bb", bad, "cccc", "d"))
            assert [grade.score for grade in grades] == [1.0, 2.0, 0.0, 4.0, 1.0], bad
            assert grades[2].status == "error"
            assert words in (grades[2].error or "")
            assert [grade.error for grade in grades if grade is not grades[2]] == [None] * 4, bad
        # Prints and broken text do no harm.
        grades = await pool.grade_many([*behave("print", "\ud800"), GradeRequest("exact", "\ud800", "\ud801")])
        assert [grade.error for grade in grades] == [None, None, None]
        assert grades[0].score == 5.0


async def test_importing_is_not_counted_but_the_item_after_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow import outlives the deadline of an item; a hang right after it is noticed all the same."""
    source = "import time\ntime.sleep(1.1)\ndef fn(response, label, metadata):\n"
    source += "    time.sleep(3600 if response == 'hang' else 0)\n    return 1.0\n"
    (tmp_path / "slow_to_import.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    async with GraderPool(1, 1.0, retries=0) as pool, asyncio.timeout(LOAD_LIMIT_S / 2):
        grades = await pool.grade_many([GradeRequest("slow_to_import:fn", text) for text in ("x", "hang", "y")])
        assert [grade.status for grade in grades] == ["ok", "timeout", "ok"]


async def test_several_bad_items_of_one_request() -> None:
    async with CountingPool(1, 1.0, retries=1) as pool:
        responses = ["a", "os._exit", "bb", "spin", "raise", "ccc", "segfault"]
        grades = await pool.grade_many(behave(*responses))
        assert [grade.score for grade in grades] == [1.0, 0.0, 2.0, 0.0, 0.0, 3.0, 0.0]
        assert [grade.status for grade in grades] == ["ok", "error", "ok", "timeout", "error", "ok", "error"]
        assert "in 2 attempts" in (grades[1].error or "")
        assert grades[3].is_correct is None
        assert (grades[3].error or "").startswith("no grade within 1 s (--reward-deadline-s)")
        assert (pool.timeouts, pool.crashes, pool.retries) == (2, 4, 3)


async def test_items_after_a_hang_are_graded_by_another_process(tmp_path: Path) -> None:
    """The item that hangs is begun once; items behind it are not begun before it is given up."""
    log = tmp_path / "log"
    async with GraderPool(1, 1.0, retries=0) as pool:
        grades = await pool.grade_many([noted(log, text) for text in ("a", "b", "hang", "c", "d")])
    assert [grade.score for grade in grades] == [1.0, 1.0, 0.0, 1.0, 1.0]
    lines = [line.split() for line in log.read_text().splitlines()]
    first = {text for pid, text in lines if pid == lines[0][0]}
    assert first == {"a", "b", "hang"}
    assert [text for pid, text in lines if pid != lines[0][0]][-2:] == ["c", "d"]
    assert [text for _, text in lines].count("hang") == 1


async def test_processes_are_recycled_for_graders_that_leave_traces(tmp_path: Path) -> None:
    async with CountingPool(1, 20.0, recycle_after=3) as pool:
        for _ in range(7):
            await pool.grade_many([noted(tmp_path / "log")])
        pids = [line.split()[0] for line in (tmp_path / "log").read_text().splitlines()]
        assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [3, 3, 1]
        assert pool.started == 3
        await pool.grade_many([GradeRequest("exact", "x", "x")] * 10)
        assert pool.started == 3


async def test_a_killed_idle_process_is_replaced(tmp_path: Path) -> None:
    log = tmp_path / "log"
    pool = GraderPool(1, 20.0, retries=1)
    async with pool:
        await pool.grade_many([noted(log)])
        os.kill(int(log.read_text().split()[0]), signal.SIGKILL)
        assert [grade.error for grade in await pool.grade_many([noted(log)] * 3)] == [None] * 3
        pid = int(log.read_text().split()[-2])
        assert alive(pid)
    await ended(pid)  # with the pool
    with pytest.raises(PoolError, match="enter it with 'async with' first"):
        await pool.grade_many([GradeRequest("exact", "x", "x")])


async def test_a_cancelled_call_leaves_no_process_behind(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with GraderPool(1, 60.0) as pool:
        calls = asyncio.ensure_future(pool.grade_many([noted(log, "hang")]))
        await until(lambda: log.exists() and log.read_text() != "")
        calls.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calls
        await ended(int(log.read_text().split()[0]))
        assert (await pool.grade_many([GradeRequest("exact", "x", "x")]))[0].score == 1.0


@pytest.mark.parametrize(("grader", "response"), [("stop_parent_watch", ""), ("daemon", "hang")])
async def test_a_grader_dies_with_its_stage(grader: str, response: str, tmp_path: Path) -> None:
    """SIGKILL of the parent, in the middle of a grader that ignores SIGTERM, or that has left a daemon behind."""
    log = tmp_path / "log"
    metadata = json.dumps({"log": str(log)})
    program = f"""
import asyncio, json
from stages.graders.pool import GraderPool, GradeRequest
async def main():
    async with GraderPool(1, 600.0) as pool:
        await pool.grade_many([GradeRequest("{PATH}:{grader}", {response!r}, None, {metadata!r})])
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", program])  # noqa: ASYNC220 - starting it takes no time
    try:
        async with asyncio.timeout(60):
            await until(lambda: log.exists() and log.read_text() != "")
        pid = int(log.read_text())
        assert alive(pid)
    finally:
        parent.kill()
        parent.wait()
    await ended(pid)


@pytest.mark.parametrize("then", ["go on", "hang", "crash"])
async def test_daemons_of_a_grader_end_with_its_process(then: str, tmp_path: Path) -> None:
    """They left its session and its group: closing the pool, a deadline and a crash reach them all the same."""
    log = tmp_path / "log"
    async with GraderPool(1, 2.0, retries=0) as pool:
        await pool.grade_many([noted(log, then, "daemon")])
        assert then != "go on" or alive(int(log.read_text()))
    await ended(int(log.read_text()))


async def test_zero_workers_grade_cheap_built_in_graders_here() -> None:
    async with CountingPool(0, 1.0) as pool:
        items = [GradeRequest("exact", "x", "x")] * 300
        assert sum(grade.score for grade in await pool.grade_many(items)) == 300
        refused = await pool.grade_many([GradeRequest("sleep:1", ""), *behave("a"), GradeRequest("exakt", "")])
        assert [grade.status for grade in refused] == ["error"] * 3
        assert "set --reward-workers to 1 or more" in (refused[1].error or "")
        symbolic, text = (GradeRequest(name, r"\boxed{5}", "5") for name in ("math", "math_hendrycks"))
        kept, graded = await pool.grade_many([symbolic, text])
        assert "runs only in a grader process; set --reward-workers to 1" in (kept.error or "")
        assert graded.score == 1.0
        assert pool.started == 0


async def test_a_grader_that_cannot_be_used_fails_its_items_with_the_reason() -> None:
    async with CountingPool(1, 20.0) as pool:
        for name, words in (
            ("exakt", "did you mean 'exact'"),
            (f"{PATH}:two_arguments", "take these 3 arguments"),
            ("no.such.module:f", "importing 'no.such.module' failed"),
        ):
            (grade,) = await pool.grade_many([GradeRequest(name, "x")])
            assert words in (grade.error or "")
        assert (await pool.grade_many(behave("abc")))[0].score == 3.0
        assert pool.started == 1


async def test_processes_that_cannot_start_are_an_error_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    items = behave(*["x"] * 100)
    async with GraderPool(2, 5.0) as pool:
        with pytest.raises(PoolError, match=r"ended at its start \(exit status 1\).*--reward-workers 0"):
            await pool.grade_many(items)


def test_the_pool_works_under_uvloop_and_keeps_a_lower_limit_of_memory() -> None:
    """The loop that stages run on, and a limit that its processes may not raise; they start all the same."""
    program = """
import resource, uvloop
from stages.graders.pool import GraderPool, GradeRequest
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
async def main():
    async with GraderPool(1, 1.0, 0) as pool:
        items = [GradeRequest("exact", "x", "x"), GradeRequest("sleep:60", ""), GradeRequest("crash", "")]
        print([grade.status for grade in await pool.grade_many(items)])
uvloop.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "['ok', 'timeout', 'error']"


def test_importing_the_pool_is_cheap() -> None:
    program = (
        "import sys; import stages.graders.pool; "
        "print([name for name in ('torch', 'transformers', 'sympy', 'numpy', 'zmq') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Keeps the regular expression (a+)+ busy for ever in one call, which no signal ends: what the deadline is for.
SLOW = "a" * 60 + "b"


async def test_a_text_that_keeps_a_grader_busy_is_wrong_and_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < grader_pool._BUSY_SHARE <= 0.5, "two processes that share a core are busy"
    # A twentieth of it: beside the other tests a process that is busy may get little of its core.
    monkeypatch.setattr(grader_pool, "_BUSY_SHARE", grader_pool._BUSY_SHARE / 20)
    items = [GradeRequest("format:(a+)+", response) for response in ("a", SLOW, "aa", "b")]
    async with CountingPool(1, 2.0, retries=3) as pool:
        grades = await pool.grade_many(items)
        assert [found.score for found in grades] == [1.0, 0.0, 1.0, 0.0]
        assert grades[1] == Grade(0.0, False, status="timeout")
        assert [found.error for found in grades] == [None] * 4
        assert (pool.timeouts, pool.retries) == (1, 0)


async def test_a_process_that_is_held_up_blames_no_text(tmp_path: Path) -> None:
    """Stopped from outside it uses no processor time: the item is graded by another process."""
    async with CountingPool(1, 2.0, retries=1) as pool:
        request = GradeRequest("format:a+", "aa")
        assert [found.score for found in await pool.grade_many([request, noted(tmp_path / "log")])] == [1.0, 1.0]
        os.kill(int((tmp_path / "log").read_text().split()[0]), signal.SIGSTOP)
        (found,) = await pool.grade_many([request])
        assert (found.score, found.status) == (1.0, "ok")
        assert (pool.timeouts, pool.retries, pool.started) == (1, 1, 2)


def test_which_graders_blame_the_text() -> None:
    wrong = {name: find_grader(name).wrong for name in ("math", "math:compat", "math_verify", "deepscaler", "dapo")}
    assert wrong == {"math": 0.0, "math:compat": 0.0, "math_verify": 0.0, "deepscaler": 0.0, "dapo": -1.0}
    assert find_grader("boxed_dapo").wrong == -1.0
    assert find_grader("sleep:1").wrong is None


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare.cache_clear()
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(UnknownGraderError, match=r"need the package math-verify .*install it, or set --rm-type"):
        prepare()


def test_unknown_graders_are_refused_without_importing_any() -> None:
    names = ["math", "mth", "boxed_f1", "math:compat", "math:sloppy", "no.such.module:f", "exakt:fn", "boxed_length:3"]
    assert [name for name in names if refusal(name)] == ["mth", "math:sloppy", "exakt:fn", "boxed_length:3"]
    assert "did you mean 'math'" in (refusal("mth") or "")
    assert "'sloppy' is none of compat, verify, either" in (refusal("math:sloppy") or "")
    assert refusal("math_strict") is None
