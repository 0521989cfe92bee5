"""Tools that misbehave, in their processes: a call has an answer in time, and the next one is served."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stages.tools.registry import close_tools, resolve_tools
from stages.tools.tool import RESULT_CHARS, Tool
from stages.workers import process as worker_process
from tests.stages.toolkit.test_tool_calls import PATH, answer_call, call_text, opened

pytestmark = pytest.mark.slow

LONG_S = 60.0  # never reached
CRASHED = "this call or another one crashed or blocked it"


async def ask(tools: dict[str, Tool], text: str, deadline_s: float) -> str:
    return await answer_call(tools, call_text(json.dumps({"text": text})), deadline_s)


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


async def until(condition: Callable[[], bool]) -> None:
    """Waits for what other processes do."""
    async with asyncio.timeout(LONG_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def noted(file: Path) -> list[int]:
    """The processes that the tool `note` writes down."""
    await until(lambda: file.exists() and file.read_text() != "")
    return [int(number) for number in file.read_text().split()]


@pytest.mark.parametrize(
    ("tool", "text", "answer"),
    [
        ("give_up", "x", "error: CancelledError: "),
        ("leave", "x", "error: SystemExit: 3"),
        ("crash", "crash", "error: its worker process ended with exit status 7; " + CRASHED),
        ("block", "block", "error: no answer within 0.2 s"),
        ("spin", "spin", "error: no answer within 0.2 s"),
        ("deaf", "deaf", "error: no answer within 0.2 s"),
    ],
)
async def test_a_tool_that_misbehaves_is_answered_for_and_serves_again(
    tool: str, text: str, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_process, "_CANCEL_S", 0.2)
    async with opened(f"{PATH}:{tool}") as tools, asyncio.timeout(LONG_S):
        for _ in range(2):  # each time after a call that was served
            assert await ask(tools, text, 0.2 if "within" in answer else LONG_S) == answer
            while (found := await ask(tools, "again", LONG_S)) not in ("again", answer):
                assert found.endswith(CRASHED)
        assert found == ("again" if text != "x" else answer)


async def test_a_blocked_tool_holds_up_no_other_tool_and_loses_only_its_own_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_process, "_CANCEL_S", 0.2)
    async with opened(f"{PATH}:block", f"{PATH}:echo") as tools, asyncio.timeout(LONG_S), asyncio.TaskGroup() as tasks:

        def call(name: str, text: str, deadline_s: float) -> asyncio.Task[str]:
            content = json.dumps({"name": name, "arguments": {"text": text}})
            return tasks.create_task(answer_call(tools, call_text(content), deadline_s))

        assert await call("block", "served", LONG_S) == "served"
        waits = call("block", "wait", LONG_S)
        blocked = call("block", "block", 0.5)
        assert [await call("echo", str(n), LONG_S) for n in range(5)] == ["0", "1", "2", "3", "4"]
        assert await blocked == "error: no answer within 0.5 s"
        assert (await waits).endswith(CRASHED)
        assert await call("block", "served", LONG_S) == "served"


async def test_a_result_without_end_is_cut() -> None:
    async with opened(f"{PATH}:much") as tools:
        found = await ask(tools, "x", LONG_S)
    assert found == "x" * RESULT_CHARS + f"\n[cut: the first {RESULT_CHARS} of 100000000 characters]"


async def test_a_cancelled_call_is_told_to_the_tool_and_its_process_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "note"
    async with opened(f"{PATH}:note") as tools:
        call = asyncio.ensure_future(ask(tools, str(file), LONG_S))
        worker, daemon = await noted(file)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await until(lambda: file.read_text() == "cancelled")
        assert alive(worker)
        assert alive(daemon)
    await until(lambda: not alive(worker) and not alive(daemon))


async def test_a_tool_and_its_daemons_end_with_the_stage_that_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "note"
    program = f"""
import asyncio, json
from tests.stages.toolkit.test_tool_processes import PATH, ask, opened
async def main():
    async with opened(f"{{PATH}}:note") as tools:
        await ask(tools, {str(file)!r}, 3600.0)
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", program])  # noqa: ASYNC220 - starting it takes no time
    try:
        pids = await noted(file)
    finally:
        parent.kill()
        parent.wait()
    await until(lambda: not any(map(alive, pids)))


async def test_a_tool_that_cannot_start_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    async with opened(f"{PATH}:echo") as tools:
        assert await ask(tools, "x", LONG_S) == "error: its worker process does not start: the error output says why"


async def test_a_tool_that_allocates_without_bound_ends_alone_with_the_reason() -> None:
    tools = resolve_tools([f"{PATH}:hoard", f"{PATH}:echo"], memory_gb=0.25)

    async def call(name: str, text: str) -> str:
        content = json.dumps({"name": name, "arguments": {"text": text}})
        return await answer_call(tools, call_text(content), LONG_S)

    try:
        async with asyncio.timeout(LONG_S):
            assert await call("echo", "served") == "served"
            hoarded = await call("hoard", "all")
            assert hoarded.endswith("process ended: this call or another one wanted more memory than it may have")
            assert await call("hoard", "nothing") == "nothing", "another process serves"
            assert await call("echo", "served") == "served"
    finally:
        await close_tools(tools)
