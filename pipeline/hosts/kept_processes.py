"""The controller's end of what keeps servers alive from one start of a run to the next: see `kept_servers.py`.

Invariants: a server that an earlier start left is here under its name until it is taken or ended; a process that is
taken is that one and no other of its number, since the parent has not waited for it; nothing here waits for a server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import msgspec

from pipeline.hosts.kept_servers import READ_BYTES

Line = tuple[str, str, int, str]  # kind, name, number of the process, text


class KeptProcess:
    """A server that the parent of `--auto-resume` started, used as one that this process started."""

    stdin = None

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.Event()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Raises ProcessLookupError if it has ended."""
        if self.returncode is not None:
            raise ProcessLookupError(self.pid)
        os.kill(self.pid, number)

    def end(self, code: int) -> None:
        """It has ended."""
        self.returncode = code
        self._ended.set()


class KeptProcesses:
    """All of one controller.

    Args:
        connection: of the sockets' pair; what an earlier start left is read from it now.
        directory: what servers have in common lies there.
    """

    def __init__(self, connection: int, directory: str) -> None:
        self.directory = Path(directory)
        self._socket = socket.socket(fileno=connection)
        self._socket.set_inheritable(False)
        self._rest = b""
        self._left: dict[str, tuple[KeptProcess, str]] = {}  # by an earlier start: by name, with their notes
        self._running: dict[int, KeptProcess] = {}
        self._starting: dict[str, asyncio.Future[KeptProcess]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sending = asyncio.Lock()
        self._ready = False
        while not self._ready:  # it was sent before this process was started
            self._read()
        self._socket.setblocking(False)

    def note(self, name: str) -> str:
        """What an earlier start left with a server of this name; empty if there is none."""
        return self._left[name][1] if name in self._left else ""

    def take(self, name: str) -> KeptProcess:
        """The server of that name, which is the caller's from now on."""
        self._attach()
        return self._left.pop(name)[0]

    async def start(self, name: str, argv: Sequence[str], env: Mapping[str, str], log: Path, note: str) -> KeptProcess:
        """Have a server started. Waits for the parent, a moment. Raises OSError."""
        self._attach()
        started: asyncio.Future[KeptProcess] = asyncio.get_running_loop().create_future()
        self._starting[name] = started
        files = resource.getrlimit(resource.RLIMIT_NOFILE)
        asked = {"name": name, "argv": [*argv], "env": {**env}, "log": str(log), "note": note, "files": files}
        async with self._sending:
            await asyncio.get_running_loop().sock_sendall(self._socket, json.dumps(asked).encode() + b"\n")
        return await started

    async def end_others(self, names: Collection[str]) -> list[str]:
        """End the servers that an earlier start left under other names, since nobody will ask for them; those."""
        others = [name for name in self._left if name not in names]
        for name in others:
            process = self.take(name)
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        return others

    def _attach(self) -> None:
        """Hear of ends in the event loop that runs."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            loop.add_reader(self._socket.fileno(), self._read)

    def _read(self) -> None:
        try:
            data = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:  # the parent has ended, and the kernel ends this process
            self._ready = True
            if self._loop is not None:
                self._loop.remove_reader(self._socket.fileno())
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take_in(*msgspec.json.decode(line, type=Line))

    def _take_in(self, kind: str, name: str, pid: int, text: str) -> None:
        match kind:
            case "kept":
                self._running[pid] = KeptProcess(pid)
                self._left[name] = self._running[pid], text
            case "ready":
                self._ready = True
            case "started":
                self._running[pid] = KeptProcess(pid)
                if not (started := self._starting.pop(name)).cancelled():
                    started.set_result(self._running[pid])
            case "failed":
                if not (started := self._starting.pop(name)).cancelled():
                    started.set_exception(OSError(text))
            case "ended":
                self._running.pop(pid).end(int(text))
