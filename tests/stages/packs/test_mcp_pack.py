"""The MCP pack against a real server, over stdio and HTTP."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from episodes import Episode

pytest.importorskip("mcp", reason="mcp is not installed: pip install 'mcp>=2'")

from stages.agents.environment import InfrastructureError
from stages.agents.packs.mcp import Mcp

SERVER = str(Path(__file__).parent / "mcp_server.py")
COMMAND = [sys.executable, SERVER]


@asynccontextmanager
async def episode(**options: object) -> AsyncIterator[Episode]:
    environment = Mcp(**({"command": COMMAND} | options))  # type: ignore[arg-type]
    played = Episode(environment)
    try:
        yield played
    finally:
        await environment.close()


@pytest.mark.slow
async def test_an_episode_with_a_server_of_its_own() -> None:
    async with episode(tools=["add", "fail", "say"]) as played, episode() as other:
        start = await played.start("Add things up.")
        assert [tool["function"]["name"] for tool in start.tools] == ["add", "fail", "say"]  # type: ignore[index]
        function = start.tools[0]["function"]
        assert function["description"] == "Add to the sum, and answer with it."  # type: ignore[index]
        assert function["parameters"]["properties"]["number"]["type"] == "integer"  # type: ignore[index]
        await other.start("Something else.")
        assert await played.call("add", {"number": 5}) == "5"
        assert await played.call("add", {"number": 6}) == "11"
        assert await other.call("add", {"number": 1}) == "1"
        assert (await played.call("fail", {"why": "it does not work"})).startswith("error: ")
        assert (await played.call("add", {"number": "many"})).startswith("error: ")
        assert (await played.call("add", {})).startswith("error: ")
        assert await played.call("say", "long") == "error: say takes a JSON object of arguments"
        assert "characters left out" in await played.call("say", {"length": 1_000_000})
        assert (await played.call("sleep", {"seconds": 0})).startswith("error: there is no tool 'sleep'")
        end = await played.say("It is 11.")
        assert (end.done, end.reward) == (True, None)


@pytest.mark.slow
async def test_a_server_that_is_slow_or_gone() -> None:
    async with episode(deadline_s=0.5) as played:
        await played.start("?")
        assert await played.call("sleep", {"seconds": 30}) == "error: no answer within 0.5 s"
    async with episode() as played:
        await played.start("?")
        with pytest.raises(InfrastructureError, match="is gone"):
            await played.call("die", {})


@pytest.mark.slow
async def test_a_server_that_does_not_start_is_no_fault_of_the_model() -> None:
    for command in (["/nonexistent"], [sys.executable, "-c", "print('hello')"]):
        async with episode(command=command) as played:
            with pytest.raises(InfrastructureError, match="begins no session"):
                await played.start("?")
    async with episode(command=[sys.executable, "-c", "import time; time.sleep(60)"], start_s=0.5) as played:
        with pytest.raises(InfrastructureError, match="does not answer within"):
            await played.start("?")
    with pytest.raises(ValueError, match="tools has 'subtract'"):
        async with episode(tools=["subtract"]) as played:
            await played.start("?")


@pytest.mark.slow
async def test_a_shared_server_over_http() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen([sys.executable, SERVER, str(port)], stderr=subprocess.DEVNULL) as server:  # noqa: ASYNC220
        try:
            end = time.monotonic() + 60
            while time.monotonic() < end:
                with socket.socket() as trying:
                    if trying.connect_ex(("127.0.0.1", port)) == 0:
                        break
                await asyncio.sleep(0.05)
            options = {"command": (), "url": f"http://127.0.0.1:{port}/mcp", "shared": True}
            async with episode(**options) as first, episode(**options) as second:
                await first.start("?")
                await second.start("?")
                assert await first.call("add", {"number": 5}) == "5"
                assert await second.call("add", {"number": 6}) == "11"
        finally:
            server.kill()


def test_options_that_name_no_server_are_refused() -> None:
    for options in ({}, {"command": ["x"], "url": "http://x"}):
        with pytest.raises(ValueError, match="either a command or a url"):
            Mcp(**options)  # type: ignore[arg-type]
