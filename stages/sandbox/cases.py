"""The jail's own process: reads one job, runs each case in a fork that is locked down, and reports how it went.

    python -P -s -S -c "...; from stages.sandbox.cases import main; main(PARENT)" < job.json > results.json

A job is `{program, cases, directory, case_s, total_s, memory_bytes, output_bytes}`; a case is `{"stdin": text}`,
`{"call": name, "arguments": [...]}` or `{"check": code, "token": text}`. Expected results are not known here, so that a
program cannot look them up; only a check carries its own expectations.

Invariants: this process runs none of the program; it dies with its parent and its forks with it; a fork that is not
locked down runs nothing (`start_confined`).
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import sys
import types
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn, TypedDict

from stages.sandbox.lockdown import LOOK_S, Deadline, exceeds, hide, is_full, start_confined, text_stream
from stages.workers.guard import die_with

_RESULT_FD = 3


class Job(TypedDict):
    """A program, its cases, and their limits (seconds, bytes)."""

    program: str
    cases: list[dict[str, Any]]
    directory: str
    case_s: float
    total_s: float
    memory_bytes: int
    output_bytes: int


class Result(TypedDict):
    """How one case went.

    `how`: ok (it ended with code 0), failed (code 1, as after an exception), exit (another code), killed (a signal, or
    more threads or files than a program may have), timeout, output (too much of it), isolation (nothing was run).
    """

    how: str
    stdout: str
    value: str  # what a call returned, as JSON; the token of a check that passed


def main(parent: int) -> None:
    """Serve one job."""
    die_with(parent)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as first_to_go:
        first_to_go.write("1000")  # where memory runs out, the kernel takes the largest of these: the program
    hide()
    job: Job = json.load(sys.stdin.buffer)
    deadline = Deadline(job["total_s"])
    results: list[Result] = []
    output_left = 8 * job["output_bytes"]  # of all cases together
    full = False
    for case in job["cases"]:
        allowed_s = min(job["case_s"], deadline.left_s())
        if full or allowed_s <= 0:
            results.append(Result(how="killed" if full else "timeout", stdout="", value=""))
            continue
        result = _run(job, case, allowed_s, deadline)
        output_left -= len(result["stdout"]) + len(result["value"])
        full = is_full(job["directory"])  # a quick program may have ended between two looks
        if full or output_left < 0:
            result = Result(how="killed" if full else "output", stdout="", value="")
        results.append(result)
    sys.stdout.write(json.dumps(results))
    sys.stdout.flush()


def _run(job: Job, case: dict[str, Any], allowed_s: float, deadline: Deadline) -> Result:
    """One case, in a fork with files in memory for its input and output."""
    source, output, value = [os.memfd_create(name) for name in ("input", "output", "value")]
    files = source, output, os.open(os.devnull, os.O_WRONLY), value
    try:
        os.write(source, str(case.get("stdin", "")).encode("utf-8", "replace"))
        os.lseek(source, 0, os.SEEK_SET)
        run, cpu_s = partial(_become, job["program"], case), math.ceil(allowed_s) + 1
        child, refusal = start_confined(run, job["directory"], files, cpu_s, job["memory_bytes"], ())
        if refusal:
            os.waitpid(child, 0)
            return Result(how="isolation", stdout="", value=refusal)
        how = _wait(child, allowed_s, deadline, job["directory"])
        text, returned = _content(output, job["output_bytes"]), _content(value, job["output_bytes"])
        if how == "ok" and (text is None or returned is None):
            how = "output"
        return Result(how=how, stdout=text or "", value=returned or "")
    finally:
        for descriptor in files:
            os.close(descriptor)


def _wait(child: int, allowed_s: float, deadline: Deadline, directory: str) -> str:
    """Waits for the end of the fork. Kills the fork at its time limit, or if it exceeds its threads or files."""
    end_s = deadline.left_s() - allowed_s
    poll = select.poll()
    with open(os.pidfd_open(child), "rb", buffering=0) as handle:
        poll.register(handle, select.POLLIN)
        left_s, broken = allowed_s, ""
        while not broken and not poll.poll(max(1, math.ceil(1000 * min(left_s, LOOK_S)))):
            left_s = deadline.left_s() - end_s
            broken = "timeout" if left_s <= 0 else "killed" if exceeds(child, directory) else ""
        if broken:
            os.kill(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if broken:
        return broken
    if status < 0:
        return "timeout" if status == -signal.SIGXCPU else "killed"
    return {0: "ok", 1: "failed"}.get(status, "exit")


def _content(descriptor: int, most: int) -> str | None:
    """Text of a file in memory, None if it is longer than `most` bytes."""
    size = os.fstat(descriptor).st_size
    return None if size > most else os.pread(descriptor, size, 0).decode("utf-8", "replace")


def _become(program: str, case: dict[str, Any]) -> NoReturn:
    """In the fork: run a case as a script would."""
    sys.stdin, sys.stdout, sys.stderr = text_stream(0, "r"), text_stream(1, "w"), text_stream(2, "w")
    exit_code = 0
    try:
        _execute(program, case)
    except SystemExit as leaving:
        # A call or a check that leaves early has not returned.
        wanted = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        exit_code = wanted if "stdin" in case else 1
    except BaseException:  # every exception is the program's own, and the case has failed
        exit_code = 1
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        exit_code = 1  # too much output, or it closed its own
    os._exit(exit_code & 0xFF)


def _execute(program: str, case: dict[str, Any]) -> None:
    module = types.ModuleType("__main__" if "stdin" in case else "solution")
    sys.modules[module.__name__] = module  # where dataclasses and pickles look for it
    scope = module.__dict__
    exec(compile(program, "solution.py", "exec", dont_inherit=True), scope)
    if "call" in case:
        value = _function(scope, case["call"])(*case["arguments"])
        os.write(_RESULT_FD, json.dumps(value, default=_plain).encode())
    elif "check" in case:
        exec(compile(case["check"], "check.py", "exec", dont_inherit=True), scope)
        os.write(_RESULT_FD, case["token"].encode())


def _function(scope: dict[str, Any], name: str) -> Any:
    """The function, or the method of a class `Solution`."""
    return getattr(scope["Solution"](), name) if name not in scope and "Solution" in scope else scope[name]


def _plain(value: object) -> object:
    """Values that JSON does not know: sets as sorted lists, all others by their `repr`."""
    return sorted(value) if isinstance(value, set | frozenset) else repr(value)
