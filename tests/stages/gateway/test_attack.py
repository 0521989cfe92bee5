"""A gateway in a process of its own under slow clients, large bodies and packed bombs: memory, and answers to others.

No time is asserted; `pytest -s` shows how long the answers of the honest session took.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from asyncio.subprocess import PIPE
from pathlib import Path

import aiohttp
import psutil
import pytest

from models.tiny import TinyRecipe, make_tiny_checkpoint
from stages.gateway.requests import BYTES_PER_TOKEN, LEAST_BODY, Limits
from tests.stages.gateway.gateway_process import engine, gateway, opened

CONTEXT = 32_768
SESSIONS = 64  # of the attackers
BODY = {"messages": [{"role": "user", "content": "What is 1 + 2? " * 20}], "max_tokens": 4}


def memory_of_gateway() -> int:
    """The most memory that its process has had, bytes."""
    children = psutil.Process().children()
    [process] = [one for one in children if "spawn_main" in str(one.cmdline()) and one.num_threads() > 1]
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


async def honest(url: str, key: str, until: asyncio.Event) -> list[float]:
    """Requests one after the other; seconds that each answer took."""
    took = []
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as http:
        while not until.is_set():
            begun = time.perf_counter()
            async with http.post(f"{url}/v1/chat/completions", json=BODY) as response:
                assert response.status == 200, await response.text()
            took.append(time.perf_counter() - begun)
            await asyncio.sleep(0.05)
    return took


@pytest.mark.slow
@pytest.mark.parametrize(("slow", "seconds"), [(100, 4), pytest.param(1500, 30, marks=pytest.mark.full)])
async def test_other_sessions_are_answered_and_memory_is_bounded(slow: int, seconds: int, tmp_path: Path) -> None:
    checkpoint = make_tiny_checkpoint(tmp_path / "tiny", TinyRecipe(num_layers=1))
    limit = LEAST_BODY + BYTES_PER_TOKEN * CONTEXT
    with engine(checkpoint, tmp_path, 0.01, 0.0) as engine_url:
        async with gateway(checkpoint, engine_url, CONTEXT) as (url, link):
            keys, _ = await opened(link, SESSIONS + 1)
            done = asyncio.Event()
            async with asyncio.TaskGroup() as tasks:
                answers = tasks.create_task(honest(url, keys[0], done))
                await asyncio.sleep(1)
                before = memory_of_gateway()
                script = str(Path(__file__).with_name("attack.py"))
                program = await asyncio.create_subprocess_exec(
                    *(sys.executable, script, url, str(slow), str(seconds), str(limit)), stdin=PIPE, stdout=PIPE
                )
                output, _ = await program.communicate("\n".join(keys[1:]).encode())
                done.set()
            peak = memory_of_gateway()
    seen, took = json.loads(output), sorted(await answers)
    assert sum(count for kind, count in seen.items() if kind.startswith("slow")) == slow
    for kind in ("60 MB of text", "text below the limit", "60 MB of text in gzip", "1 GB of zeros in gzip"):
        assert any(word.startswith(f"{kind}: HTTP/1.1 400") for word in seen), seen
    assert not [word for word in seen if " 500 " in word], seen
    # docs/gateway.md: all bodies, two that are made objects and tokens of, and connections.
    most = Limits().all_bodies + 2 * 30 * limit + (slow + 40 << 20)
    assert peak - before < most
    p99 = took[int(0.99 * len(took))]
    print(f"{len(took)} answers: p50 {took[len(took) // 2]:.3f} s, p99 {p99:.3f} s, longest {took[-1]:.3f} s")  # noqa: T201
    print(f"memory: {before >> 20} MiB before, {peak >> 20} MiB at most; {seen}")  # noqa: T201
