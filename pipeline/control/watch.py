"""`python launch.py watch RUN`: the live table of a run that goes on elsewhere, until it ends.

Once per second the run is asked for its status over its control socket, as `launch.py status` does. The table is that
of the run's own terminal, and without a terminal there are its plain lines. The run goes on when the watching ends. The
exit code is 0 for a run that is completed or drained, 1 for one that failed or was killed, 3 where there is none.

Invariants: a run that starts, stops, or does not answer for a while is watched on; its end is shown once, with the
reason and the command that continues it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pipeline.control.client import ENDED, NO_RUN, ask, from_files, table, with_files
from pipeline.control.endpoint import RunStatus, Status
from pipeline.errors import CommandRefused, NotRunning
from pipeline.facts.stats import visible
from pipeline.observe.table import LiveTable, PlainLog, open_display

ASK_S: Final = 1.0  # from one question to the next


def main(argv: Sequence[str]) -> int:
    """Watch until the run ends; returns the exit code. Raises NotRunning where there is no run."""
    parser = argparse.ArgumentParser(prog="launch.py watch", description="Show the live table of a run until it ends.")
    parser.add_argument("run", metavar="RUN", help="run directory")
    run = Path(parser.parse_args(argv).run)
    with open_display(None, log_interval=1) as display:
        last = watch(run, display)
    sys.stdout.write(f"{table(with_files(last))}\n")
    return int(last.state in ("failed", "killed"))


def watch(run: Path, display: LiveTable | PlainLog) -> RunStatus:
    """Draw the run until it ends; returns its last status. Raises NotRunning where there is no run."""
    noted = ""
    while True:
        try:
            status = _status(run)
            news = f"{status.state}: {status.waits}" if status.waits else status.state
        except CommandRefused as error:  # too many ask, or it does not answer: it may do so again
            status, news = None, str(error)
        if status is not None and status.snapshot is not None:
            display.update(status.snapshot)
        if news != noted:
            display.note(visible(news))
            noted = news
        if status is not None and status.state in ENDED:
            return status
        time.sleep(ASK_S)


def _status(run: Path) -> RunStatus:
    """Of the run's process, else of its files. Raises CommandRefused, NotRunning."""
    try:
        reply = ask(run, Status())
    except NotRunning:
        status = from_files(run)
        if status.state == NO_RUN:
            raise
        return status
    if reply.status is None:
        raise CommandRefused(reply.lines)
    return reply.status
