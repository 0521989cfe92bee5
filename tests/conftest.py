"""Fixtures of all tests: the real SGLang servers, shared by all files of a session, and a small disk."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Final

import execnet.gateway_io
import pytest
from hypothesis import HealthCheck, settings

from models.tiny import TinyRecipe, make_tiny_checkpoint
from pipeline.hosts.machine import collect_less
from tests.copies import CopiedWorker
from tests.sglang_server import FIXTURES, RealServer, ServerPool, needs_sglang

ROOT: Final = Path(__file__).resolve().parents[1]

# Examples are judged by their result, never by the time that a busy machine takes.
# `--hypothesis-profile thorough` takes ten times as many.
UNTIMED: Final = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("untimed", UNTIMED)
settings.register_profile("thorough", UNTIMED, max_examples=400)
settings.load_profile("untimed")


# Threads that spin are ruinous where there are more processes than cores. What the programs of the tests have too lets
# them be copies of what a worker has imported (tests/copies.py).
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

gc.disable()  # until all tests are imported: to look for garbage takes a quarter of that time, and there is none


def pytest_xdist_setupnodes() -> None:
    """In the controller: workers do not import what all of them need, nor do the programs that they start."""
    execnet.gateway_io.Popen2IOMaster = CopiedWorker


IMPORTED_FROM: Final[list[str]] = []


def pytest_collection_finish() -> None:
    """Half a million objects of torch, transformers and the collected tests stay: no collection has to look at them."""
    collect_less()
    gc.enable()
    IMPORTED_FROM.extend(sys.path)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown() -> Generator[None]:
    """Hold a test to where the tests run: one that leaves its process in another directory breaks others after it."""
    yield
    sys.path[:] = IMPORTED_FROM  # the command line adds the directory in which it is called, where a user's modules are
    if Path.cwd() != ROOT:
        os.chdir(ROOT)
        pytest.fail("this test has left its process in another directory; use monkeypatch.chdir", pytrace=False)


@pytest.fixture(scope="session")
def sglang_pool(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPool]:
    """Servers by kind; see `tests.sglang_server`."""
    needs_sglang()
    names = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    root = tmp_path_factory.mktemp("sglang")
    model, other = (make_tiny_checkpoint(root / str(seed), TinyRecipe(seed=seed)) for seed in (0, 1))
    pool = ServerPool(root, model, other, [kind for name, kind in FIXTURES.items() if name in names])
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def sglang(sglang_pool: ServerPool) -> RealServer:
    """A real SGLang server without overlap scheduling that streams what is new."""
    return sglang_pool.get("exact")


@pytest.fixture(scope="session")
def sglang_bfloat16(sglang_pool: ServerPool) -> RealServer:
    """As `sglang`, in bfloat16. Started by the tests that ask for it by name."""
    return sglang_pool.get("bfloat16")


@pytest.fixture(scope="session")
def sglang_overlap(sglang_pool: ServerPool) -> RealServer:
    """A real SGLang server with its default scheduling, and with cumulative streams."""
    return sglang_pool.get("overlap")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 80 MiB, where this machine lets one be mounted."""
    mount = tmp_path / "disk"
    mount.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=80m", "tmpfs", str(mount)], capture_output=True, text=True
    )
    if done.returncode != 0:
        pytest.skip(f"cannot mount a small file system here: {done.stderr.strip()}")
    yield mount
    gc.collect()  # mapped weights of a stage that ran in this process
    for _ in range(50):  # the last process of a run may end a moment after it
        if (done := subprocess.run(["umount", str(mount)], capture_output=True, text=True)).returncode == 0:
            return
        time.sleep(0.2)
    subprocess.run(["umount", "--lazy", str(mount)], check=True)
    pytest.fail(f"something of the test still uses {mount}: {done.stderr}")
