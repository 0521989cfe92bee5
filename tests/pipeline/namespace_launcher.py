"""A second host on this machine: chosen processes live in namespaces of their own.

The host has its own network (a veth pair joins it to this one), its own processes and /proc, and its own files where
runs keep theirs: /dev/shm, the directory of temporary files and the run directory are empty there, but for what is
shared. The project's code and the Python that runs it are seen from both, as an installation is.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

import msgspec

from pipeline.facts.run_directory import RunDir
from pipeline.hosts import die_with_parent
from pipeline.hosts.launcher import Handle, ProcessSpec, SharedFiles
from pipeline.hosts.local_launcher import LocalHandle, LocalLauncher
from pipeline.hosts.machine import ProcessState

ROOT = Path(__file__).parent.parent.parent
# Held open from outside, so that they are seen although what lies above is hidden. "ready" comes when all is in place.
HOLD = """
import os, subprocess, sys
count, *places = sys.argv[1:]
seen, hidden = places[:int(count)], places[int(count):]
kept = [os.open(place, os.O_PATH) for place in seen]
for place in hidden:
    os.makedirs(place, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=1777", "none", place], check=True)
for place, fd in zip(seen, kept):
    os.makedirs(place, exist_ok=True)
    subprocess.run(["mount", "--no-canonicalize", "--bind", f"/proc/self/fd/{fd}", place], check=True, pass_fds=[fd])
subprocess.run(["mount", "-t", "proc", "none", "/proc"], check=True)
print("ready", flush=True)
sys.stdin.read()
"""


class NamespacesRefused(Exception):
    """This machine does not let a test make namespaces."""


def _run(*command: str) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except FileNotFoundError:
        raise NamespacesRefused(f"{command[0]} is not installed") from None
    except subprocess.CalledProcessError as error:
        raise NamespacesRefused(f"{' '.join(command)}: {error.stderr.strip()}") from None


def _own_number() -> tuple[int, IO[str]]:
    """A number that no other process has a network of, and what keeps it from others while it is open."""
    for number in range(250):
        held = Path(tempfile.gettempdir(), f"sluice-test-network-{number}").open("w")  # noqa: SIM115 - kept open
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            held.close()
        else:
            return number, held
    raise NamespacesRefused("250 networks of tests are in use")


class OtherHost:
    """The namespaces, for the time of a `with` block. `hidden`: directories that are empty there; `shared`: those in
    them that are not."""

    def __init__(self, *hidden: Path, shared: tuple[Path, ...] = ()) -> None:
        self._hidden, self._seen = hidden, (ROOT, *shared)
        number, self._number = _own_number()
        self.here, self.there = f"10.77.{number}.1", f"10.77.{number}.2"
        self._link = f"slu{os.getpid() % 100000}x{number}"
        self.ports = itertools.count(20_000)  # nobody else takes any there

    def __enter__(self) -> OtherHost:
        if os.geteuid() != 0 or shutil.which("unshare") is None:
            raise NamespacesRefused("namespaces need root and unshare(1)")
        self._holder = subprocess.Popen(
            ["unshare", "--net", "--mount", "--pid", "--ipc", "--fork", "--kill-child", "--propagation", "private",
             sys.executable, "-c", HOLD, str(len(self._seen)), *map(str, (*self._seen, *self._hidden))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            if self._holder.stdout.readline() != "ready\n":
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
        _run(*inside, "route", "add", "default", "via", self.here)

    def __exit__(self, *_: object) -> None:
        self._holder.kill()  # its namespaces end with it, and all that runs in them
        self._holder.communicate()
        subprocess.run(["ip", "link", "del", self._link], capture_output=True, check=False)
        self._number.close()

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


THERE = ("engine", "generate", "reward")


class NamespaceLauncher(LocalLauncher):
    """Starts the processes whose names begin with one of a host's on that host, all others here."""

    def __init__(self, hosts: Mapping[OtherHost, tuple[str, ...]], rundir: RunDir, threads: int) -> None:
        super().__init__(rundir, threads)
        self.hosts, self.controller = hosts, next(iter(hosts)).here
        self._beside: dict[str, str] = {}

    async def place(self, name: str, beside: str = "", sees: SharedFiles | None = None) -> None:
        if beside:
            self._beside[name] = beside

    def host(self, name: str) -> OtherHost | None:
        name = self._beside.get(name, name)
        return next((host for host, there in self.hosts.items() if name.startswith(there)), None)

    def address(self, name: str) -> str:
        if (host := self.host(name)) is not None:
            return host.there
        return str(self.controller) if name.startswith("train-") else super().address(name)

    @contextlib.contextmanager
    def held_port(self, name: str, port: int = 0) -> Iterator[int]:
        if (host := self.host(name)) is not None:
            yield port or next(host.ports)
            return
        with super().held_port(name, port) as held:
            yield held

    async def spawn(self, spec: ProcessSpec) -> Handle:
        if (host := self.host(spec.name)) is None:
            return await super().spawn(spec)
        for path in spec.files:
            host.bring(Path(path))
        Path(f"/proc/{host.pid}/root{self.rundir.sockets}").mkdir(mode=0o700, exist_ok=True)
        handle = await super().spawn(msgspec.structs.replace(spec, argv=host.inside(spec.argv)))
        handle.__class__ = _ThereHandle
        return handle


def hidden(run_dir: Path) -> tuple[Path, ...]:
    """What a run keeps on its own machine."""
    return Path("/dev/shm"), Path(tempfile.gettempdir()), run_dir
