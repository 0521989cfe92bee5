"""The token of a run's servers: wanted by each of them, and seen by nobody."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import ROOT, SIMULATED, SMALL, finish, here, made_model, start, succeed_here
from token_checks import check_token, files_with

from models.engines.token import run_token

pytestmark = pytest.mark.slow


def test_every_request_of_a_run_brings_its_token_and_nobody_sees_it(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start(run_dir, *SMALL, *made_model(), *SIMULATED, "--use-tensorboard", "--num-rollout", "60")
    try:
        file = check_token(run_dir, process.pid, engine_0="/server_info")
    finally:
        done = finish(process, run_dir).check()
    assert not Path(file.path).exists()
    assert file.token.text not in done.out + done.err
    assert files_with(run_dir, file.token.text) == []


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
    assert files_with(done.run_dir, file.read_text()) == []
