"""Real SGLang servers for tests: three kinds, each started at most once per test session.

- `exact`: no overlap scheduling (version boundaries are exact), streams of what is new, every 8 tokens;
- `overlap`: SGLang's defaults, overlap scheduling and cumulative streams;
- `bfloat16`: as `exact`, with weights and activations of 16 bits.

The interpreter is the environment variable SLUICE_SGLANG_PYTHON, else `.venv-sglang/bin/python` of the project; without
either, the tests that need a server are skipped. A start takes 40 s, so servers that the collected tests need are
started together at the first use. Tests that leave a server paused, busy or with other weights harm only themselves:
`fresh` puts it right before each.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import pytest

from models.engines.client import EngineClient
from models.engines.launch.environment import SHIMS
from models.engines.protocol import EXPECTED_SGLANG
from tests.other_programs import free_port

Kind = Literal["exact", "overlap", "bfloat16"]
# The tests that share these servers run on one worker of pytest-xdist, so that they are started once.
ON_SGLANG: Final = [pytest.mark.slow, pytest.mark.xdist_group("sglang")]
FIXTURES: Final[dict[str, Kind]] = {"sglang": "exact", "sglang_overlap": "overlap"}
ROOT: Final = Path(__file__).resolve().parent.parent
CONTEXT: Final = 1024  # tokens
READY_S: Final = 300.0
_PR_SET_PDEATHSIG: Final = 1
_EXACT: Final = ("--disable-overlap-schedule", "--incremental-streaming-output", "--stream-interval", "8")
_OF_KIND: Final[dict[Kind, tuple[str, ...]]] = {
    "exact": ("--dtype", "float32", *_EXACT),
    "overlap": ("--dtype", "float32", "--stream-interval", "8"),
    "bfloat16": ("--dtype", "bfloat16", *_EXACT),
}


def needs_sglang() -> Path:
    """The Python that SGLang is installed for; skips the test without one."""
    path = Path(os.environ.get("SLUICE_SGLANG_PYTHON") or ROOT / ".venv-sglang" / "bin" / "python")
    if not path.is_file():
        pytest.skip(f"SGLang {EXPECTED_SGLANG} is not installed; run `make sglang-env`, or set SLUICE_SGLANG_PYTHON")
    return path


@dataclass
class RealServer:
    """One server process. `model` and `other` are checkpoints of one shape; it starts with the first."""

    kind: Kind
    url: str
    model: Path
    other: Path
    log: Path
    process: subprocess.Popen[bytes] | None = field(repr=False, default=None)

    def wait_ready(self) -> None:
        """Wait for the server to answer; unblocked by its answer, by its end or by the time limit."""
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            if self.process is not None and self.process.poll() is not None:
                pytest.fail(f"SGLang ended with status {self.process.returncode}:\n{self.tail()}")
            if self._answers():
                return
            time.sleep(0.5)
        pytest.fail(f"SGLang did not answer within {READY_S:g} s:\n{self.tail()}")

    def _answers(self) -> bool:
        """By a blocking call: fixtures are set up inside of event loops too."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2.0) as answer:
                return bool(answer.status == 200)
        except OSError:  # nothing listens yet, or it is not well yet
            return False

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])

    async def fresh(self, client: EngineClient, label: str = "first") -> None:
        """Nothing paused or running, no prefix cached, the first checkpoint's weights."""
        await client.resume()
        await client.abort()
        await client.update_weights_from_disk(str(self.model), label)

    def ask_to_end(self) -> None:
        """The process and what it started: they are a session of their own. Takes SGLang five seconds."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)

    def wait_ended(self) -> None:
        """Until it has ended; kills it after 15 seconds."""
        if self.process is None:
            return
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(15)


class ServerPool:
    """The session's servers, started together when the first is asked for."""

    def __init__(self, directory: Path, model: Path, other: Path, kinds: Iterable[Kind]) -> None:
        self._directory, self._model, self._other = directory, model, other
        self._kinds = set(kinds)
        self._servers: dict[Kind, RealServer] = {}
        self._ready: set[Kind] = set()

    def get(self, kind: Kind) -> RealServer:
        python = needs_sglang()
        for wanted in sorted(self._kinds | {kind}):
            if wanted not in self._servers:
                self._servers[wanted] = self._start(python, wanted)
        server = self._servers[kind]
        if server.process is not None and kind in self._ready and (status := server.process.poll()) is not None:
            del self._servers[kind]  # this test fails, and the next one gets a new server
            self._ready.remove(kind)
            pytest.fail(f"the SGLang server of earlier tests ended with status {status}:\n{server.tail()}")
        if kind not in self._ready:
            server.wait_ready()
            self._ready.add(kind)
        return server

    def _start(self, python: Path, kind: Kind) -> RealServer:
        port = free_port()
        log = self._directory / f"sglang-{kind}.log"
        command = [str(python), "-c", _COPYING, "--model-path", str(self._model), *_COMMON]
        command += [*_OF_KIND[kind], "--port", str(port)]
        environment = {**os.environ, **_ENVIRONMENT}
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, stdout=out, stderr=out, env=environment, start_new_session=True, preexec_fn=_die_with_parent
            )
        return RealServer(kind, f"http://127.0.0.1:{port}", self._model, self._other, log, process)

    def close(self) -> None:
        for server in self._servers.values():
            server.ask_to_end()
        for server in self._servers.values():
            server.wait_ended()


_ENVIRONMENT: Final = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONPATH": str(SHIMS),
    "PYTHONDONTWRITEBYTECODE": "",
}
# As `python -m sglang.launch_server`, but that its other processes are copies of the first: each would import for ten
# seconds of a core.
_COPYING: Final = """
import multiprocessing, runpy
multiprocessing.set_start_method("fork")
multiprocessing.set_start_method = lambda method, force=False: None
runpy.run_module("sglang.launch_server", run_name="__main__")
"""
_COMMON: Final = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--disable-cuda-graph"),
    *("--max-total-tokens", "65536", "--mem-fraction-static", "0.3", "--sleep-on-idle", "--host", "127.0.0.1"),
    *("--context-length", str(CONTEXT), "--grammar-backend", "none", "--enable-metrics"),
)


def _die_with_parent() -> None:
    """Have the kernel end the server with the test process (Linux); SGLang's own children follow it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
