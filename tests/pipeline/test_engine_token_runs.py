"""The token of a run's servers: wanted by each of them, and seen by nobody."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT, SIMULATED, SMALL, finish, here, made_model, start, succeed_here

from models.engines.token import read_token, run_token

pytestmark = pytest.mark.slow


def status(url: str, token: str = "") -> int:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def engine(run_dir: Path) -> dict[str, Any]:
    """What the run tells of its engine, once that serves."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, KeyError):
            found: dict[str, Any] = json.loads((run_dir / "replicas" / "fleet.json").read_text())["engine-0"]
            return found
        time.sleep(0.05)
    raise AssertionError("the run has no engine")


def shown_by_processes(run_dir: Path, controller: int) -> bytes:
    """Command lines and environments of a run, as other users see the first and its own user both."""
    pids = [controller, *(int(file.read_text()) for file in (run_dir / "replicas").glob("*.pid"))]
    assert len(pids) > 4
    return b"".join(Path(f"/proc/{pid}/{what}").read_bytes() for pid in pids for what in ("cmdline", "environ"))


def test_every_request_of_a_run_brings_its_token_and_nobody_sees_it(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    flags = [*SMALL, *made_model(), *SIMULATED, "--use-tensorboard", "--num-rollout", "60"]
    process = start(run_dir, *flags)
    try:
        server = engine(run_dir)
        file = Path(server["token_file"])
        token = read_token(file).token.text
        assert file.parent.stat().st_mode & 0o777 == 0o700
        assert status(f"{server['url']}/health") == 200
        assert status(f"{server['url']}/server_info") == 401
        assert status(f"{server['url']}/server_info", "of-another-run") == 401
        assert status(f"{server['url']}/server_info", token) == 200
        shown = shown_by_processes(run_dir, process.pid)
        assert str(file).encode() in shown
        assert token.encode() not in shown
    finally:
        done = finish(process, run_dir)
    assert done.code == 0, done.err[-3000:]
    done.check_books()
    assert not file.exists()
    assert token not in done.out + done.err
    assert [path for path in run_dir.rglob("*") if path.is_file() and token.encode() in path.read_bytes()] == []


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A server that runs already: its address, and the file with its token."""
    token, ready = run_token(tmp_path / "theirs").path, tmp_path / "ready.json"
    argv = [sys.executable, "-m", "models.engines.serve", "--engine", "embedded", "--model-path", made_model()[1]]
    argv += ["--token-file", token, "--ready-file", str(ready)]
    with subprocess.Popen(argv, cwd=ROOT) as process:
        try:
            while not ready.exists():
                assert process.poll() is None
                time.sleep(0.05)
            yield json.loads(ready.read_text())["url"], Path(token)
        finally:
            process.kill()


def test_engines_that_run_already_want_their_own_token(tmp_path: Path, outside: tuple[str, Path]) -> None:
    url, file = outside
    (tmp_path / "wrong").touch(0o600)
    (tmp_path / "wrong").write_text("of-another-run")
    flags = [*SMALL, *made_model(), "--engine", "sglang", "--router", "none", "--rollout-external-engine-addrs", url]
    name = "--rollout-external-engine-token-file"
    for number, (more, words) in enumerate(
        [
            ([], "no token was sent"),
            ([name, str(tmp_path / "wrong")], "the token that was sent is not the one that it was started with"),
            ([name, str(tmp_path / "none")], "cannot be read (No such file or directory)"),
        ]
    ):
        refused = here(tmp_path / f"refused-{number}", *flags, *more)
        assert refused.code == 2, refused.err[-2000:]
        assert words in refused.err
        assert name in refused.err or number == 2
    done = succeed_here(tmp_path / "run", *flags, name, str(file))
    assert done.audit.outcomes["trained"] == 16
    token = file.read_text()
    assert [path for path in done.run_dir.rglob("*") if path.is_file() and token.encode() in path.read_bytes()] == []
