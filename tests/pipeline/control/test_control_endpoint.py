"""The control endpoint: who may ask, what a request may be, and what the client says when nobody answers."""

from __future__ import annotations

import asyncio
import socket
import stat
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

import launch
from pipeline.control import endpoint as module
from pipeline.control.client import NotRunning, ask
from pipeline.control.endpoint import (
    CONTROL_FILE,
    MOST_BYTES,
    Command,
    ControlAddress,
    Pause,
    Reply,
    Request,
    Scale,
    Status,
    endpoint,
)


class Run:
    """What answers, and what it was asked."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.asked: list[Command] = []

    async def answer(self, command: Command) -> Reply:
        self.asked.append(command)
        if isinstance(command, Pause):
            raise ValueError("it cannot pause")
        return Reply(True, ("done",))

    @property
    def address(self) -> ControlAddress:
        return msgspec.json.decode((self.run_dir / CONTROL_FILE).read_bytes(), type=ControlAddress)

    async def send(self, data: bytes) -> Reply:
        """What is answered to these bytes."""
        reader, writer = await asyncio.open_unix_connection(self.address.socket)
        writer.write(data)
        reply = msgspec.json.decode(await reader.readline(), type=Reply)
        writer.close()
        return reply


@asynccontextmanager
async def served(tmp_path: Path) -> AsyncIterator[Run]:
    run = Run(tmp_path)
    with tempfile.TemporaryDirectory(prefix="sluice-") as sockets:  # tmp_path may be too long for a socket
        async with endpoint(tmp_path, Path(sockets), run.answer):
            yield run


def line(token: str, command: Command | None = None) -> bytes:
    return msgspec.json.encode(Request(token, command or Status())) + b"\n"


async def test_the_owner_alone_may_ask_and_is_answered(tmp_path: Path) -> None:
    async with served(tmp_path) as run:
        for path in (tmp_path / CONTROL_FILE, Path(run.address.socket)):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
        reply = await asyncio.to_thread(ask, tmp_path, Scale({"reward": 4}))
        assert reply == Reply(True, ("done",))
        assert run.asked == [Scale({"reward": 4})]
        first = run.address.token
    assert not (tmp_path / CONTROL_FILE).exists()
    with pytest.raises(NotRunning, match="holds no run"):
        ask(tmp_path, Status())
    async with served(tmp_path) as run:
        assert run.address.token != first, "each run has a token of its own"


async def test_a_wrong_token_is_refused_whatever_is_asked(tmp_path: Path) -> None:
    async with served(tmp_path) as run:
        for token in ("", "x", run.address.token[:-1], run.address.token + "x", "ä"):
            for command in (line(token), b'{"token":%s,"command":{"type":"nothing"}}\n' % msgspec.json.encode(token)):
                assert await run.send(command) == module.REFUSED
        assert run.asked == []


async def test_what_is_no_request_is_told_so_and_the_next_one_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "READ_S", 0.2)
    async with served(tmp_path) as run:
        token = run.address.token.encode()
        wrong = {
            b"\xff\n": "one line of JSON with token and command",
            b'{"token":"' + token + b'","command":{"type":"explode"}}\n': "the command cannot be read",
            b"x" * (MOST_BYTES + 2): f"at most {MOST_BYTES} bytes",
            b"half a line": "no request came within 0.2 s",
            line(run.address.token, Pause()): "ValueError: it cannot pause",
        }
        for data, words in wrong.items():
            reply = await run.send(data)
            assert not reply.ok
            assert words in reply.lines[0]
        assert (await run.send(line(run.address.token))).ok


async def test_connections_beyond_the_bound_are_turned_away_and_hold_up_nobody(tmp_path: Path) -> None:
    async with served(tmp_path) as run:
        silent = [await asyncio.open_unix_connection(run.address.socket) for _ in range(module.MOST_CONNECTIONS)]
        reply = await run.send(line(run.address.token))
        assert "requests are being answered" in reply.lines[0]
        for _, writer in silent:
            writer.close()
        async with asyncio.timeout(30):
            while not (await run.send(line(run.address.token))).ok:  # noqa: ASYNC110  (a place that is free announces nothing)
                await asyncio.sleep(0.01)


def test_a_run_that_does_not_run_is_told_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["status", str(tmp_path / "nowhere")]) == 2
    assert "is no directory" in capsys.readouterr().err
    (tmp_path / "config.toml").touch()
    assert launch.main(["pause", str(tmp_path)]) == 2
    assert f"{tmp_path} is not running" in capsys.readouterr().err
    # What a killed run left: a file that names a socket where nobody listens.
    with tempfile.TemporaryDirectory(prefix="sluice-") as place, socket.socket(socket.AF_UNIX) as bound:
        bound.bind(f"{place}/ask.sock")
        (tmp_path / CONTROL_FILE).write_bytes(msgspec.json.encode(ControlAddress(f"{place}/ask.sock", "token")))
        assert launch.main(["status", str(tmp_path)]) == 2
    assert f"continue it with python launch.py --resume {tmp_path}" in capsys.readouterr().err


@pytest.mark.parametrize("change", ["reward", "reward=", "=4", "reward=many", "reward=-1"])
def test_a_count_that_is_none_is_refused(change: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["scale", str(tmp_path), change]) == 2
    assert f"{change!r} is no STAGE=COUNT; write for example reward=4" in capsys.readouterr().err
