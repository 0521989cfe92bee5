"""What the page of a run costs the run: `python -m bench.observe`.

One run with simulated engine and trainer, batches of 32 groups of 8 rollouts. A process of its own serves its page all
the time. In every second window it is asked as a browser asks it: for the state every second, the lanes every two, the
metrics every three. CPU of the run's own processes is counted per batch, that of the server apart.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Final

from bench.control_plane import FLAGS
from bench.report import ROOT, Series, arguments, finish, machine
from bench.scale import usage

SHUT, OPEN = "page shut", "page open"
WARM_UP_S: Final = 15.0
DOCUMENTS: Final = {"run": 1, "lanes?seconds=60": 2, "metrics?after=-1": 3}  # every so many seconds


def newest_step(run: Path) -> int:
    """Batches that the run has trained."""
    lines = (run / "metrics.jsonl").read_bytes().splitlines() if (run / "metrics.jsonl").is_file() else []
    return int(json.loads(lines[-1])["step"]) if lines else 0


def look(address: str, token: str, second: int) -> int:
    """Ask for what a browser asks for in this second; the bytes that came."""
    size = 0
    for document in (name for name, every in DOCUMENTS.items() if second % every == 0):
        request = urllib.request.Request(f"{address}api/{document}", headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request) as reply:
            size += len(reply.read())
    return size


def measure(windows: int, window_s: int) -> dict[tuple[str, str, str], list[float]]:
    """A value for each window, by (what was measured, contender, unit)."""
    found: dict[tuple[str, str, str], list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as home:
        run_dir, log = Path(home) / "run", Path(home) / "log"
        argv = [sys.executable, "launch.py", *FLAGS, "--num-rollout", "1000000", "--run-dir", str(run_dir)]
        with log.open("w") as output:
            run = subprocess.Popen(argv, cwd=ROOT, stdout=output, stderr=output)
        while newest_step(run_dir) < 1:
            if run.poll() is not None:
                sys.exit(f"exit code {run.returncode}\n{log.read_text()[-2000:]}")
            time.sleep(0.5)
        view = [sys.executable, "launch.py", "view", str(run_dir)]
        server = subprocess.Popen(view, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            address, _, token = server.stdout.readline().strip().partition("#token=")
            time.sleep(WARM_UP_S)
            for window in range(windows):
                name = OPEN if window % 2 else SHUT
                step, before, seen = newest_step(run_dir), usage(run.pid), usage(server.pid)
                for second in range(window_s):
                    began = time.monotonic()
                    if name == OPEN:
                        look(address, token, second)
                    time.sleep(max(0.0, 1.0 - time.monotonic() + began))
                batches, after = newest_step(run_dir) - step, usage(run.pid)
                seconds, served = after.at_s - before.at_s, usage(server.pid).cpu_s - seen.cpu_s
                values = {
                    ("the run", "CPU-ms/batch"): 1e3 * (after.cpu_s - before.cpu_s) / batches,
                    ("its pace", "batches/s"): batches / seconds,
                } | ({("the server of the page", "CPU-ms/s"): 1e3 * served / seconds} if name == OPEN else {})
                for (what, unit), value in values.items():
                    found.setdefault((what, name, unit), []).append(value)
                print(f"{name}: {batches} batches in {seconds:.1f} s", flush=True)
        finally:
            for process in (server, run):
                process.terminate()
                process.wait()
    return found


def main() -> None:
    parser = arguments(__doc__, "observe", "4 windows of 10 s", rounds="number of windows, half of them open")
    options = parser.parse_args()
    windows, window_s = options.rounds or (4 if options.quick else 20), 10 if options.quick else 15
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    about = machine(["pyzmq", "msgspec", "aiohttp"])
    found = measure(windows, window_s)
    series = [Series(setting, name, unit, values) for (setting, name, unit), values in found.items()]
    remarks = [f"{windows} windows of {window_s} s in one run, alternating", about.load]
    finish(options.output, about, remarks, series, baseline=SHUT)


if __name__ == "__main__":
    main()
