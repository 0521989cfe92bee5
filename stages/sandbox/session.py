"""Warm interpreters: a process that has imported common packages forks a session on request.

    python -P -s -S -c "...; from stages.sandbox.session import main; main(CONTROL_FD)"

The first line on the control socket is a `Setup`; each descriptor that comes in after it is the socket of one session.
A session is two forks: a keeper, which this module's `_keep` is, and a program below it that is locked down
(`start_confined`). A line to the keeper is `{"code", "seconds"}`; a line back is a `Ran`. Variables live as long as the
program: after a kill, the next code starts a new program.

Invariants: neither this process nor a keeper runs any of the code; a keeper trusts nothing from its program but one
byte, which means that the code has ended; the program is stopped between two pieces of code; it dies with its keeper,
which ends when its socket closes or this process ends.
"""

from __future__ import annotations

import ast
import fcntl
import importlib
import json
import linecache
import os
import random
import select
import shutil
import signal
import socket
import sys
import tempfile
import traceback
import types
from contextlib import suppress
from functools import partial
from typing import Any, Final, NoReturn, TypedDict

from stages.sandbox.lockdown import FILE_BYTES, LOOK_S, Deadline, exceeds, hide, is_full, start_confined, text_stream
from stages.workers.guard import die_with

_OUTPUT_BYTES: Final = 256 << 10  # of one piece of code, beginning and end; the rest is counted
ENDED: Final = b"\n"
FAILED: Final = b"!"
_FRAMES = 6  # of a traceback: the outermost
_HANGUP: Final = select.POLLHUP | select.POLLRDHUP | select.POLLERR


class Setup(TypedDict):
    """What all sessions of one process have in common."""

    directory: str  # each session makes its directory below this one
    imports: list[str]
    paths: list[str]  # where they are found, and what programs may read besides the standard library
    memory_bytes: int
    cpu_s: int  # of processor time, of one program in all


class Ran(TypedDict):
    """How a piece of code went.

    `how`: ok, failed (it raised), exit (its process ended), killed (more threads or files than it may have, or a
    signal), timeout, output (too much of it), isolation (nothing was run, for the reason in `output`). Only ok and
    failed keep its variables. `output`: the first and the last of the bytes printed.
    """

    how: str
    output: str


def main(control_fd: int) -> None:
    """Serve until the control socket closes."""
    hide()
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as first_to_go:
        first_to_go.write("1000")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers are reaped by the kernel
    control = socket.socket(fileno=control_fd)
    setup: Setup = json.loads(control.makefile("rb", buffering=0).readline())
    sys.path += setup["paths"]
    for name in setup["imports"]:
        importlib.import_module(name)
    me = os.getpid()
    control.sendall(b"ready\n")
    while True:
        # Waits for the next session; ended by the other end of the socket.
        data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            os._exit(0)
        for descriptor in descriptors:
            if os.fork() == 0:
                control.close()
                _keep(me, socket.socket(fileno=descriptor), setup)
            os.close(descriptor)


def _keep(parent: int, link: socket.socket, setup: Setup) -> NoReturn:
    """Serve one session."""
    code = 1
    try:
        die_with(parent)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        directory = tempfile.mkdtemp(dir=setup["directory"])
        program = _Program(directory, setup)
        try:
            with link.makefile("rb") as lines:
                for line in lines:
                    link.sendall(json.dumps(program.run(json.loads(line), link)).encode() + b"\n")
        finally:
            program.end()
            shutil.rmtree(directory, ignore_errors=True)
        code = 0
    except ConnectionError:  # the session's owner is gone
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


class _Program:
    """The process that runs the code of a session, and its successor after a kill."""

    def __init__(self, directory: str, setup: Setup) -> None:
        self._directory, self._setup = directory, setup
        self._pid = 0
        self._source, self._output = os.memfd_create("source"), os.memfd_create("output")
        fcntl.fcntl(self._output, fcntl.F_SETFL, os.O_APPEND)  # it is emptied between two pieces of code
        self._channel = -1

    def run(self, order: dict[str, Any], link: socket.socket) -> Ran:
        """Waits for the end of a piece of code; unblocked by the end, any limit, and a hang-up."""
        if not self._pid:
            refusal = self._start()
            if refusal:
                return Ran(how="isolation", output=refusal)
        source = str(order["code"]).encode("utf-8", "replace")
        if len(source) > FILE_BYTES:
            return Ran(how="failed", output=f"the code is longer than {FILE_BYTES} bytes")
        os.ftruncate(self._source, 0)
        os.pwrite(self._source, source, 0)
        os.ftruncate(self._output, 0)
        with suppress(OSError):  # bytes that the program wrote between two pieces of code
            while os.read(self._channel, 4096):
                pass
        how = self._wait(float(order["seconds"]), link)
        size = os.fstat(self._output).st_size
        if how in ("ok", "failed"):  # it may have been too quick to be looked at
            how = "output" if size >= FILE_BYTES else "killed" if is_full(self._directory) else how
        if how in ("ok", "failed"):
            os.kill(self._pid, signal.SIGSTOP)  # a thread that it left behind would run on
        else:
            self.end()
        return Ran(how=how, output=self._printed(size))

    def _start(self) -> str:
        keeper_end, program_end = socket.socketpair()
        os.ftruncate(self._output, 0)
        with program_end, open(os.devnull, "rb") as nothing:
            files = (nothing.fileno(), self._output, self._output, program_end.fileno(), self._source)
            run, setup = partial(interpret, 3, 4), self._setup
            limits = setup["cpu_s"], setup["memory_bytes"]
            self._pid, refusal = start_confined(run, self._directory, files, *limits, setup["paths"])
        self._channel = keeper_end.detach()
        os.set_blocking(self._channel, False)
        if refusal:
            self.end()
        return refusal

    def _wait(self, seconds: float, link: socket.socket) -> str:
        deadline = Deadline(seconds)
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        poll.register(link, _HANGUP)
        os.kill(self._pid, signal.SIGCONT)
        try:
            os.write(self._channel, b"\n")
        except OSError:
            return self._ending()
        while True:
            left_s = deadline.left_s()
            events = dict(poll.poll(max(1.0, 1000 * min(left_s, LOOK_S))))
            if link.fileno() in events:
                self.end()
                raise ConnectionError("the other end is gone")
            if events:
                with suppress(OSError):
                    end_byte = os.read(self._channel, 1)
                    if end_byte:
                        return "failed" if end_byte == FAILED else "ok"
                return self._ending()
            if left_s <= 0:
                return "timeout"
            if exceeds(self._pid, self._directory):
                return "killed"

    def _ending(self) -> str:
        """How the process ended; one that only closed its descriptor is killed for it."""
        with suppress(OSError):
            os.kill(self._pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        self._pid = 0
        return "timeout" if status == -signal.SIGXCPU else "exit" if status >= 0 else "killed"

    def end(self) -> None:
        """Kill it, whatever it does, and begin with an empty directory next time."""
        if self._pid:
            with suppress(OSError):
                os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._pid = 0
        if self._channel >= 0:
            os.close(self._channel)
            self._channel = -1
        with suppress(OSError):  # the folder itself stays, for it may be the program's by now
            for entry in list(os.scandir(self._directory)):
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry, ignore_errors=True)
                else:
                    os.unlink(entry)

    def _printed(self, size: int) -> str:
        most = _OUTPUT_BYTES
        text = os.pread(self._output, most, 0)
        if size > most:
            text = text[: most // 2] + b"\n...\n" + os.pread(self._output, most // 2, size - most // 2)
        return text.decode("utf-8", "replace")


def interpret(channel: int, source: int) -> NoReturn:
    """A byte in, on `channel`, and the code stands in the file `source`; a byte back when it has ended."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module  # where dataclasses look for it
    sys.stdin = text_stream(0, "r")
    random.seed(0)  # an episode that is lost takes its turns again, and must meet the same answers
    number = 0
    while os.read(channel, 1):
        number += 1
        code = os.pread(source, os.fstat(source).st_size, 0).decode("utf-8", "replace")
        sys.stdout = sys.stderr = text_stream(1, "w")
        ended = _run(code, f"<call {number}>", module.__dict__)
        try:
            sys.stdout.flush()
        except (OSError, ValueError):
            ended = FAILED  # too much output, or it closed its own
        os.write(channel, ended)
    os._exit(0)


def _run(code: str, name: str, scope: dict[str, Any]) -> bytes:
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    try:
        tree = ast.parse(code, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec", dont_inherit=True), scope)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval", dont_inherit=True), scope)
            if value is not None:
                print(repr(value))  # noqa: T201 - for the model
    except SystemExit:
        return ENDED
    except BaseException as error:  # every exception is the code's own, and the next piece still runs
        with suppress(BaseException):  # raised if the exception cannot be printed, or there is no room left
            inner = error.__traceback__.tb_next if error.__traceback__ is not None else None  # not this file's frame
            sys.stdout.write("".join(traceback.format_exception(type(error), error, inner, _FRAMES, chain=False)))
        return FAILED
    return ENDED
