"""Runs as a program sees them: the state of a run in whatever way it ended, its exit code, and the JSON of commands."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from launching import ROOT, SIMULATED, SMALL, environment, here, made_model

import launch
from pipeline import errors
from pipeline.control.endpoint import CONTROL_FILE, ControlAddress
from pipeline.facts.run_directory import RunDir
from pipeline.supervise.auto_resume import MENDABLE
from tests.copies import CopiedProgram
from tests.pipeline.observe.test_health import saved

Ask = Callable[..., tuple[int, Any]]
KEYS = {"run", "state", "snapshot", "exit_reason", "step", "checkpoint", "resume", "engines", "queues", "replicas",
        "changes", "advice", "waits"}  # fmt: skip


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """A command with --json: its exit code, and the one value on its standard output."""

    def asked(*argv: object) -> tuple[int, Any]:
        capsys.readouterr()
        code = launch.main([*map(str, argv), "--json"])
        return code, json.loads(capsys.readouterr().out)

    return asked


def summary(run: Path, reason: str) -> None:
    """The least that a summary has."""
    groups = {"admitted": 0, "trained": 0, "filtered": 0, "stale": 0, "failed": 0, "discarded": 0, "open": 0}
    least = {"mode": "sync", "exit_reason": reason, "steps": 3, "wall_s": 1, "groups": groups}
    (run / "summary.json").write_text(json.dumps({**least, "staleness": {}, "reward": {}}))


@pytest.fixture
def ended(tmp_path: Path) -> Path:
    """The directory of a run of three steps without a process."""
    with RunDir(tmp_path / "run").open(resume=False) as rundir:
        rundir.write_config("[run]\n")
        rundir.metrics.write_text("".join(f'{{"step": {step}, "wall_s": 1.0}}\n' for step in (1, 2, 3)))
    return rundir.path


@pytest.mark.parametrize(
    ("reason", "state", "goes_on"),
    [
        ("completed", "completed", False),
        ("interrupted", "drained", True),
        ("--deadline-s 5 passed", "drained", True),
        ("failed: engine-0 ended", "failed", True),
    ],
)
def test_a_run_that_has_ended_says_how_in_json_and_in_words(
    reason: str, state: str, goes_on: bool, ended: Path, ask: Ask, capsys: pytest.CaptureFixture[str]
) -> None:
    summary(ended, reason)
    reason = reason.removeprefix("failed: ")
    saved(ended / "checkpoints", 2)
    code, found = ask("status", ended)
    assert (code, found.keys()) == (3, KEYS)
    assert (found["state"], found["exit_reason"], found["step"]) == (state, reason, 3)
    assert found["checkpoint"] == str(ended / "checkpoints" / "step-00000002")
    assert found["resume"] == (f"python launch.py --resume {ended}" if goes_on else None)
    assert launch.main(["status", str(ended)]) == 3
    text = capsys.readouterr().out
    assert f"state      {state}" + (f" ({reason})" if reason != state else "") + "\n" in text
    assert ("--resume" in text) == goes_on
    code, found = ask("drain", ended)
    [fault] = found["error"]["faults"]
    assert (code, found["error"]["exit_code"]) == (3, 3)
    assert fault["message"].startswith(f"{ended} is not running: {state}")
    assert ("--resume" in fault["message"]) == goes_on


def test_a_killed_run_leaves_its_seal_and_a_live_one_holds_its_lock(ended: Path, ask: Ask) -> None:
    summary(ended, "completed")  # of an earlier start
    (ended / ".seal-0123").touch()
    # A file that names a socket where nobody listens is left as well.
    with tempfile.TemporaryDirectory(prefix="sluice-") as place, socket.socket(socket.AF_UNIX) as bound:
        bound.bind(f"{place}/ask.sock")
        (ended / CONTROL_FILE).write_bytes(msgspec.json.encode(ControlAddress(f"{place}/ask.sock", "token")))
        code, found = ask("status", ended)
    assert (code, found["state"], found["resume"]) == (3, "killed", f"python launch.py --resume {ended}")
    assert "kill -9" in found["exit_reason"]
    os.utime(ended / "metrics.jsonl", (1, 1))
    with RunDir(ended).open(resume=True):
        assert not (ended / ".seal-0123").exists()
        code, found = ask("status", ended)
        assert (code, found["state"], found["exit_reason"], found["resume"]) == (0, "starting", None, None)
        (ended / "metrics.jsonl").touch()
        os.utime(ended / "metrics.jsonl", (time.time() + 9, time.time() + 9))
        assert ask("status", ended)[1]["state"] == "stopping"
    assert ask("status", ended)[1]["state"] == "completed"


def test_a_status_does_not_keep_a_run_from_its_directory(ended: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look holds the lock for a moment, in which a start waits."""
    import fcntl

    with (ended / ".lock").open() as look:
        fcntl.flock(look, fcntl.LOCK_SH)
        monkeypatch.setattr("time.sleep", lambda _: fcntl.flock(look, fcntl.LOCK_UN))
        with RunDir(ended).open(resume=True):
            pass


def test_what_is_no_run_is_said_and_so_is_a_run_that_never_began(tmp_path: Path, ask: Ask) -> None:
    code, found = ask("status", tmp_path / "nowhere")
    assert (code, found["state"], found["resume"], found["step"]) == (3, "no run", None, 0)
    assert "nowhere is no directory; give the run directory" in found["exit_reason"]
    assert "holds no run" in ask("status", tmp_path)[1]["exit_reason"]
    code, found = ask("scale", tmp_path / "nowhere", "reward=2")
    assert (code, "no directory" in found["error"]["faults"][0]["message"]) == (3, True)
    refused = here(tmp_path / "run", *SMALL, "--rm-type", "mathh")
    assert refused.code == 2
    code, found = ask("status", tmp_path / "run")
    assert (code, found["state"], found["resume"]) == (3, "failed", None), "there is no configuration to go on with"
    assert "rm_type 'mathh' is no grader" in found["exit_reason"]


# ------------------------------------------------------------------ exit codes

# As docs/errors.md has them.
CODES = {
    "RunError": 1, "ReplicaFailed": 1, "UsageError": 2, "NotHere": 2, "Refused": 2, "NotRunning": 3,
    "CommandRefused": 4, "NothingTrained": 5, "TrainerDied": 6, "Stalled": 7, "DrainTimeout": 8, "Interrupted": 130,
}  # fmt: skip


def test_one_code_for_each_kind_of_end() -> None:
    kinds = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}
    assert {n: k.exit_code for n, k in kinds.items() if issubclass(k, errors.RunError)} == CODES
    page = (ROOT / "docs" / "errors.md").read_text().split("## Exit codes")[1].split("##")[0]
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)} == {0, *CODES.values()}
    assert set(MENDABLE) == {errors.RunError.exit_code, 6, 7, 8}, "what is not for the user to mend"


def test_a_run_that_trains_nothing_has_a_code_of_its_own(tmp_path: Path, ask: Ask) -> None:
    """All rewards are equal, so that the filter leaves no group."""
    (tmp_path / "flat.py").write_text("def flat(response, label, metadata):\n    return 0.0\n")
    flags = ["--custom-rm-path", "flat:flat", "--rm-type", "auto", "--dynamic-sampling-filter", "nonzero_std"]
    flags += ["--max-filter-rounds", "2"]
    done = here(tmp_path / "run", *SMALL, *made_model(), *SIMULATED, *flags, cwd=tmp_path)
    assert done.code == 5, done.err
    assert "groups in a row were not trained" in done.err
    place = tmp_path / "run"
    assert f"the run is in {place}; continue it with python launch.py --resume {place}\n" in done.err
    _, found = ask("status", tmp_path / "run")
    assert (found["state"], found["step"]) == ("failed", 0)
    assert "groups in a row were not trained" in found["exit_reason"]


# ------------------------------------------------------------------ a client that knows the JSON alone


class Client:
    """Starts `launch.py` and reads JSON."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = str(run_dir)

    def ask(self, *argv: str) -> tuple[int, Any]:
        with CopiedProgram([*argv, "--json"], cwd=ROOT, env=environment()) as process:
            out, err = process.communicate(timeout=120)
        assert not set("\r\x1b") & set(out + err)
        return process.returncode, json.loads(out)

    def until(self, *states: str, step: int = 0, limit_s: float = 120) -> Any:
        """By what the command prints in this process: each look of a process of its own takes a second of a core."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            with contextlib.redirect_stdout(io.StringIO()) as out:
                launch.main(["status", self.run_dir, "--json"])
            found = json.loads(out.getvalue())
            assert found.keys() == KEYS
            if found["state"] in states and found["step"] >= step:
                return found
            time.sleep(0.4)
        raise AssertionError(f"no {states} within {limit_s:g} s: {found}")

    @contextlib.contextmanager
    def run(self, *flags: str) -> Iterator[subprocess.Popen[str]]:
        process = CopiedProgram(flags, cwd=ROOT, env=environment())
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.slow
def test_a_scripted_client_starts_watches_changes_drains_and_reads_the_end(tmp_path: Path) -> None:
    client = Client(tmp_path / "run")
    flags = [*SMALL, *made_model(), *SIMULATED, "--num-rollout", "100000", "--save-interval", "5"]
    flags += ["--simulated-step-s", "0.2"]  # leaves the processor to the client
    flags += ["--run-dir", client.run_dir]
    code, found = client.ask("status", client.run_dir)
    assert (code, found["state"]) == (3, "no run")
    code, found = client.ask(*flags, "--dry-run")
    assert (code, found["left_out"], found["plan"]["stages"][0]["name"]) == (0, [], "prompts")
    assert found["plan"]["config"]["run"]["run_dir"] == client.run_dir
    with client.run(*flags) as process:
        assert client.until("starting", "running")["resume"] is None
        assert Path(client.until("running", step=6)["checkpoint"]).name.startswith("step-0000")
        assert client.ask(*flags, "--dry-run")[0] == 2, "the directory is taken"
        code, found = client.ask("scale", client.run_dir, "reward=2")
        assert (code, found) == (0, {"lines": ["reward: 1 -> 2"]})
        code, found = client.ask("scale", client.run_dir, "train=2")
        assert (code, found["error"]["exit_code"]) == (4, 4)
        assert "train" in found["error"]["faults"][0]["message"]
        code, found = client.ask("kill", client.run_dir, "reward-0")
        assert (code, "reward-0 is not killed" in found["error"]["faults"][0]["message"]) == (4, True)
        assert client.ask("set", client.run_dir, "lr=0")[0] == 0
        code, found = client.ask("status", client.run_dir)
        assert (code, found["state"], found["replicas"]["reward"]) == (0, "running", 2)
        assert client.ask("drain", client.run_dir)[0] == 0
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert not set("\r\x1b") & set(out + err), "colours and carriage returns are for terminals"
    end = client.until("drained")
    assert (end["exit_reason"], end["step"] >= 6) == ("interrupted", True)
    _, found = client.ask("samples", client.run_dir, "-n", "2")
    assert [len(found["samples"]), found["unreadable"]] == [2, 0]
    assert found["samples"][0].keys() >= {"group", "step", "reward", "prompt", "turns"}
    assert end["resume"].startswith("python launch.py --resume ")
    with client.run(*end["resume"].split()[2:]) as process:
        client.until("running", step=end["step"] + 1)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
    killed = client.until("killed")
    assert killed["resume"] == end["resume"]
    assert killed["step"] > end["step"]
    steps = str(killed["step"] + 3)
    with client.run(*killed["resume"].split()[2:], "--num-rollout", steps) as process:
        process.communicate(timeout=120)
    assert process.returncode == 0
    done = client.until("completed")
    assert (done["step"], done["resume"]) == (int(steps), None)


@pytest.mark.full
def test_a_trainer_that_is_given_up_and_a_run_that_is_stopped_at_once_have_codes_of_their_own(tmp_path: Path) -> None:
    client = Client(tmp_path / "run")
    flags = [*SMALL, *made_model(), *SIMULATED, "--num-rollout", "100000", "--max-restarts", "0"]
    with client.run(*flags, "--run-dir", client.run_dir) as process:
        client.until("running", step=2)
        os.kill(int((tmp_path / "run" / "replicas" / "train-0.pid").read_text()), signal.SIGKILL)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 6, err
    found = client.until("failed")
    assert "train-0 ended" in found["exit_reason"]
    client = Client(tmp_path / "other")
    with client.run(*flags, "--run-dir", client.run_dir, "--simulated-step-s", "3") as process:
        client.until("running", step=1)
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            time.sleep(0.2)
        process.communicate(timeout=60)
    assert process.returncode == 130
    assert client.until("drained")["exit_reason"] == "stopped at once"


# ------------------------------------------------------------------ JSON of the other commands


def test_errors_name_the_setting_in_json(ask: Ask, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    code, found = ask("--config", "quickstart", "--lr", "fast", "train.lrr=1")
    assert (code, found["error"]["exit_code"]) == (2, 2)
    assert [fault["key"] for fault in found["error"]["faults"]] == ["--lr", "train.lrr"]
    assert found["error"]["faults"][0]["message"].startswith("--lr is 'fast', but must be")
    code, found = ask("samples", "nowhere")
    assert (code, found["error"]["faults"][0]["key"]) == (2, None)


def test_export_and_convert_as_json(ask: Ask, ended: Path, tmp_path: Path) -> None:
    saved(ended / "checkpoints", 2)
    code, found = ask("export", ended, "--to", tmp_path / "copy")
    assert (code, found) == (0, {"step": 2, "path": str(tmp_path / "copy"), "best": ""})
    script = tmp_path / "run.sh"
    script.write_text("python3 train.py --hf-checkpoint /m/Qwen3-4B --prompt-data d.jsonl --num-rollout 7\n")
    code, found = ask("convert", script)
    assert (code, found.keys()) == (0, {"flags", "text", "notes"})
    assert found["flags"][found["flags"].index("--num-rollout") + 1] == "7"
    assert found["text"].startswith("python launch.py")
    assert "--json" not in found["flags"]
    assert found["notes"][0].endswith("train.py with 3 options")
    assert "[rollout]" in ask("convert", script, "--toml")[1]["text"]
