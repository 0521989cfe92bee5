"""Runs untrusted Python programs in the jail, from a grader process. Linux only.

The jail is a process without files, network, children or signals. `lockdown` takes rights away from the calling
process, for good: root and capabilities, files (`landlock`), all system calls but a list (`syscalls`). `cases` is the
program that runs cases, each in a fork that is locked down. They import nothing but the standard library, for the
interpreter of the jail has nothing else.

Invariants: the jail's environment holds only variables that make Python repeatable; it inherits no descriptor; its
files are in a new directory that is removed afterwards; its process has ended before `run_cases` returns.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

MEMORY_BYTES: Final = 1 << 30
OUTPUT_BYTES: Final = 1 << 20  # limit of the prints of one case
_GRACE_S = 5.0  # for the jail itself, beyond the time of its cases
_PREFIX = "sluice-jail"
_ROOT = Path(__file__).resolve().parents[2]

# No -E and no -I: the environment holds nothing of the caller's, and -E would ignore PYTHONHASHSEED.
ENVIRONMENT: Final = {"PYTHONHASHSEED": "0", "LANG": "C.UTF-8", "PATH": "/usr/bin:/bin"}
PYTHON: Final = (sys.executable, "-P", "-s", "-S", "-X", "utf8", "-c")
_PROGRAM = (
    "import sys; sys.path.append({root!r}); from stages.sandbox.cases import main; sys.path.pop(); main({parent})"
)


class SandboxError(Exception):
    """The jail failed, and the program is not the cause."""


class StdinCase(Struct, frozen=True):
    """Run the program as a script."""

    stdin: str


class CallCase(Struct, frozen=True):
    """Import the program and call one of its functions. Arguments are what JSON can say."""

    call: str
    arguments: list[Any]


class CheckCase(Struct, frozen=True):
    """Import the program, then run `check` in its namespace; `token` comes back if that ended."""

    check: str
    token: str


Case = StdinCase | CallCase | CheckCase


class Limits(Struct, frozen=True):
    """Of one job. `case_s` is wall time; a program gets as much processor time, rounded up, and one second."""

    total_s: float
    case_s: float
    memory_bytes: int = MEMORY_BYTES
    output_bytes: int = OUTPUT_BYTES


class CaseResult(Struct, frozen=True):
    """How a case went (see `Result` in cases.py).

    `value`: the result of a call (JSON), the token of a check that ended, or why programs cannot be isolated here.
    """

    how: Literal["ok", "failed", "exit", "killed", "timeout", "output", "isolation"]
    stdout: str = ""
    value: str = ""


def run_cases(program: str, cases: Sequence[Case], limits: Limits) -> list[CaseResult]:
    """How the program did in each case. Waits for the jail, at most its time and some grace.

    Raises SandboxError if the jail cannot be set up here, or died of another cause than the program.
    """
    directory = make_directory()
    try:
        job = {"program": program, "cases": cases, "directory": directory, **msgspec.structs.asdict(limits)}
        ended = subprocess.run(  # it is killed whatever ends the wait
            [*PYTHON, _PROGRAM.format(root=str(_ROOT), parent=os.getpid())],
            input=msgspec.json.encode(job),
            capture_output=True,
            timeout=limits.total_s + _GRACE_S,
            env=ENVIRONMENT,
            cwd="/",
        )
    except subprocess.TimeoutExpired as error:
        raise SandboxError(f"the jail did not end within {error.timeout:g} s") from None
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    try:
        results = msgspec.json.decode(ended.stdout, type=list[CaseResult])
    except msgspec.MsgspecError as error:
        words = ended.stderr.decode(errors="replace").strip()[-300:]
        raise SandboxError(f"the jail ended with code {ended.returncode} and no result: {words}") from error
    broken = next((result for result in results if result.how == "isolation"), None)
    if broken is not None:
        raise SandboxError(f"programs cannot be isolated on this machine ({broken.value}), so none is run")
    return results


def make_directory() -> str:
    """A new directory of this process for a jail, removed by a later one if this process is killed."""
    _sweep()
    return tempfile.mkdtemp(prefix=f"{_PREFIX}-{_namespace()}-{os.getpid()}-")


def _namespace() -> int:
    """The namespace of process numbers: containers may share a temporary directory."""
    return os.stat("/proc/self/ns/pid").st_ino


@lru_cache(maxsize=1)
def _sweep() -> None:
    """Remove, once, the directories of killed grader processes, which could not do it themselves."""
    prefix = f"{_PREFIX}-{_namespace()}-"
    for entry in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        owner = entry.name.removeprefix(prefix).partition("-")[0]
        if owner.isdecimal() and not Path(f"/proc/{owner}").exists():
            with contextlib.suppress(OSError):  # another process sweeps as well, or it is another user's
                shutil.rmtree(entry)
