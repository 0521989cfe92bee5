"""`--auto-resume N`: a small parent that starts the run, and restarts it from its checkpoint when it dies.

The run is a child process, the same program as without the flag; the parent holds no model and no state of it. Engine
servers are children of the parent too, which one start of the run leaves to the next (`KeptServers`).

Invariants: only what another start can mend is restarted, within a budget; the user's signals (Ctrl-C, SIGTERM,
SIGHUP) go to the child and are no reason for another start; the child and all servers end with the parent, however
it ends; servers are not kept over two starts in a row between which nothing was saved, since they may be the cause.
Imports nothing but the standard library and modules that need no more than that.

`RestartBudget` limits restarts: of the run here, of single processes in restarts.py.

`KeptServers` starts servers for one controller after the other, reports the live servers to each new one, and ends them
with the run. The parent is their parent process as well. So the kernel ends them with it, their process ids cannot be
reused before it has waited for them, and it sees their ends whichever controller uses them. Each controller has one
end of a pair of sockets. From here go lines `[kind, name, process, text]`: `kept` (text: its note) for each server that
is there, `ready` behind the last of these, `started` or `failed` for each request, `ended` (text: exit status). From
there come requests, one line each: what to start. The controller that starts a server may end it by its process id.
A server ends when `KeptServers` is closed or this process ends, however it ends; what servers have in common (their
token, the list of their files in shared memory) lies in a directory of this process, which goes with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple

from models.errors import SlotDirectoryError
from models.weights.slot_directory import PREFIX, DirectoryLease, remove_listed
from pipeline.facts.run_log import run_log, show_line
from pipeline.hosts import die_with_parent
from pipeline.hosts.die_with_parent import die_with, kill_group

CHILD: Final = "SLUICE_AUTO_RESUMED"  # the parent's process number, then the fields of `Resumed`, as JSON
MENDABLE: Final = (1, 6, 7, 8)  # exit codes of pipeline/errors.py: of errors that are not the user's
_PASSED_ON: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


# The window that the limit refers to. A process that is lost now and then within weeks is always restarted; one that
# dies as soon as it has loaded (minutes, for a large model) ends the run.
WINDOW_S: Final = 3600.0


def backoff_s(restarts: int) -> float:
    """0.2, 0.4, 0.8 ... at most 10 seconds."""
    return float(min(0.2 * 2 ** max(restarts - 1, 0), 10.0))


class RestartBudget:
    """The losses of one process. `limit`: restarts within `WINDOW_S`."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit, self._clock = limit, clock
        self._recent: deque[float] = deque()

    def lost(self) -> int:
        """Count a loss; returns the losses within the window. More than `limit` are too many."""
        now = self._clock()
        self._recent.append(now)
        while self._recent[0] <= now - WINDOW_S:
            self._recent.popleft()
        return len(self._recent)


class Resumed(NamedTuple):
    """Facts that the parent passes to its child.

    Args:
        times: how often it started the run again before.
        connection: file number of the child's end of what keeps servers; -1: none are kept.
        directory: what those servers have in common lies there.
    """

    times: int
    connection: int
    directory: str


def facts_from_parent() -> Resumed | None:
    """In a child of such a parent, its facts; None without one. Read once, at the start: from then on the
    child ends with its parent."""
    facts = os.environ.pop(CHILD, None)  # a program that the run starts is not such a child
    if facts is None:
        return None
    parent, *rest = json.loads(facts)
    die_with(parent)
    resumed = Resumed(*rest)
    if resumed.connection >= 0:
        os.set_inheritable(resumed.connection, False)
    return resumed


READ_BYTES: Final = 1 << 16


class KeptServers:
    """The servers of one run, while it is started again and again. Used by the main thread alone."""

    def __init__(self) -> None:
        home = Path(os.environ.get("XDG_RUNTIME_DIR") or "")
        home = home if home.name and home.is_dir() else Path(tempfile.gettempdir())
        self._lease = DirectoryLease(home / f"{PREFIX}{secrets.token_hex(4)}")
        self.directory = self._lease.directory
        self._servers: dict[str, tuple[subprocess.Popen[bytes], str]] = {}  # by name, with the note of each
        self._socket: socket.socket | None = None  # to the controller
        # Any signal interrupts a wait for the controller, however short before it came.
        self._wake, write = os.pipe()
        for end in (self._wake, write):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    @contextlib.contextmanager
    def connection(self) -> Iterator[int]:
        """The end of a new controller, as a file number to be inherited; to be closed here once it is."""
        self.disconnect()
        self._collect()
        self._socket, child_end = socket.socketpair()
        self._socket.setblocking(False)
        for name, (process, note) in self._servers.items():
            self._tell("kept", name, process.pid, note)
        self._tell("ready", "", 0, "")
        with child_end:
            yield child_end.fileno()

    def disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def wait(self, controller: subprocess.Popen[bytes]) -> int:
        """Execute the controller's requests until it ends; returns its exit status."""
        received = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ)
            if self._socket is not None:
                selector.register(self._socket, selectors.EVENT_READ)
            while (code := controller.poll()) is None:
                self._collect()
                for key, _ in selector.select():
                    if key.fd == self._wake:
                        with contextlib.suppress(BlockingIOError):
                            os.read(self._wake, READ_BYTES)
                    elif self._socket is not None:
                        data = self._received()
                        if not data:  # it ends, or has closed it
                            selector.unregister(self._socket)
                        *lines, received = (received + data).split(b"\n")
                        for line in lines:
                            self._start(json.loads(line))
        return code

    def end(self) -> bool:
        """End all servers at once, with all that they started; whether there were any."""
        there = bool(self._servers)
        for process, _ in self._servers.values():
            kill_group(process.pid)
        for process, _ in self._servers.values():
            process.wait()
        self._servers.clear()
        remove_listed(self.directory)
        return there

    def close(self) -> None:
        self.disconnect()
        self.end()
        self._lease.release()

    def _received(self) -> bytes:
        assert self._socket is not None
        try:
            return self._socket.recv(READ_BYTES)
        except BlockingIOError:
            raise AssertionError("read only when there is something") from None
        except OSError:
            return b""

    def _start(self, request: dict[str, Any]) -> None:
        name = str(request["name"])
        try:
            # What it inherits is the controller's limit, not that of the shell.
            resource.setrlimit(resource.RLIMIT_NOFILE, tuple(request["files"]))
            process = _spawn(request["argv"], request["env"], request["log"])
        except (OSError, ValueError) as error:
            self._tell("failed", name, 0, str(error))
            return
        self._servers[name] = process, str(request["note"])
        self._tell("started", name, process.pid, "")

    def _collect(self) -> None:
        """Wait for servers that have ended."""
        for name, (process, _) in [*self._servers.items()]:
            if (code := process.poll()) is not None:
                kill_group(process.pid)  # its remaining children
                del self._servers[name]
                self._tell("ended", name, process.pid, str(code))

    def _tell(self, kind: str, name: str, process: int, text: str) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):  # the controller has ended
                self._socket.sendall(json.dumps([kind, name, process, text]).encode() + b"\n")


def _spawn(argv: Sequence[str], env: dict[str, str], log: str) -> subprocess.Popen[bytes]:
    with Path(log).open("ab") as file:
        return subprocess.Popen(
            [*die_with_parent.prefix(), *argv],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,  # Ctrl-C is for the controller
        )


class AutoResume:
    """One run and its starts.

    Args:
        program: launch.py.
        first: the command line with which the run begins, and its directory named in it; `again`: that with which it
            continues once the directory holds a run.
        limit: starts again, within `WINDOW_S`.
        keeps: whether a start of the run leaves its engine servers to the next one.
    """

    def __init__(
        self, program: str, first: Sequence[str], again: Sequence[str], run_dir: Path, limit: int, *, keeps: bool
    ) -> None:
        self._program, self._first, self._again, self._run_dir = program, first, again, run_dir
        self._servers: KeptServers | None = None
        with contextlib.suppress(OSError, SlotDirectoryError):  # no room for its directory: the run will say so
            self._servers = KeptServers() if keeps else None
        self._budget = RestartBudget(limit)
        self._child: subprocess.Popen[bytes] | None = None
        self._stop_signal = 0  # the newest signal by which the user wants it to end
        self._unsent: list[int] = []  # such signals that the child was not sent yet

    def _say(self, line: str) -> None:
        with run_log(self._run_dir, "auto-resume") if self._run_dir.is_dir() else contextlib.nullcontext():
            show_line(f"auto-resume: {line}")

    def run(self) -> int:
        """Wait for the end of the run; its exit code, 128 and its number for a signal."""
        for number in _PASSED_ON:
            # Under nohup the run outlives its terminal.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._pass_on)
        try:
            return self._starts()
        finally:
            if self._servers is not None:
                self._servers.close()

    def _starts(self) -> int:
        """All starts of the program; the exit code."""
        times, saved_before = 0, None
        while True:
            code = self._once(times)
            why = None if self._stop_signal else self._mendable(code)
            if why is None:
                return _shell_code(code)
            lost, limit, window = self._budget.lost(), self._budget.limit, f"{WINDOW_S / 60:g} minutes"
            if lost > limit:
                self._say(
                    f"the run ended {lost} times within {window}, last with {why}; it is not started again: continue "
                    f"with --resume {self._run_dir}, or raise --auto-resume"
                )
                return _shell_code(code)
            times += 1
            note, saved = "", self._saved()
            if self._servers is not None and saved == saved_before and self._servers.end():
                note = ", with new engines, since it has saved nothing after its last start"  # one may be why
            saved_before = saved
            doing = f"starting it again in {self._run_dir}, from its beginning, since it has no checkpoint yet"
            if saved:
                doing = f"resuming {self._run_dir} from its last checkpoint"
            number = f"(start {lost} of at most {limit} within {window})"
            self._say(f"the run ended with {why}; {doing}{note} {number}")
            time.sleep(backoff_s(lost))
            if self._stop_signal:
                return _shell_code(-self._stop_signal)

    def _once(self, times: int) -> int:
        """One start of the program, to its end."""
        begun = (self._run_dir / "config.toml").exists()
        with self._servers.connection() if self._servers is not None else contextlib.nullcontext(-1) as connection:
            directory = str(self._servers.directory) if self._servers is not None else ""
            self._child = subprocess.Popen(
                [sys.executable, self._program, *(self._again if begun else self._first)],
                env={**os.environ, CHILD: json.dumps([os.getpid(), *Resumed(times, connection, directory)])},
                process_group=0,  # the terminal's Ctrl-C comes to this process alone, which passes it on, once
                pass_fds=(connection,) if connection >= 0 else (),
            )
        self._send()
        try:
            return self._child.wait() if self._servers is None else self._servers.wait(self._child)
        finally:
            self._child = None

    def _mendable(self, code: int) -> str | None:
        """What the run ended with, in words, if another start can mend it."""
        if code < 0 and -code not in _PASSED_ON:
            return f"signal {signal.Signals(-code).name}"
        if code in MENDABLE and self._saved():  # without, it would only meet the same error on the same way
            return "an error"
        return None

    def _saved(self) -> str:
        """The newest checkpoint; empty if there is none."""
        return max((str(file) for file in self._run_dir.glob("checkpoints/step-*/manifest.json")), default="")

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._stop_signal = number
        self._unsent.append(number)
        self._send()

    def _send(self) -> None:
        """A signal that comes while the child is being started, or meanwhile, is still sent once."""
        while self._child is not None and self._unsent:
            self._child.send_signal(self._unsent.pop())


def _shell_code(code: int) -> int:
    return code if code >= 0 else 128 - code
