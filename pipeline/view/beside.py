"""`--view`: the server of `launch.py view` as a child of the run, which ends with it and cannot harm it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pipeline.facts.run_log import PROJECT
from pipeline.hosts import die_with_parent as die_with_parent

END_S: Final = 5.0


@contextlib.contextmanager
def viewed(run_dir: Path, wanted: bool) -> Iterator[None]:
    """Serve the run for the time of the block, and print the address once. Waits for nothing but the child's end."""
    if not wanted:
        yield
        return
    child = subprocess.Popen(
        [
            *(sys.executable, "-IS", str(die_with_parent.__file__), str(os.getpid())),
            *(sys.executable, str(PROJECT / "launch.py"), "view", str(run_dir)),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for the run
    )
    threading.Thread(target=_print_address, args=(child,), daemon=True).start()
    try:
        yield
    finally:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(END_S)
        child.kill()


def _print_address(child: subprocess.Popen[str]) -> None:
    """On the error output alone: the address has a token, which no log need hold."""
    if child.stdout is not None and (address := child.stdout.readline().strip()):
        sys.stderr.write(f"view: {address}\n")
