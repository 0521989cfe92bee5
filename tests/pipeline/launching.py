"""Start Sluice as its user does, and read what it leaves behind."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import launch as program
from models.engines.access_token import TokenFile, read_token
from pipeline.record.journal import Audit, Stepped, audit, read_journal
from tests.copies import CopiedProgram

ROOT = Path(__file__).parent.parent.parent

# A run of seconds: a random tiny model, coin-flip rewards (so that every group has a signal), no warm start.
NO_DATA = [
    "--hf-checkpoint", "tiny-arithmetic", "--label-key", "label", "--lr", "1e-4",
    "--rm-type", "random:0.5", "--num-rollout", "4", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4",
    "--rollout-max-response-len", "6", "--no-live", "--log-interval", "1", "--no-use-tensorboard",
    "--no-use-plot",
]  # fmt: skip


SMALL = [*NO_DATA, "--prompt-data", "arithmetic@[0:400]"]

# Trainer and engines that take time instead of computing: for what is about processes and books, not about models.
# Their processes load no torch, so that a run starts in a fraction of the time.
SIMULATED_TRAINER = ["--train-backend", "simulated", "--simulated-step-s", "0.05"]
SIMULATED_ENGINE = [
    "--engine", "simulated", "engine.simulated.vocab_size=32", "engine.simulated.length_mean=6",
    "engine.simulated.update_s=0.01",
]  # fmt: skip
SIMULATED = [*SIMULATED_ENGINE, *SIMULATED_TRAINER]


@functools.cache
def _made() -> tuple[tempfile.TemporaryDirectory[str], Path]:
    from models.tiny import TinyRecipe, make_tiny_checkpoint

    place = tempfile.TemporaryDirectory(prefix="sluice-tiny-")
    return place, make_tiny_checkpoint(Path(place.name) / "tiny", TinyRecipe(tokenizer="arithmetic", seed=42))


def made_model() -> list[str]:
    """Flags with the built-in model as a directory: to make it costs a run's controller more than a run of seconds."""
    return ["--hf-checkpoint", str(_made()[1])]


SEVENS = '''
def sevens(response, label, metadata):
    """The share of sevens: dense, and learned within 40 batches by a random model."""
    return response.count("7") / max(len(response), 1)
'''


def sevens(directory: Path) -> list[str]:
    """Flags of a run that a random model visibly learns in, started in this directory."""
    (directory / "sevens.py").write_text(SEVENS)
    return [
        "--custom-rm-path", "sevens:sevens", "--rm-type", "auto", "--num-rollout", "40", "--rollout-batch-size", "8",
        "--n-samples-per-prompt", "8", "--rollout-max-response-len", "8", "--lr", "1e-3", "--log-interval", "10",
    ]  # fmt: skip


@dataclass(frozen=True)
class Finished:
    """A run that ended."""

    code: int
    out: str
    err: str
    run_dir: Path

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "summary.json").read_text())

    @property
    def audit(self) -> Audit:
        return audit(self.run_dir / "ledger.jsonl")

    def check(self, code: int = 0) -> Finished:
        """It has ended with this exit code, with balanced books."""
        logs = logs_of(self.run_dir)
        assert self.code == code, f"exit code {self.code}\n{self.out[-2000:]}\n{self.err[-3000:]}\n{logs}"
        self.check_books()
        return self

    def check_books(self) -> None:
        """Journal and summary agree, everything is settled, nothing was trained twice or too old."""
        books, groups = self.audit, self.summary["groups"]
        assert books.open == 0 == groups["open"], (books, groups)
        assert books.admitted == groups["admitted"]
        assert groups["admitted"] == sum(v for k, v in groups.items() if k != "admitted")
        assert books.twice == ()
        for outcome, n in books.outcomes.items():
            assert groups[outcome] == n, (outcome, books.outcomes, groups)
        assert self.summary["staleness"]["max"] <= self.summary["staleness"]["bound"]
        changes = [c["value"].split() for c in self.summary["changes"] if c["what"].endswith("max_staleness")]
        if not changes:
            assert books.staleness_max <= self.summary["staleness"]["bound"]
        else:  # the books are those of all starts, in which the bound was not the same: each step is held to its own
            self.check_changed_bound([(int(step), int(bound)) for bound, _, _, step, *_ in changes])

    def check_changed_bound(self, changes: list[tuple[int, int]]) -> None:
        """`changes`: (first step, bound), in their order."""
        widest = max(self.summary["staleness"]["bound"], *(bound for _, bound in changes))
        for event in read_journal(self.run_dir / "ledger.jsonl"):
            if isinstance(event, Stepped):
                in_force = [bound for first, bound in changes if first <= event.step]
                assert event.oldest <= (in_force[-1] if in_force else widest), event


def logs_of(run_dir: Path) -> str:
    return "\n".join(f"--- {p.name}\n{p.read_text()[-1500:]}" for p in sorted(run_dir.glob("logs/*.log")))


def environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **extra}


def start(run_dir: Path | None, *flags: str, cwd: Path = ROOT, **env: str) -> subprocess.Popen[str]:
    where = [] if run_dir is None else ["--run-dir", str(run_dir)]
    if "PYTHONPATH" not in env:
        return CopiedProgram([*where, *flags], cwd=cwd, env=environment(**env))
    command, pipe = [sys.executable, str(ROOT / "launch.py"), *where, *flags], subprocess.PIPE
    return subprocess.Popen(command, cwd=cwd, stdout=pipe, stderr=pipe, text=True, env=environment(**env))


@contextlib.contextmanager
def running(run_dir: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """A run that goes on; killed, should a block of its test fail."""
    process = start(run_dir, *flags)
    try:
        yield process
    except BaseException:
        process.kill()
        raise


def finish(process: subprocess.Popen[str], run_dir: Path, timeout_s: float = 240) -> Finished:
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        messages = f"{out[-3000:]}\n{err[-3000:]}\n{logs_of(run_dir)}"
        raise AssertionError(f"the run did not end within {timeout_s} s\n{messages}") from None
    return Finished(process.returncode, untimed(out), err, run_dir)


def untimed(out: str) -> str:
    """What the terminal showed, without the time of day in front of its lines."""
    return re.sub(r"^\d\d:\d\d:\d\d ", "", out, flags=re.MULTILINE)


def launch(run_dir: Path, *flags: str, cwd: Path = ROOT, timeout_s: float = 240, **env: str) -> Finished:
    """Run to the end."""
    return finish(start(run_dir, *flags, cwd=cwd, **env), run_dir, timeout_s)


def succeed(run_dir: Path, *flags: str, cwd: Path = ROOT, **env: str) -> Finished:
    """Run to the end; it must succeed with balanced books."""
    return launch(run_dir, *flags, cwd=cwd, **env).check()


def here(run_dir: Path, *flags: str, cwd: Path = ROOT) -> Finished:
    """Run to the end inside this process: no process is started and nothing is imported again."""
    out, err = io.StringIO(), io.StringIO()
    command = ["--run-dir", str(run_dir), *flags, "--runner", "inprocess"]
    with contextlib.chdir(cwd), importable(cwd), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = program.main(command)
    return Finished(code, untimed(out.getvalue()), err.getvalue(), run_dir)


@contextlib.contextmanager
def importable(directory: Path) -> Iterator[None]:
    """Modules of a directory, forgotten afterwards: the next test has others of the same names.

    Those of this repository stay, and with them `.venv`: a second copy of zmq would not know the errors of the first.
    """
    if directory == ROOT:
        yield
        return
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(directory)])  # last, as in a run
        importlib.invalidate_caches()
        yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(f"{directory}{os.sep}"):
            del sys.modules[name]


def succeed_here(run_dir: Path, *flags: str, cwd: Path = ROOT) -> Finished:
    """Run to the end inside this process; it must succeed with balanced books."""
    return here(run_dir, *flags, cwd=cwd).check()


def alive(pid: int) -> bool:
    """Whether a process runs, and has not only been left to be waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except OSError:
        return False


# Whether the servers of a run want its token, and whether anybody sees it.


def status(url: str, token: str = "") -> int:
    """What a GET is answered."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def server_of(run_dir: Path, name: str, controller: int, timeout_s: float = 300) -> dict[str, Any]:
    """What a run tells of one of its servers, once that serves."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and alive(controller):
        with contextlib.suppress(OSError, KeyError):
            found: dict[str, Any] = json.loads((run_dir / "replicas" / "fleet.json").read_text())[name]
            return found
        time.sleep(0.05)
    raise AssertionError(f"the run has no {name}")


def check_token(run_dir: Path, controller: int, **routes: str) -> TokenFile:
    """Of a run that goes on: its token, which each server (`engine_0="/a/route"`) wants and no process shows."""
    found = {name.replace("_", "-"): route for name, route in routes.items()}
    servers = {name: server_of(run_dir, name, controller) for name in found}
    file = read_token(Path(next(server["token_file"] for server in servers.values() if server["token_file"])))
    assert Path(file.path).parent.stat().st_mode & 0o777 == 0o700
    for name, server in servers.items():
        url = server["url"] + found[name]
        assert (status(url), status(url, "of-another-run"), status(url, file.token.text)) == (401, 401, 200), name
        assert status(f"{server['url']}/health") == 200
    pids = [controller, *(int(path.read_text()) for path in (run_dir / "replicas").glob("*.pid"))]
    assert len(pids) > 4
    shown = b"".join(Path(f"/proc/{pid}/{what}").read_bytes() for pid in pids for what in ("cmdline", "environ"))
    assert file.path.encode() in shown
    assert file.token.text.encode() not in shown
    return file


def files_with(run_dir: Path, token: str) -> list[Path]:
    """Files of a run that have the token in them."""
    return [path for path in run_dir.rglob("*") if path.is_file() and token.encode() in path.read_bytes()]
