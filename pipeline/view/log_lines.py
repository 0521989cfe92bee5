"""The lines of all logs of a run in one list, by time."""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path
from typing import Any, Final

import msgspec

from models.disk import open_file
from pipeline.facts.run_log import RUN_LOG

MOST_LINES: Final = 1_000  # of an answer
MOST_BYTES: Final = 1 << 18  # read of a file at once; more was added: the newest
MOST_CHARS: Final = 4_000  # of a line
_TIME: Final = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:[.,](\d{1,6}))?\s*")


def log_lines(run: Path, after: str, text: str) -> dict[str, Any]:
    """Lines after a cursor, the newest ones; `text`: only those that have it. A line without a time has that of the
    line before it in its file."""
    try:
        places = msgspec.json.decode(after or "{}", type=dict[str, int])
    except msgspec.MsgspecError:
        places = {}
    found: list[tuple[float, str, str]] = []
    cursor: dict[str, int] = {}
    for path in (run / RUN_LOG, *sorted((run / "logs").glob("*.log"))):
        with contextlib.suppress(OSError), open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            place = known if 0 <= (known := places.get(path.name, -1)) <= size else 0  # it may be a new file
            file.seek(start := max(place, size - MOST_BYTES))
            data = file.read(size - start)
            whole = data[: data.rfind(b"\n") + 1]
            cursor[path.name] = start + len(whole)
            at_s = 0.0
            for line in whole.decode(errors="replace").split("\n")[1 if start > place else 0 : -1]:
                shown = line.rsplit("\r", 1)[-1][:MOST_CHARS]
                if (match := _TIME.match(shown)) is not None:
                    with contextlib.suppress(ValueError, OverflowError):
                        at_s = time.mktime(time.strptime(match[1], "%Y-%m-%d %H:%M:%S")) + float(f"0.{match[2] or 0}")
                    shown = shown[match.end() :]
                if text.lower() in shown.lower():
                    found.append((at_s, path.stem if path.name != RUN_LOG else "controller", shown))
    found.sort(key=lambda one: one[0])
    lines = [{"at_s": at_s or None, "process": process, "text": shown} for at_s, process, shown in found[-MOST_LINES:]]
    return {"lines": lines, "cursor": msgspec.json.encode(cursor).decode()}
