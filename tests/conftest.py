"""Fixtures of all tests: the real SGLang servers, shared by all files of a session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from models.tiny import make_tiny_checkpoint
from tests.sglang_server import FIXTURES, RealServer, ServerPool, needs_sglang

OWN_PROCESSES = {"checkpoints", "families", "fsdp", "megatron"}  # one set of processes for all tests of a file
SHARED_SERVERS = {"test_generate_sglang.py", "test_sglang_contract.py", "test_weight_routes.py"}
OWN_SERVERS = {"test_sglang_runs.py"}  # those that start servers of their own: one after the other


def scope_of(nodeid: str) -> str:
    """Which tests run on one worker: those that share what is dear to set up. Any other is a scope of its own.

    By name, for the process that deals tests out knows no more of them (xdist's marks do not reach it with pytest 9).
    """
    file, _, test = nodeid.partition("::")
    path = Path(file)
    on_servers = path.parent.name == "engines" and "sglang" in test
    if on_servers or path.name in SHARED_SERVERS or "log_probs_are_those_of" in test:
        return "sglang"
    if path.name in OWN_SERVERS:
        return "runs with sglang"
    return file if path.parent.name in OWN_PROCESSES else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadgroup`: by `scope_of`, the largest scopes first."""
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByScope(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    return ByScope(config, log)


@pytest.fixture(scope="session")
def sglang_pool(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPool]:
    """Servers by kind; see `tests.sglang_server`."""
    needs_sglang()
    names = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    root = tmp_path_factory.mktemp("sglang")
    model, other = (make_tiny_checkpoint(root / str(seed), seed=seed) for seed in (0, 1))
    pool = ServerPool(root, model, other, [kind for name, kind in FIXTURES.items() if name in names])
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def sglang(sglang_pool: ServerPool) -> RealServer:
    """A real SGLang server without overlap scheduling that streams what is new."""
    return sglang_pool.get("exact")


@pytest.fixture(scope="session")
def sglang_overlap(sglang_pool: ServerPool) -> RealServer:
    """A real SGLang server with its default scheduling, and with cumulative streams."""
    return sglang_pool.get("overlap")
