"""Servers that outlive the controller, in the hands of the parent of `--auto-resume`: it starts them for one controller
after the other, reports the live servers to each new one, and ends them with the run.

The parent is their parent process as well. So the kernel ends them with it, their process ids cannot be reused before
it has waited for them, and it sees their ends whichever controller uses them. Each controller has one
end of a pair of sockets. From here go lines `[kind, name, process, text]`: `kept` (text: its note) for each server that
is there, `ready` behind the last of these, `started` or `failed` for each request, `ended` (text: exit status). From
there come requests, one line each: what to start. The controller that starts a server may end it by its process id.

Invariants: a server ends when this object is closed or its process ends, however it ends; what servers have in common
(their token, the list of their files in shared memory) lies in a directory of this process, which goes with it.
Imports nothing but the standard library and what needs no more than that: the parent stays small.
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from models.weights.slot_directory import PREFIX, DirectoryLease, remove_listed
from pipeline.hosts import die_with_parent

READ_BYTES: Final = 1 << 16


class KeptServers:
    """The servers of one run, while it is started again and again. Used by the main thread alone."""

    def __init__(self) -> None:
        home = Path(os.environ.get("XDG_RUNTIME_DIR") or "")
        home = home if home.name and home.is_dir() else Path(tempfile.gettempdir())
        self._lease = DirectoryLease(home / f"{PREFIX}{secrets.token_hex(4)}")
        self._servers: dict[str, tuple[subprocess.Popen[bytes], str]] = {}  # by name, with the note of each
        self._socket: socket.socket | None = None  # to the controller
        # Any signal interrupts a wait for the controller, however short before it came.
        self._wake, write = os.pipe()
        for end in (self._wake, write):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    @property
    def directory(self) -> Path:
        return self._lease.directory

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
            [sys.executable, "-IS", str(die_with_parent.__file__), str(os.getpid()), *argv],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,  # Ctrl-C is for the controller
        )


def kill_group(group: int) -> None:
    """SIGKILL to all processes of the group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # no process is left; macOS raises EPERM for zombies
        os.killpg(group, signal.SIGKILL)
