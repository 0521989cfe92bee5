"""The actor that owns a process, without a cluster: of Ray it asks only which node it is on."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from pipeline.hosts.launcher import ProcessSpec
from pipeline.hosts.machine import living
from pipeline.hosts.ray.actor import ProcessActor

SLEEPS = ProcessSpec("one-0", (sys.executable, "-c", "import time; time.sleep(600)"))


@pytest.fixture
async def actor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ProcessActor]:
    node = SimpleNamespace(get_node_id=lambda: "node")
    ray = SimpleNamespace(
        get_runtime_context=lambda: node, util=SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)  # the actor goes there itself; other tests are not to follow it
    made = ProcessActor(str(tmp_path), "1")
    yield made
    await made.kill()
    await made.close()


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_a_process_that_is_being_started_when_the_run_ends_is_ended(actor: ProcessActor, how: str) -> None:
    """The run would wait for its end for ever."""
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        starting = tasks.create_task(actor.spawn(msgspec.msgpack.encode(SLEEPS)))
        await asyncio.sleep(0)  # it has begun
        assert not starting.done()
        await getattr(actor, how)()
    process, _ = starting.result()
    assert not living(process)
    assert (await actor.output(0))[1] is not None, "whoever waits learns of it"
