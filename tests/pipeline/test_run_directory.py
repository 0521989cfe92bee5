"""What a run directory holds apart from files: a lock, and a private directory for sockets that outlives no run."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.record.run_directory import RunDir

HOLD = "import sys; from pathlib import Path; from pipeline.record.run_directory import RunDir; "
HOLD += "rundir = RunDir(Path(sys.argv[1])).open(resume=False); print(rundir.sockets, flush=True); sys.stdin.read()"


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "runtime"
    home.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(home))
    return home


def test_what_a_killed_run_left_of_its_sockets_goes_with_the_next_start(tmp_path: Path, runtime: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path / "killed")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        left = Path(process.stdout.readline().strip())
        with RunDir(tmp_path / "meanwhile").open(resume=False):
            assert left in runtime.iterdir(), "its run is alive"
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert list(runtime.iterdir()) == [left]
    with RunDir(tmp_path / "next").open(resume=False) as rundir:
        assert list(runtime.iterdir()) == [rundir.sockets]
        assert rundir.sockets.stat().st_mode & 0o777 == 0o700
    assert list(runtime.iterdir()) == []


def test_the_configuration_is_replaced_whole(tmp_path: Path, runtime: Path) -> None:
    with RunDir(tmp_path / "run").open(resume=False) as rundir:
        rundir.write_config("[run]\n")
        kept = rundir.config.open()
        rundir.write_config("[train]\n")
        assert (kept.read(), rundir.config.read_text()) == ("[run]\n", "[train]\n")
        kept.close()
