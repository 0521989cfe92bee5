"""Runs tests on mutants in a copy of the tree.

The `warm` process has all tests and the product imported. It forks for each mutant, and the child puts the changed code
into the functions. What runs at import needs the `cold` process, which forks before it imports the product.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import itertools
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from ctypes import CDLL
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, Final

import pytest
from hypothesis import Phase, settings

FAST: Final = "not slow and not full"
ARGUMENTS: Final = ("-q", "-p", "no:cacheprovider", "--no-header", "--hypothesis-seed=0")
THIRD_PARTY: Final = (
    "aiohttp.web", "math_verify", "msgspec", "pyarrow.parquet", "torch", "transformers", "zmq.asyncio",
)  # fmt: skip
TEST_LIMIT_S: Final = 40  # three times what the slowest test takes on a busy machine
IMPORT_LIMIT_S: Final = 200
KILLERS: Final = 3  # test functions after which `run-all` goes on to the next mutant
CPU_LIMIT_S: Final = 10  # of a mutant, for survivors take most of the time
Ask = dict[str, Any]


def swaps(old: CodeType, new: CodeType) -> list[tuple[str, int, CodeType]] | None:
    """Functions whose code differs, by name and first line; None if what runs at import differs."""

    def own(code: CodeType) -> tuple[object, ...]:
        return code.co_code, code.co_names, [repr(value) for value in code.co_consts if type(value) is not CodeType]

    function = bool(old.co_flags & inspect.CO_OPTIMIZED)
    if not function and own(old) != own(new):
        return None
    found = [(old.co_qualname, old.co_firstlineno, new)] if function and old != new else []
    inner = ([value for value in code.co_consts if isinstance(value, CodeType)] for code in (old, new))
    for before, after in zip(*inner, strict=False):
        nested = swaps(before, after)
        if nested is None:  # a class: in a function it is made again at each call
            return found or None
        found += nested
    return found


class Chosen:
    """Plugin that runs the chosen tests in their order, and notes those that fail."""

    ids: Sequence[str] = ()
    tell: Callable[[str], object] = str

    def __init__(self) -> None:
        self.failed: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        """To find the smallest example that fails would take minutes."""
        phases = [Phase.explicit, Phase.generate]
        settings.register_profile("mutants", settings.get_profile("untimed"), phases=phases, database=None)
        settings.load_profile("mutants")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        by_id = {item.nodeid: item for item in items}
        items[:] = [by_id[name] for name in self.ids or by_id if name in by_id]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self) -> bool | None:
        """What is left when the time is up does not run."""
        return True if sum(os.times()[:4]) > CPU_LIMIT_S else None

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.tell(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.nodeid not in self.failed:
            self.failed.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append("import")

    def cold(self, ask: Ask) -> None:
        files = dict.fromkeys(name.split("::")[0] for name in self.ids)
        pytest.main([*ARGUMENTS, *([] if ask["all"] else ["-x"]), *files], plugins=[self])


class Warm(Chosen):
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        functions: dict[tuple[str, str, int], list[FunctionType]] = defaultdict(list)
        for thing in gc.get_objects():
            if type(thing) is FunctionType:
                code = thing.__code__
                functions[code.co_filename, code.co_qualname, code.co_firstlineno].append(thing)
        loaded = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
        items = {item.nodeid: item for item in session.items}

        def act(ask: Ask) -> None:
            file = str(Path(ask["file"]).resolve())
            if file in loaded and ask["new"] != ask["old"]:
                changed = swaps(*(compile(ask[name], file, "exec") for name in ("old", "new"))) or ()
                targets = [(f, code) for name, line, code in changed for f in functions.get((file, name, line), ())]
                for function, code in targets:
                    function.__code__ = code
                if not targets:
                    raise LookupError("no function to change")
            chosen = [items[name] for name in self.ids if name in items]
            for item, following in itertools.zip_longest(chosen, chosen[1:]):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                killers = {name.split("[")[0] for name in self.failed}
                if len(killers) >= (KILLERS if ask["all"] else 1):
                    break

        serve(act, self)
        return True


def serve(act: Callable[[Ask], None], chosen: Chosen) -> None:
    """Answer requests, a line of JSON each, with a child for each."""
    CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: what a test leaves behind is ended here
    gc.freeze()
    parent = socket.socket(fileno=int(os.environ["MUTATION_FD"]))
    parent.sendall(b"ready\n")
    for line in parent.makefile("r"):
        home = tempfile.mkdtemp(prefix="mu", dir="/tmp")
        ours, theirs = socket.socketpair()
        if os.fork() == 0:
            os.setsid()
            os.environ["TMPDIR"] = tempfile.tempdir = home
            run_child(act, chosen, json.loads(line), theirs)
        theirs.close()
        heard, ended = listen(ours)
        ours.close()
        end_children()
        shutil.rmtree(home, ignore_errors=True)
        names, _, answer = heard.decode(errors="replace").partition("\0")
        at = {"status": "killed" if ended else "timeout", "failed": names.splitlines()[-1:]}
        parent.sendall((answer.strip("\0") or json.dumps(at)).encode() + b"\n")


def run_child(act: Callable[[Ask], None], chosen: Chosen, ask: Ask, parent: socket.socket) -> None:
    chosen.ids, chosen.tell = ask["ids"], lambda name: parent.sendall(f"{name}\n".encode())
    status = ""
    try:
        act(ask)
    except (LookupError, ValueError):  # nothing to change, or other free variables; tests do not raise up to here
        status = "cold"
    except BaseException as error:
        chosen.failed.append(repr(error)[:200])
    status = status or ("killed" if chosen.failed else "survived")
    parent.sendall(b"\0" + json.dumps({"status": status, "failed": chosen.failed}).encode() + b"\0")
    os._exit(0)


def listen(child: socket.socket) -> tuple[bytes, bool]:
    """What the child says until it ends; False if a test took too long."""
    heard = b""
    while select.select([child], [], [], TEST_LIMIT_S if heard else IMPORT_LIMIT_S)[0]:
        part = child.recv(1 << 16)
        heard += part
        if not part or part.endswith(b"\0"):
            return heard, True
    return heard, False


def end_children() -> None:
    """End the child and what it left: all are children of this process now."""
    while children := [pid for pid in os.listdir("/proc") if pid.isdigit() and parent_of(pid) == os.getpid()]:
        for pid in map(int, children):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def parent_of(pid: str) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def serve_here(kind: str) -> None:
    if kind == "warm":
        pytest.main([*ARGUMENTS, "-m", FAST, "tests"], plugins=[Warm()])
    else:
        for name in THIRD_PARTY:
            importlib.import_module(name)
        chosen = Chosen()
        serve(chosen.cold, chosen)


class Worker:
    """A copy of the tree, and the process that runs tests in it."""

    def __init__(self, root: Path) -> None:
        self.tree = Path(tempfile.mkdtemp(prefix="mutation-"))
        self.process: subprocess.Popen[bytes] | None = None
        self.kind, self.writes = "", 0
        for entry in root.iterdir():
            if entry.name.startswith(".venv") or entry.name == ".git":
                (self.tree / entry.name).symlink_to(entry)
            elif entry.is_dir() and entry.name not in ("runs", "bench_results"):
                shutil.copytree(entry, self.tree / entry.name, symlinks=True)
            elif entry.is_file():
                shutil.copy2(entry, self.tree / entry.name)

    def start(self, kind: str) -> None:
        self.stop()
        self.socket, theirs = socket.socketpair()
        environment = os.environ | {"MUTATION_FD": str(theirs.fileno()), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [sys.executable, "-m", "tests.mutation", "serve", kind]
        with (self.tree / "mutation.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=self.tree, env=environment, pass_fds=[theirs.fileno()], stdout=log, stderr=log
            )
        theirs.close()
        self.kind, self.answers = kind, self.socket.makefile("r")
        self.answers.readline()  # the product is imported as it is, before a file is changed

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.socket.close()
            self.process = None

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self.tree, ignore_errors=True)

    def write(self, file: str, source: str) -> None:
        """Give each content a time of its own, so that no bytecode of another mutant is taken for it."""
        self.writes += 1
        (self.tree / file).write_text(source)
        os.utime(self.tree / file, (self.writes, self.writes))

    def ask(self, kind: str, ask: Ask) -> Ask:
        """Run the tests `ids` on `file` with the text `new`: `status` and the tests that `failed`."""
        if self.process is None or self.kind != kind:
            self.start(kind)
        self.write(ask["file"], ask["new"])
        answer: Ask = {"status": "crashed", "failed": []}
        try:
            self.socket.sendall(json.dumps(ask).encode() + b"\n")
            answer = json.loads(self.answers.readline())
        except (OSError, ValueError):
            self.stop()
        self.write(ask["file"], ask["old"])
        return answer
