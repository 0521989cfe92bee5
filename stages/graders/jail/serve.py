"""The jail's own process: reads one job, runs each case in a fork that is locked down, and tells how it went.

    python -P -s -S -c "...; from stages.graders.jail.serve import main; main(PARENT)" < job.json > results.json

A job is `{program, cases, directory, case_s, total_s, memory_bytes, output_bytes}`; a case is `{"stdin": text}`,
`{"call": name, "arguments": [...]}` or `{"check": code, "token": text}`. What a case should give is not known in here,
so that a program cannot look it up; only a check carries its own expectations.

Invariants: this process runs none of the program; it dies with its parent and its forks with it; a fork that is not
locked down runs nothing. Whether it is locked down is said over a pipe that is closed before the program begins, so
that no end of a program can look like a machine that cannot isolate it.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import sys
import time
import types
from contextlib import suppress
from typing import Any, TextIO, TypedDict, cast

from stages.graders.jail.lockdown import hide, limit, lock_down
from stages.graders.jail.privileges import drop_privileges
from stages.process_guard import die_with, libc

_RESULT_FD, _READY_FD = 3, 4
_HIGHEST_FD = 1024  # this process opens a handful
_READY = b"ready"
_REASON_BYTES = 500
# Of one program: what resource limits do not hold. Looked at while it runs, so it may get beyond by what it does in
# LOOK_S; a file in memory or on the disk is limited at once.
FILE_BYTES = 4 << 20
DIRECTORY_BYTES, DIRECTORY_ENTRIES = 16 << 20, 200
THREADS = 256
_LOOK_S = 0.025
_LIBRARIES = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/share/zoneinfo", "/etc/localtime", "/dev/urandom")


class Job(TypedDict):
    """What is to be run, and for how long (seconds)."""

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
    deadline = time.monotonic() + job["total_s"]
    results: list[Result] = []
    left = 8 * job["output_bytes"]  # of all cases together
    full = False
    for case in job["cases"]:
        allowed_s = min(job["case_s"], deadline - time.monotonic())
        if full or allowed_s <= 0:
            results.append(Result(how="killed" if full else "timeout", stdout="", value=""))
            continue
        result = _run(job, case, allowed_s)
        left -= len(result["stdout"]) + len(result["value"])
        full = _is_full(job["directory"])  # it may have been too quick to be looked at
        if full or left < 0:
            result = Result(how="killed" if full else "output", stdout="", value="")
        results.append(result)
    sys.stdout.write(json.dumps(results))
    sys.stdout.flush()


def _run(job: Job, case: dict[str, Any], allowed_s: float) -> Result:
    """One case, in a fork with files in memory for its input and output."""
    files = source, output, value = [os.memfd_create(name) for name in ("input", "output", "value")]
    ours, theirs = os.pipe()
    try:
        os.write(source, str(case.get("stdin", "")).encode("utf-8", "replace"))
        os.lseek(source, 0, os.SEEK_SET)
        me = os.getpid()
        child = os.fork()
        if child == 0:
            _become(job, case, me, (*files, theirs), allowed_s)
        os.close(theirs)
        # Waits for the fork to close its end: nothing that it does before that is the program's.
        with open(ours, "rb") as said:
            prepared = said.read(_REASON_BYTES)
        if prepared != _READY:
            os.waitpid(child, 0)
            return Result(how="isolation", stdout="", value=prepared.decode(errors="replace") or "it ended unprepared")
        how = _wait(child, allowed_s, job["directory"])
        text, returned = _content(output, job["output_bytes"]), _content(value, job["output_bytes"])
        if how == "ok" and (text is None or returned is None):
            how = "output"
        return Result(how=how, stdout=text or "", value=returned or "")
    finally:
        for descriptor in files:
            os.close(descriptor)


def _wait(child: int, allowed_s: float, directory: str) -> str:
    """Waits for the end of the fork; unblocked by it, by the time and by what it must not have, and then kills it."""
    end = time.monotonic() + allowed_s
    poll = select.poll()
    with open(os.pidfd_open(child), "rb", buffering=0) as handle:
        poll.register(handle, select.POLLIN)
        ended, broken = poll.poll(_milliseconds(min(allowed_s, _LOOK_S))), ""
        while not (ended or broken):
            left_s = end - time.monotonic()
            if left_s <= 0:
                broken = "timeout"
            elif _has_too_many_threads(child) or _is_full(directory):
                broken = "killed"
            else:
                ended = poll.poll(_milliseconds(min(left_s, _LOOK_S)))
        if broken:
            os.kill(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if broken:
        return broken
    if status < 0:
        return "timeout" if status == -signal.SIGXCPU else "killed"
    return {0: "ok", 1: "failed"}.get(status, "exit")


def _milliseconds(seconds: float) -> int:
    return max(1, math.ceil(seconds * 1000))


def _has_too_many_threads(child: int) -> bool:
    with suppress(OSError), open(f"/proc/{child}/stat", "rb") as stat:
        return int(stat.read().rpartition(b")")[2].split()[17]) > THREADS
    return False


def _is_full(directory: str) -> bool:
    """Whether there is more in the directory of the program than may be."""
    entries = used = 0
    for path, names, files in os.walk(directory):
        for name in (*names, *files):
            entries += 1
            with suppress(OSError):
                used += 512 * os.lstat(os.path.join(path, name)).st_blocks
            if entries > DIRECTORY_ENTRIES or used > DIRECTORY_BYTES:
                return True
    return False


def _content(descriptor: int, most: int) -> str | None:
    """Text of a file in memory, None if it is longer than `most` bytes."""
    size = os.fstat(descriptor).st_size
    return None if size > most else os.pread(descriptor, size, 0).decode("utf-8", "replace")


def _become(job: Job, case: dict[str, Any], parent: int, files: tuple[int, ...], allowed_s: float) -> None:
    """In the fork: give everything up, then run the program. Never returns."""
    source, output, said, ready = files
    try:
        drop_privileges(libc(), job["directory"])
        die_with(parent)  # behind what makes the kernel forget it
        hide()
        os.chdir(job["directory"])
        nothing = os.open(os.devnull, os.O_WRONLY)
        for number, descriptor in ((0, source), (1, output), (2, nothing), (_RESULT_FD, said), (_READY_FD, ready)):
            os.dup2(descriptor, number)
        ready = _READY_FD
        os.closerange(_READY_FD + 1, _HIGHEST_FD)
        sys.stdin, sys.stdout, sys.stderr = _text(0, "r"), _text(1, "w"), _text(2, "w")
        limit(math.ceil(allowed_s) + 1, job["memory_bytes"], FILE_BYTES)
        lock_down([os.path.dirname(os.__file__), *_LIBRARIES], [job["directory"], os.devnull])
    except BaseException as error:  # whatever it is, it goes no further than this process
        with suppress(OSError):
            os.write(ready, f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    os.write(_READY_FD, _READY)
    os.close(_READY_FD)
    os._exit(_perform(job["program"], case))


def _text(descriptor: int, mode: str) -> TextIO:
    stream = open(descriptor, mode, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115 - for good
    return cast(TextIO, stream)


def _perform(program: str, case: dict[str, Any]) -> int:
    """Run a case as a script would; the exit code."""
    exit_code = 0
    try:
        _execute(program, case)
    except SystemExit as leaving:
        # A call or a check that leaves early has not returned.
        asked = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        exit_code = asked if "stdin" in case else 1
    except BaseException:  # whatever it is, it is the program's own, and the case has failed
        exit_code = 1
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        exit_code = 1  # too much output, or it closed its own
    return exit_code & 0xFF


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
    if name not in scope and "Solution" in scope:
        return getattr(scope["Solution"](), name)
    return scope[name]


def _plain(value: object) -> object:
    """What JSON does not know: sets as sorted lists, everything else in its own words."""
    return sorted(value) if isinstance(value, set | frozenset) else repr(value)
