"""CPU time of a process with its children, and idle cores, as a run's advice reads them."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from pipeline.hosts.machine import IdleCores, cpu_seconds

SPINS = (
    "import time\nend = time.process_time() + 0.2\nwhile time.process_time() < end: pass\nprint(flush=True)\ninput()"
)


def test_the_time_of_children_counts() -> None:
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SPINS!r}])"
    child = subprocess.Popen([sys.executable, "-c", outer], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    assert cpu_seconds(child.pid) >= 0.19
    child.communicate(b"\n")
    assert cpu_seconds(child.pid) == 0.0, "it has ended"


def test_idle_time_is_at_most_that_of_all_cores() -> None:
    idle, began = IdleCores(), time.monotonic()
    assert idle.look() >= 0.0
    time.sleep(0.05)
    seen, passed = idle.look(), time.monotonic() - began
    assert 0.0 <= seen <= (passed + 0.1) * len(os.sched_getaffinity(0))
