"""A second host on this machine: chosen processes live in namespaces of their own.

The host has its own network (a veth pair joins it to this one), its own processes and /proc, and its own files where
runs keep theirs: /dev/shm, the directory of temporary files and the run directory are empty there. The project's code
and the Python that runs it are seen from both, as an installation is.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from pipeline.hosts import die_with_parent
from pipeline.hosts.launcher import ANYTHING, Handle, ProcessSpec, ProcessState, Resources
from pipeline.hosts.local_launcher import LocalHandle, LocalLauncher
from pipeline.record.run_directory import RunDir

ROOT = Path(__file__).parent.parent.parent
# Held open from outside, so that it is seen although what lies above it is hidden. "ready" comes when all is in place.
HOLD = """
import os, subprocess, sys
root, *hidden = sys.argv[1:]
kept = os.open(root, os.O_PATH)
for place in hidden:
    os.makedirs(place, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=1777", "none", place], check=True)
os.makedirs(root, exist_ok=True)
subprocess.run(["mount", "--no-canonicalize", "--bind", f"/proc/self/fd/{kept}", root], check=True, pass_fds=[kept])
subprocess.run(["mount", "-t", "proc", "none", "/proc"], check=True)
print("ready", flush=True)
sys.stdin.read()
"""
_numbers = itertools.count(os.getpid() % 200)


class NamespacesRefused(Exception):
    """This machine does not let a test make namespaces."""


def _run(*command: str) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except FileNotFoundError:
        raise NamespacesRefused(f"{command[0]} is not installed") from None
    except subprocess.CalledProcessError as error:
        raise NamespacesRefused(f"{' '.join(command)}: {error.stderr.strip()}") from None


class OtherHost:
    """The namespaces, for the time of a `with` block. `hidden`: directories that are empty there."""

    def __init__(self, *hidden: Path) -> None:
        self._hidden = hidden
        number = next(_numbers) % 250
        self.here, self.there = f"10.77.{number}.1", f"10.77.{number}.2"
        self._link = f"slu{os.getpid() % 100000}x{number}"
        self.ports = itertools.count(20_000)  # nobody else takes any there

    def __enter__(self) -> OtherHost:
        if os.geteuid() != 0 or shutil.which("unshare") is None:
            raise NamespacesRefused("namespaces need root and unshare(1)")
        self._holder = subprocess.Popen(
            ["unshare", "--net", "--mount", "--pid", "--ipc", "--fork", "--kill-child", "--propagation", "private",
             sys.executable, "-c", HOLD, str(ROOT), *map(str, self._hidden)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert self._holder.stdout is not None
            if self._holder.stdout.readline() != "ready\n":
                assert self._holder.stderr is not None
                raise NamespacesRefused(self._holder.stderr.read().strip().splitlines()[-1])
            child = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text().split()
            self.pid = int(child[0])
            self._join()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _join(self) -> None:
        peer = f"{self._link}p"
        _run("ip", "link", "add", self._link, "type", "veth", "peer", "name", peer)
        _run("ip", "link", "set", peer, "netns", str(self.pid))
        _run("ip", "addr", "add", f"{self.here}/24", "dev", self._link)
        _run("ip", "link", "set", self._link, "up")
        inside = ("nsenter", "-t", str(self.pid), "-n", "ip")
        _run(*inside, "addr", "add", f"{self.there}/24", "dev", peer)
        _run(*inside, "link", "set", peer, "up")
        _run(*inside, "link", "set", "lo", "up")

    def __exit__(self, *_: object) -> None:
        self._holder.kill()  # its namespaces end with it, and all that runs in them
        self._holder.communicate()
        subprocess.run(["ip", "link", "del", self._link], capture_output=True, check=False)

    def inside(self, argv: tuple[str, ...]) -> tuple[str, ...]:
        """A command that runs there, and ends with the process that waits for it here."""
        enter = ("nsenter", "-t", str(self.pid), "--net", "--mount", "--pid", "--ipc", "--")
        python = (sys.executable, "-IS")  # what enters another mount namespace stands at its root
        stand = f"import os, sys; os.chdir({str(ROOT)!r}); os.execv(sys.argv[1], sys.argv[1:])"
        return (*enter, *python, "-c", stand, *python, str(die_with_parent.__file__), "0", *argv)

    def bring(self, path: Path) -> None:
        """Copy a file or directory to the same place there, unless it is seen."""
        target = Path(f"/proc/{self.pid}/root{path}")
        if target.exists() or not path.exists():
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if path.is_dir() else shutil.copy2
        copy(path, target)


class _ThereHandle(LocalHandle):
    """A process of the other host: what it computes is not seen from here."""

    def state(self) -> ProcessState | None:
        return None


class NamespaceLauncher(LocalLauncher):
    """Starts the processes whose names begin with one of `there` on the other host, all others here."""

    there = ("engine", "generate", "reward")

    def __init__(self, host: OtherHost, rundir: RunDir, threads: int) -> None:
        super().__init__(rundir, threads)
        self.host, self.controller = host, host.here

    def _is_there(self, name: str) -> bool:
        return name.startswith(self.there)

    def address(self, name: str) -> str:
        return self.host.there if self._is_there(name) else super().address(name)

    @contextlib.contextmanager
    def held_port(self, name: str, port: int = 0) -> Iterator[int]:
        if self._is_there(name):
            yield port or next(self.host.ports)
            return
        with super().held_port(name, port) as held:
            yield held

    async def spawn(self, spec: ProcessSpec, resources: Resources = ANYTHING) -> Handle:
        if not self._is_there(spec.name):
            return await super().spawn(spec, resources)
        for path in spec.files:
            self.host.bring(Path(path))
        handle = await super().spawn(msgspec.structs.replace(spec, argv=self.host.inside(spec.argv)), resources)
        handle.__class__ = _ThereHandle
        return handle


def hidden(run_dir: Path) -> tuple[Path, ...]:
    """What a run keeps on its own machine."""
    return Path("/dev/shm"), Path(tempfile.gettempdir()), run_dir
