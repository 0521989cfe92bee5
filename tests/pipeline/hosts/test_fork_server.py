"""A process that was copied is as one that was started, and nothing hangs on the server that copies it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from launching import alive

from configs.load import load
from pipeline.hosts import fork_server
from pipeline.hosts.fork_server import (
    ENGINE,
    ENGINES,
    STAGE,
    STAGES,
    STARTED_BY,
    TRAINERS,
    ForkServer,
    modules_of,
    waits_for,
)
from pipeline.hosts.machine import may_fork

ROOT = Path(__file__).parents[3]

# What a process can see of how it was started. `end`: how it ends.
FACTS = """
    import atexit, gc, json, os, resource, signal, sys, threading, time

    def ends_later():
        time.sleep(0.2)
        print("the thread ends", flush=True)

    def main(argv):
        facts = {
            "argv": sys.argv, "env": dict(os.environ), "cwd": os.getcwd(), "path": sys.path,
            "leads": [os.getpid() == os.getsid(0), os.getpid() == os.getpgid(0)], "parent": os.getppid(),
            "signals": {str(n): str(signal.getsignal(n)) for n in signal.valid_signals()},
            "mask": [str(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, [])], "umask": os.umask(0o22),
            "files": resource.getrlimit(resource.RLIMIT_NOFILE), "stdin": os.readlink("/proc/self/fd/0"),
            "open": sorted(set(os.listdir("/proc/self/fd")) - {"0", "1", "2"}, key=int)[:-1],
            "threads": threading.active_count(), "gc": [gc.isenabled(), gc.get_threshold()],
        }
        print(json.dumps(facts), flush=True)
        import numpy, random
        print("drawn", random.random(), numpy.random.random(), flush=True)
        print("shown", open("/proc/self/comm").read().strip(), open("/proc/self/cmdline").read(), flush=True)
        if argv[0] == "raise":
            raise ValueError("this program is broken")
        if argv[0] == "wait":
            time.sleep(600)
        atexit.register(print, "the program ends")
        if argv[0] == "leave":
            threading.Thread(target=ends_later).start()
            sys.exit("nothing to do")
        return int(argv[0])

    if __name__ == "__main__":
        sys.exit(main(sys.argv[1:]))
"""

DRIVER = """
    import asyncio, json, os, resource, signal, sys, tempfile, time
    from pathlib import Path
    import numpy.random
    from configs.load import load
    from pipeline.facts.run_directory import RunDir
    from pipeline.hosts.fork_server import ForkServer
    from pipeline.hosts.launcher import ProcessSpec
    from pipeline.hosts.local_launcher import LocalLauncher

    def children():
        numbers = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        return [Path(f"/proc/{number}/comm").read_text().strip() for number in numbers]

    async def work(server, rundir):
        copies, starts = LocalLauncher(rundir, forks=server), LocalLauncher(rundir)
        async def ended(launcher, name, *words, env={}):
            process = await launcher.spawn(ProcessSpec(name, (sys.executable, "-P", "-m", "facts", *words), env=env))
            if words[0] == "wait":
                while "shown" not in process.log.read_text():
                    await asyncio.sleep(0.01)
                await process.kill()
            return [await process.wait(), process.pid]
        both = await asyncio.gather(*(ended(copies, f"both-{number}", "0") for number in (1, 2)))  # asked for at once
        found = {("both", ""): [code for code, _ in both]}
        for name, launcher in (("copied", copies), ("started", starts)):
            for word in ("0", "3", "raise", "wait", "leave"):
                found[name, word] = await ended(launcher, f"{name}-{word}", word, "--x", "1")
        found["env", ""] = await ended(copies, "env", "0", env={"LIBRARY_READS": "this"})
        if sys.argv[2] == "cancel":
            task = asyncio.create_task(ended(copies, "late", "wait"))
            await asyncio.sleep(0)
            task.cancel()
            found["after", ""] = await ended(copies, "after", "0")
            async with asyncio.timeout(30):
                while "late" in children():
                    await asyncio.sleep(0.01)
        else:
            os.kill(server._pid, signal.SIGKILL)
            found["after", ""] = await ended(copies, "after", "0")
        print(json.dumps({" ".join(key): value for key, value in found.items()}), os.getpid(), flush=True)

    if __name__ == "__main__":
        resource.setrlimit(resource.RLIMIT_NOFILE, (900, 1000))
        config = load(["--train-backend", "simulated", "--engine", "simulated"]).config
        left_open = os.open("/dev/null", os.O_RDONLY)
        kept = tempfile.TemporaryDirectory()
        server = ForkServer(config)
        resource.setrlimit(resource.RLIMIT_NOFILE, (1000, 1000))
        with RunDir(Path(sys.argv[1])).open(resume=False) as rundir:
            asyncio.run(work(server, rundir))
            server.close()
        assert os.path.isdir(kept.name), "copies end without taking apart what others made before them"
"""


def facts_of(log: Path) -> dict[str, Any]:
    return json.loads(next(line for line in log.read_text().splitlines() if line.startswith("{")))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["kill", "cancel"])
def test_a_copy_is_as_a_process_that_was_started(tmp_path: Path, way: str) -> None:
    for name, text in (("facts", FACTS), ("driver", DRIVER)):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(tmp_path / "driver.py"), str(tmp_path / "run"), way]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    text, _, parent = done.stdout.strip().rpartition(" ")
    found, logs = json.loads(text), tmp_path / "run" / "logs"
    for word, code in (("0", 0), ("3", 3), ("raise", 1), ("wait", -signal.SIGKILL), ("leave", 1)):
        copied, started = (facts_of(logs / f"{name}-{word}.log") for name in ("copied", "started"))
        assert copied == started
        assert copied["parent"] == int(parent)
        assert copied["files"] == [1000, 1000]
        assert found[f"copied {word}"][0] == found[f"started {word}"][0] == code
        shown = (logs / f"copied-{word}.log").read_text().partition("shown ")[2]
        assert shown.startswith(f"copied-{word} {sys.executable}\0-P\0-m\0facts\0{word}")
        assert not alive(found[f"copied {word}"][1])
    for log in (logs / f"{name}-leave.log" for name in ("copied", "started")):
        assert log.read_text().endswith("nothing to do\nthe thread ends\nthe program ends\n"), log.read_text()
    assert found["both "] == [0, 0]
    for number in (1, 2):
        assert facts_of(logs / f"both-{number}.log")["open"] == facts_of(logs / "started-0.log")["open"]
    drawn = [re.findall(r"drawn (\S+) (\S+)", (logs / f"copied-{word}.log").read_text()) for word in ("0", "3")]
    assert not {*drawn[0][0]} & {*drawn[1][0]}, "each draws numbers of its own"
    assert "ValueError: this program is broken" in (logs / "copied-raise.log").read_text()
    assert facts_of(logs / "env.log")["env"]["LIBRARY_READS"] == "this"
    assert "shown env" not in (logs / "env.log").read_text(), "another environment is read at a start"
    after = (logs / "after.log").read_text()
    assert ("shown after" in after) is (way == "cancel"), "without its server it was started"
    assert found["after "][0] == 0


async def test_what_computes_is_not_copied_where_there_is_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, simulated = load([]).config, load(["--train-backend", "simulated", "--engine", "simulated"]).config
    assert modules_of(config) == (*STAGES, *ENGINES, *TRAINERS)
    assert modules_of(simulated) == STAGES
    trainer, grader, engine = (STAGE, "run", "topic", "train-0"), (STAGE, "run", "topic", "reward-0"), (ENGINE,)
    assert [waits_for(argv, modules_of(config)) for argv in (grader, engine, trainer)] == [
        len(STAGES), len(STAGES) + len(ENGINES), len(modules_of(config))
    ]  # fmt: skip
    monkeypatch.setattr(fork_server, "DRIVERS", (str(tmp_path),))
    assert modules_of(config) == STAGES
    server = object.__new__(ForkServer)  # one that is asked for nothing
    server._pid = os.getpid()
    with (tmp_path / "log").open("wb") as log:
        for argv in (trainer, engine):
            assert await server.start("it", (*STARTED_BY, *argv), {}, log) is None
        with pytest.raises(AttributeError):
            await server.start("it", (*STARTED_BY, *grader), {}, log)


def test_a_process_is_forked_where_its_copies_can_be_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("threading.active_count", lambda: 1)
    assert may_fork()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("threading.active_count", lambda: 2)
        assert not may_fork()

    def refused(pid: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refused)
    assert not may_fork()
    monkeypatch.delattr(os, "pidfd_open")
    assert not may_fork()
