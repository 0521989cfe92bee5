"""What a run directory holds apart from files: a lock, and a private directory for sockets that outlives no run."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.errors import UsageError
from pipeline.facts.run_directory import RunDir

HOLD = "import sys; from pathlib import Path; from pipeline.facts.run_directory import RunDir; "
HOLD += "rundir = RunDir(Path(sys.argv[1])).open(resume=False); print(rundir.sockets, flush=True); sys.stdin.read()"


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="home-") as home:  # its path is short, whatever tmp_path is
        monkeypatch.setenv("XDG_RUNTIME_DIR", home)
        yield Path(home)


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


def test_a_new_directory_is_for_its_owner_alone(tmp_path: Path, runtime: Path) -> None:
    with RunDir(tmp_path / "new" / "run").open(resume=False) as rundir:
        assert rundir.path.stat().st_mode & 0o777 == 0o700
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o750)
    with RunDir(tmp_path / "shared").open(resume=False) as rundir:
        assert rundir.path.stat().st_mode & 0o777 == 0o750, "whom its owner lets in is the owner's affair"


def test_a_directory_in_which_anybody_can_put_links_is_refused(tmp_path: Path, runtime: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "open" / "logs").symlink_to(tmp_path)
    with pytest.raises(UsageError, match=r"can be written by every user of this machine \(mode 0777\); chmod o-w it"):
        RunDir(tmp_path / "open").open(resume=False)
    assert not (tmp_path / "engine-0.log").exists()
    assert [path.name for path in (tmp_path / "open").iterdir()] == ["logs"], "nothing was written there"


def test_the_configuration_is_replaced_whole(tmp_path: Path, runtime: Path) -> None:
    with RunDir(tmp_path / "run").open(resume=False) as rundir:
        rundir.write_config("[run]\n")
        kept = rundir.config.open()
        rundir.write_config("[train]\n")
        assert (kept.read(), rundir.config.read_text()) == ("[run]\n", "[train]\n")
        kept.close()


def test_sockets_go_where_their_paths_are_short_enough(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep, short = tmp_path / ("d" * 60) / ("e" * 40), runtime
    deep.mkdir(parents=True)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    with RunDir(tmp_path / "run").open(resume=False) as rundir:
        assert rundir.sockets.parent == short
        for name in ("ask.sock", "trainer-group-123456.sock"):
            with socket.socket(socket.AF_UNIX) as listening:
                listening.bind(str(rundir.sockets / name))
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(UsageError, match="107 bytes that the kernel takes; set TMPDIR to a directory whose path has"):
        RunDir(tmp_path / "other").open(resume=False)
