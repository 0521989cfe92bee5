"""Resuming: what is damaged is passed over aloud, what is refused changes nothing, nothing stays in shared memory."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import ROOT, SIMULATED, SMALL, alive, environment, finish, made_model, start, succeed, succeed_here
from test_kill import kill_and_await, pids, steps_done, wait_for_steps, wait_until

import launch as program
from models.checkpoint import final_path
from pipeline.record.journal import RolledBack, read_journal
from tests.models.test_checkpoint import flip


def contents(run_dir: Path) -> dict[str, bytes]:
    """All that a user would miss: not the lock, what processes say of themselves, or what is fetched again. `run.log`
    has the refusal."""
    return {
        str(p.relative_to(run_dir)): p.read_bytes()
        for p in run_dir.rglob("*")
        if p.is_file() and p.parent.name not in ("logs", "replicas", "trace") and p.name != "run.log"
    }


@pytest.mark.slow
def test_a_refused_resume_changes_nothing_and_a_damaged_checkpoint_is_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    succeed_here(run_dir, *SMALL, *made_model(), *SIMULATED, "--save-interval", "2")
    before = contents(run_dir)
    others = ["--prompt-data", "arithmetic@[0:50]"]
    for flags, words in [
        (others, "the prompts are not those"),
        (["--custom-rm-path", "no.such:part"], "no.such"),
        (["--train-backend", "torch", "--train-device", "cpu"], "holds no complete training state"),  # by the trainer
    ]:
        assert program.main(["--resume", str(run_dir), "--num-rollout", "9", *flags]) == 2
        assert words in capsys.readouterr().err
        assert contents(run_dir) == before

    weights = "hf/model.safetensors"
    flip(final_path(run_dir / "checkpoints", 4) / weights)
    assert program.main(["--resume", str(run_dir), "--num-rollout", "5"]) == 0
    assert "skipped" in capsys.readouterr().err
    assert sorted(p.name for p in (run_dir / "checkpoints").iterdir())[-1] == "step-00000005"

    for checkpoint in (run_dir / "checkpoints").iterdir():
        flip(checkpoint / weights)
    before = contents(run_dir)
    assert program.main(["--resume", str(run_dir), "--num-rollout", "9"]) == 2
    assert "can be resumed" in capsys.readouterr().err
    assert contents(run_dir) == before


@pytest.mark.full
def test_a_run_that_goes_on_again_and_again_needs_no_checkpoint_that_was_pruned(tmp_path: Path) -> None:
    """Resumed twice from one checkpoint its weights have different labels, as engines that it does not own may have
    those of the first time; and its engines start again after that checkpoint is gone."""
    run_dir = tmp_path / "run"
    flags = [*SMALL, *made_model(), *SIMULATED, "--simulated-step-s", "0.2"]
    more = ["--runner", "local", "--num-rollout", "400", "--no-preload"]  # copies show no more than there is room for
    succeed_here(run_dir, *flags, "--num-rollout", "2", "--save-interval", "2", "--keep-last-n", "1")
    process = start(None, "--resume", str(run_dir), *more, "--save-interval", "100")
    wait_for_steps(process, run_dir, 3)
    process.kill()
    process.communicate()
    process = start(None, "--resume", str(run_dir), *more, "--save-interval", "2")
    wait_until(process, lambda: final_path(run_dir / "checkpoints", 4).is_dir(), "a checkpoint of its own")
    wait_until(process, lambda: not final_path(run_dir / "checkpoints", 2).is_dir(), "the first one is pruned")
    kill_and_await(process, run_dir, "engine-0")
    read = Path(f"/proc/{pids(run_dir, 'engine-0')[0]}/cmdline").read_text()
    assert "--model-path" in read
    assert str(run_dir / "checkpoints") not in read
    wait_for_steps(process, run_dir, steps_done(run_dir) + 4)
    process.send_signal(signal.SIGINT)
    finish(process, run_dir, 60).check(130)
    resumes = [event for event in read_journal(run_dir / "ledger.jsonl") if isinstance(event, RolledBack)]
    assert [(event.step, event.run_generation) for event in resumes] == [(2, 1), (2, 2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "numbers",
    [(signal.SIGINT, signal.SIGINT), pytest.param((signal.SIGHUP,), marks=pytest.mark.full, id="closed terminal")],
)
def test_a_run_that_is_stopped_at_once_leaves_no_weights_in_shared_memory(
    tmp_path: Path, numbers: tuple[signal.Signals, ...]
) -> None:
    run_dir = tmp_path / "run"
    runtime = Path(tempfile.mkdtemp(prefix="home-"))  # a path of sockets is short
    slow = [*SIMULATED, "--simulated-step-s", "3"]  # the drain waits for the batch in training
    process = start(run_dir, *SMALL, *made_model(), *slow, XDG_RUNTIME_DIR=str(runtime))
    wait_for_steps(process, run_dir, 1)
    (sockets,) = runtime.iterdir()
    slots = [*Path("/dev/shm").glob(f"{sockets.name}-*"), *run_dir.glob(f"{sockets.name}-*")]
    assert [path.is_dir() for path in slots] == [True]
    for number in numbers:
        process.send_signal(number)
        time.sleep(0.2)  # two signals at once are one
    done = finish(process, run_dir, 60)
    assert done.code == 130, done.err[-2000:]
    assert "stopped at once" in done.err
    assert not slots[0].exists()
    assert not sockets.exists()
    runtime.rmdir()


@pytest.mark.slow
def test_too_few_open_files_are_one_sentence(tmp_path: Path) -> None:
    """Before anything is started: libzmq ends a process that has none left. One replica of each needs fewer."""
    command = ["bash", "-c", 'ulimit -n 128; exec "$@"', "bash", sys.executable, str(ROOT / "launch.py")]
    flags = ["--run-dir", str(tmp_path / "run"), *SMALL, *made_model(), *SIMULATED, "--scale", "reward=9"]
    done = subprocess.run([*command, *flags], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    messages = done.stderr.splitlines()[-1]
    assert re.fullmatch(
        r"error: the limit of open files \(128, at most 128\) is too low for this run, which needs \d+: raise "
        r"it, such as with `ulimit -n 4096`, or start fewer replicas with --scale",
        messages,
    )
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_directory_that_is_removed_is_named(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start(run_dir, *SMALL, *made_model(), *SIMULATED, "--num-rollout", "2000", "--save-interval", "1")
    wait_for_steps(process, run_dir, 1)
    run_dir.rename(tmp_path / "elsewhere")
    done = finish(process, run_dir, 120)
    assert done.code == 2, done.err[-2000:]
    assert f"the run directory {run_dir} was removed or replaced while the run used it" in done.err
    assert "Traceback" not in done.err
    assert not (run_dir / "summary.json").exists()


# `--auto-resume`: which ends of a run are followed by another start, with which command line, who ends with whom, and
# which servers one start leaves to the next.


# Each start takes the next line of `ends`, notes its arguments, makes what the line says, and ends as it says.
PROGRAM = """
import asyncio, json, os, pathlib, signal, sys, time
from pipeline.supervise.auto_resume import facts_from_parent

home = pathlib.Path(__file__).parent
told = facts_from_parent()
assert facts_from_parent() is None, "asked once: a program that the run starts is no child of the parent"
times = told.times
kept = None
CODE = "import subprocess as s; p = s.Popen(['sleep', '600']); print('there', flush=True); p.wait()"
SLEEPER = [sys.executable, "-c", CODE]


async def serve(name, log="log"):
    # A server, taken over or new, is a line of `servers`: which start, its process, its note.
    global kept
    if kept is None:
        from pipeline.hosts.local_launcher import KeptProcesses
        kept = KeptProcesses(told.connection, told.directory)
    note = kept.note(name)
    try:
        process = kept.take(name) if note else await kept.start(name, SLEEPER, os.environ, home / log, f"by {times}")
    except OSError as error:
        process, note = None, str(error)
    while process and not note and not (home / "log").read_bytes():  # it has started what it starts
        time.sleep(0.01)
    with (home / "servers").open("a") as file:
        file.write(json.dumps([times, process and process.pid, note]) + "\\n")
    return process


async def end(name):
    process = await serve(name)
    process.send_signal(signal.SIGTERM)
    (home / "ended").write_text(str(await process.wait()))


what, *rest = (home / "ends").read_text().split("\\n")
(home / "ends").write_text("\\n".join(rest))
with (home / "starts").open("a") as file:
    file.write(f"{times} {' '.join(sys.argv[1:])}\\n")
run = home / "run"
for word in what.split():
    if word == "begun":
        run.mkdir(exist_ok=True)
        (run / "config.toml").touch()
    elif word == "saved":
        (run / "checkpoints" / "step-00000001").mkdir(parents=True, exist_ok=True)
        (run / "checkpoints" / "step-00000001" / "manifest.json").touch()
    elif word == "serves":
        asyncio.run(serve("server"))
    elif word == "fails":
        asyncio.run(serve("other", "no such directory/log"))
    elif word == "ends":
        asyncio.run(end("server"))
    elif word == "waits":
        signals = []
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, _: signals.append(number))
        (home / "pid").write_text(str(os.getpid()))
        while not signals:
            time.sleep(0.01)
        time.sleep(0.3)  # for a second one that must not come
        (home / "signals").write_text(" ".join(map(str, signals)))
    elif word.startswith("-"):
        os.kill(os.getpid(), -int(word))
    else:
        sys.exit(int(word))
"""
PARENT = """
import pathlib, sys
from pipeline.supervise import auto_resume
from pipeline.supervise.auto_resume import AutoResume

auto_resume.backoff_s = lambda restarts: 0.01
home = pathlib.Path(sys.argv[1])
again = ["--resume", str(home / "run")]
sys.exit(AutoResume(str(home / "program.py"), ["--first"], again, home / "run", int(sys.argv[2]), keeps=True).run())
"""


def parent(home: Path, *ends: str, limit: int = 5) -> subprocess.Popen[str]:
    (home / "program.py").write_text(PROGRAM)
    (home / "ends").write_text("\n".join(ends))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", PARENT, str(home), str(limit)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=home,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # the tests may run under nohup
    )  # fmt: skip


def run(home: Path, *ends: str, limit: int = 5) -> tuple[int, list[str], str]:
    """Exit code, "times arguments" of each start, and what was said."""
    process = parent(home, *ends, limit=limit)
    _, messages = process.communicate(timeout=60)
    starts = (home / "starts").read_text().replace(str(home / "run"), "RUN").splitlines()
    return process.returncode, starts, messages


def servers(home: Path) -> list[tuple[int, int | None, str]]:
    """Of each start that used one: which start, the process, and what an earlier one had noted."""
    return [tuple(json.loads(line)) for line in (home / "servers").read_text().splitlines()]


def members(group: int) -> list[str]:
    """Commands of the living processes of a group."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended in between
            name, fields = (entry / "stat").read_text().rsplit(")", 1)
            if int(fields.split()[2]) == group and fields.split()[0] not in "ZX":
                found.append(name)
    return found


def until(there: Callable[[], bool]) -> None:
    wait_until(None, there, "what the test waits for", 120, 0.01)


@pytest.mark.slow
def test_a_killed_run_begins_again_until_there_is_something_to_resume(tmp_path: Path) -> None:
    """Then an error is mended by a resume, too."""
    code, starts, messages = run(tmp_path, "-9", "begun -11", "saved 1", "0")
    assert code == 0
    assert starts == ["0 --first", "1 --first", "2 --resume RUN", "3 --resume RUN"]
    lines = [line for line in messages.splitlines() if line.startswith("auto-resume: ")]
    assert len(lines) == 3, "one for each"
    assert "ended with signal SIGKILL; starting it again in" in lines[0]
    assert "from its beginning, since it has no checkpoint yet (start 1 of at most 5 within 60 minutes)" in lines[0]
    assert "signal SIGSEGV" in lines[1]
    assert "ended with an error" in lines[2]
    assert f"resuming {tmp_path / 'run'} from its last checkpoint (start 3 of at most 5" in lines[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("begun serves 1", 1),  # it would meet the same error on the same way
        ("begun saved serves 2", 2),  # the user's mistake
        pytest.param("begun saved serves 28", 28, marks=pytest.mark.full, id="a full disk"),
        pytest.param("begun saved serves 130", 130, marks=pytest.mark.full, id="stopped by the user"),
        ("begun saved serves -15", 143),
    ],
)
def test_what_another_start_cannot_mend_ends_it_and_its_servers(end: str, code: int, tmp_path: Path) -> None:
    found, starts, messages = run(tmp_path, end, "0")
    assert (found, len(starts)) == (code, 1)
    assert "auto-resume" not in messages
    [(_, server, _)] = servers(tmp_path)
    assert server is not None
    assert members(server) == []


@pytest.mark.slow
def test_the_budget_ends_it(tmp_path: Path) -> None:
    code, starts, messages = run(tmp_path, "begun saved -9", "-9", "serves -9", "0", limit=2)
    assert (code, len(starts)) == (137, 3)
    assert "ended 3 times within 60 minutes, last with signal SIGKILL; it is not started again" in messages
    assert f"--resume {tmp_path / 'run'}, or raise --auto-resume" in messages
    [(_, server, _)] = servers(tmp_path)
    assert server is not None
    assert members(server) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_what_the_user_asks_for_comes_to_the_run_once_and_is_no_reason_to_start_it_again(
    number: signal.Signals, tmp_path: Path
) -> None:
    process = parent(tmp_path, "begun saved waits -9", "0")  # it dies on its way to the end, too
    until((tmp_path / "pid").exists)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 137
    assert (tmp_path / "signals").read_text() == str(int(number))
    assert (tmp_path / "ends").read_text() == "0", "no second start"


@pytest.mark.slow
def test_a_server_goes_to_the_next_start_as_long_as_checkpoints_are_saved_and_ends_with_the_last(
    tmp_path: Path,
) -> None:
    code, _, _ = run(tmp_path, "serves -9", "begun saved serves fails -11", "serves -9", "serves 0")
    assert code == 0
    (_, first, new), (_, second, note), (_, missing, why), (times, third, same), (_, other, none) = servers(tmp_path)
    assert (new, note, same) == ("", "by 0", "by 0")
    assert first is not None
    assert first == second == third != other
    assert (times, none) == (2, ""), "nothing was saved in the start before: the server may be why it died"
    assert missing is None
    assert "No such file" in why
    assert other is not None
    until(lambda: members(first) == members(other) == [])  # with what they had started


@pytest.mark.slow
def test_a_start_ends_a_server_that_it_took_over_and_hears_how_it_ended(tmp_path: Path) -> None:
    assert run(tmp_path, "begun saved serves -9", "ends -9", "serves 0")[0] == 0
    (_, first, _), (_, taken, _), (_, third, note) = servers(tmp_path)
    assert first == taken
    assert (tmp_path / "ended").read_text() == str(-signal.SIGTERM)
    assert (note, third != first) == ("", True), "what has ended is nobody's any more"


@pytest.mark.slow
@pytest.mark.parametrize("first", ["the parent", "the run"])
def test_neither_the_run_nor_its_server_outlives_the_parent(first: str, tmp_path: Path) -> None:
    """The kernel ends the server; what this has started is left to it, as with any program that is killed."""
    process, file = parent(tmp_path, "begun saved serves waits", "waits"), tmp_path / "pid"
    until(lambda: file.exists() and file.read_text() != "")
    [(_, server, _)] = servers(tmp_path)
    assert server is not None
    child = int(file.read_text())
    if first == "the run":
        os.kill(child, signal.SIGKILL)
        until(lambda: file.read_text() not in ("", str(child)))
        assert any("python" in name for name in members(server)), "it lives between two starts"
        child = int(file.read_text())
    process.kill()
    process.communicate(timeout=60)
    until(lambda: not alive(child) and not any("python" in name for name in members(server)))
    os.killpg(server, signal.SIGKILL)


@pytest.mark.full
def test_an_error_of_the_trainer_leaves_the_engine_to_the_resumed_run(tmp_path: Path) -> None:
    """Of a real run. The seed draws one fault, in the fourth step or near it, and none of the second start."""
    run_dir = tmp_path / "run"
    done = succeed(
        run_dir, *SMALL, *made_model(), *SIMULATED, "--num-rollout", "8", "--save-interval", "1", "--seed", "170",
        "--auto-resume", "1", "--fault-inject", "train:0.03:error",
    )  # fmt: skip
    assert "auto-resume: the run ended with an error; resuming" in done.err
    assert "engine-0: taken over from the start before in" in done.out
    assert done.summary["restarts"] == {"controller": 1}
    server = int((run_dir / "replicas" / "engine-0.pid").read_text())
    assert (run_dir / "logs" / "engine-0.log").read_text().count("serving at") == 1, "one server all the time"
    assert not alive(server)
