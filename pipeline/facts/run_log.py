"""`run.log` in the run directory: all lines that the controller's terminal showed, with date and time, over all starts.

    2026-11-25 12:00:03.512 controller: step 10/500 | reward 0.412 | ...

Lines come from `show_line`, `log_line` and the warnings of all loggers of this process. A live table is not repeated.
Invariants: a line is written once, at once; a disk that is full, or a directory that is gone, loses lines of the log
and of the terminal, and never ends the run; the log and the older file beside it have at most `MOST_BYTES` each.
"""

from __future__ import annotations

import contextlib
import logging
import shlex
import sys
import threading
import time
import tomllib
import traceback
from collections.abc import Callable, Iterator
from importlib.metadata import version
from logging.handlers import RotatingFileHandler
from pathlib import Path
from shutil import which
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, TextIO, cast

import msgspec

if TYPE_CHECKING:  # the parent of --auto-resume, and --version, need no event loop
    import asyncio

RUN_LOG: Final = "run.log"
MOST_BYTES: Final = 8 << 20
LOOKS: Final = 4  # at the event loop, for a notice
PROJECT: Final = Path(__file__).resolve().parents[2]
PACKAGES: Final = tuple(f"{PROJECT / name}/" for name in ("configs", "models", "pipeline", "stages", "transport"))
LINE: Final = "%(asctime)s.%(msecs)03d {}: %(message)s"

_lines = logging.getLogger("sluice.lines")
_lines.setLevel(logging.INFO)


class _Log(RotatingFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """A log that cannot be written is lost: the run itself may still go on."""


class _Output:
    """An output of a run, which goes on without it where its disk is full or its reader has ended."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def outlive_output() -> None:
    """From now on this process does not end because nobody can read what it shows."""
    sys.stdout, sys.stderr = cast(TextIO, _Output(sys.stdout)), cast(TextIO, _Output(sys.stderr))


def log_line(line: str) -> None:
    """Keep a line that the terminal showed."""
    _lines.info(line)


def show_line(line: str) -> None:
    """Show a line on the error output, and keep it."""
    sys.stderr.write(f"{line}\n")
    log_line(line)


def show(text: str, value: object, *, as_json: bool) -> None:
    """Show the result of a command: text for people, or a value as JSON, which docs/control.md describes."""
    shown = msgspec.json.format(msgspec.json.encode(value), indent=2).decode() if as_json else text
    sys.stdout.write(f"{shown}\n")


@contextlib.contextmanager
def named(what: str, notice_s: float = 60.0) -> Iterator[None]:
    """Names, each minute, what this process does or waits for in the block, also where its event loop stands still."""
    began = time.monotonic()
    with _each(notice_s, lambda: show_line(f"waiting for {time.monotonic() - began:.0f} s: {what}")):
        yield


@contextlib.contextmanager
def _each(seconds: float, work: Callable[[], None]) -> Iterator[None]:
    """Does the work again and again in a thread of its own, first after so many seconds."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(seconds):
            work()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextlib.contextmanager
def loop_watched(loop: asyncio.AbstractEventLoop, notice_s: float = 60.0) -> Iterator[None]:
    """Names, each minute, the place where this thread's event loop stands still, such as a write to a disk that hangs.

    The thread counts its own waits, so the time in which the whole process was stopped does not count.
    """
    loop_thread, moved, quiet = threading.get_ident(), threading.Event(), 0

    def look() -> None:
        nonlocal quiet
        quiet = 0 if moved.is_set() else quiet + 1
        moved.clear()
        loop.call_soon_threadsafe(moved.set)
        if quiet and quiet % LOOKS == 0:
            place = _place(sys._current_frames()[loop_thread])
            show_line(
                f"waiting for {quiet // LOOKS * notice_s:.0f} s: {place} does not return, and the controller stands "
                "still; if its disk hangs, a kill and --resume end it"
            )

    with _each(notice_s / LOOKS, look):
        yield


def _place(frame: FrameType) -> str:
    """The innermost function of this project."""
    stack = traceback.extract_stack(frame)
    ours = [entry for entry in stack if entry.filename.startswith(PACKAGES)] or stack
    return f"{ours[-1].name} ({ours[-1].filename.removeprefix(f'{PROJECT}/')}:{ours[-1].lineno})"


@contextlib.contextmanager
def run_log(directory: Path, process: str = "controller", level: str = "info") -> Iterator[None]:
    """Keeps the lines of the block, with warnings of libraries, which also go to the error output. `level`:
    debug keeps all records, error leaves warnings out."""
    log, errors, root = _Log(directory / RUN_LOG, "a", MOST_BYTES, 1, delay=True), logging.StreamHandler(), _lines.root
    log.setFormatter(logging.Formatter(LINE.format(process), "%Y-%m-%d %H:%M:%S"))
    errors.setLevel(logging.WARNING)
    handlers: tuple[logging.Handler, ...] = (log,) if root.handlers else (log, errors)
    before = root.level
    root.setLevel(
        logging.WARNING if level == "info" else level.upper()
    )  # lines of the terminal have level info already
    for handler in handlers:
        root.addHandler(handler)
    try:
        yield
    except BaseException as error:
        log_line(f"ends: {type(error).__name__}: {error}")
        raise
    finally:
        root.setLevel(before)
        for handler in handlers:
            root.removeHandler(handler)
        with contextlib.suppress(OSError):  # what a full disk did not take
            log.close()


def command(called: str) -> str:
    """What to type for a command of this program, in the folder where it was called as `called`."""
    name = Path(called).name
    if name == "sluice":
        return name if which(name) else shlex.quote(called)
    return f"python {shlex.quote(called)}" if name == "launch.py" else "python launch.py"


PROGRAM: Final = command(sys.argv[0])


def release() -> str:
    """The version of this program."""
    project = PROJECT / "pyproject.toml"
    if not project.is_file():  # installed from a wheel
        return version("sluice")
    return str(tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"])
