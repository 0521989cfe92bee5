"""The server of `launch.py view`: who may ask for what, and how it answers."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import aiohttp
import pytest

import launch
from pipeline.control.endpoint import Command, Drain, Pause, Reply, Rollback, Scale, Set
from pipeline.errors import CommandRefused, NotRunning, UsageError
from pipeline.facts.run_directory import RunDir
from pipeline.view import server
from pipeline.view.beside import viewed
from pipeline.view.documents import RunDocuments
from pipeline.view.server import serving
from tests.pipeline.view.made_run import made_run

LOOK, STEER = "look-token", "steer-token"
ROOT = Path(__file__).parents[3]


@pytest.fixture
def made(tmp_path: Path) -> RunDir:
    return made_run(tmp_path / "run")


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A page of two files, beside a file that is not of it."""
    place = tmp_path / "page"
    (place / "vendor").mkdir(parents=True)
    (place / "index.html").write_text("<p>é</p>")
    (place / "vendor" / "some.js").write_text("1")
    (place / "notes.py").write_text("secret")
    (tmp_path / "secret.js").write_text("secret")
    monkeypatch.setattr(server, "PAGE", place)
    return place


@asynccontextmanager
async def asking(run: RunDir, token: str | None = LOOK, **headers: str) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of a real server of the run."""
    sent = headers if token is None else {"Authorization": f"Bearer {token}", **headers}
    async with (
        serving(RunDocuments(run.path), 0, LOOK, STEER) as port,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}", headers=sent) as session,
    ):
        yield session


PATHS = ["/api/run", "/api/metrics", "/api/lanes", "/api/rollouts", "/api/rollout?key=0", "/api/logs", "/api/other"]


@pytest.mark.parametrize("token", [None, "", "wrong", "look-toke", "look-token2", "löök"])
async def test_without_the_token_nothing_is_told(token: str | None, made: RunDir) -> None:
    async with asking(made, token) as session:
        for path in PATHS:
            async with session.get(path) as answer:
                assert answer.status == 401, path
                assert "token" in (await answer.json())["error"]
        async with session.post("/api/steer", json={"command": "drain"}) as answer:
            assert answer.status == 401


async def test_an_empty_token_lets_nobody_in(made: RunDir) -> None:
    async with (
        serving(RunDocuments(made.path), 0, LOOK) as port,
        aiohttp.ClientSession(headers={"Authorization": "Bearer "}) as session,
        session.post(f"http://127.0.0.1:{port}/api/steer", json={"command": "drain"}) as answer,
    ):
        assert answer.status == 401


async def test_the_token_shows_the_run(made: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.view.documents.decoder_of", lambda run: None)  # loading it takes seconds
    async with asking(made) as session:
        for path, first in zip(PATHS, ["run", "steps", "from_s", "rows", "row", "lines"], strict=False):
            async with session.get(path) as answer:
                assert (answer.status, answer.content_type) == (200, "application/json")
                assert next(iter(await answer.json())) == first
        async with session.get("/api/run") as answer:
            assert (await answer.json())["may_steer"] is False
    async with asking(made, STEER) as session, session.get("/api/run") as answer:
        assert (await answer.json())["may_steer"] is True


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "127.0.0.1"},
        {"Host": "127.0.0.1:1"},
        {"Host": "evil.example:{port}"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:{port}"},  # the page asks 127.0.0.1
        {"Origin": "https://127.0.0.1:{port}"},
        {"Host": "localhost:{port}", "Origin": "http://127.0.0.1:{port}"},
    ],
)
@pytest.mark.parametrize("path", ["/", "/api/run"])
async def test_other_names_and_other_pages_are_refused(
    headers: dict[str, str], path: str, made: RunDir, page: Path
) -> None:
    async with serving(RunDocuments(made.path), 0, LOOK) as port, aiohttp.ClientSession() as session:
        given = {name: value.format(port=port) for name, value in headers.items()}
        sent = {"Authorization": f"Bearer {LOOK}", **given}
        async with session.get(f"http://127.0.0.1:{port}{path}", headers=sent) as answer:
            assert answer.status == 403
            assert "secret" not in await answer.text()


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
async def test_the_page_of_this_server_may_ask(name: str, made: RunDir) -> None:
    async with serving(RunDocuments(made.path), 0, LOOK) as port, aiohttp.ClientSession() as session:
        own = {"Host": f"{name}:{port}", "Origin": f"http://{name}:{port}", "Authorization": f"Bearer {LOOK}"}
        async with session.get(f"http://127.0.0.1:{port}/api/run", headers=own) as answer:
            assert answer.status == 200


@pytest.mark.parametrize(("path", "status"), [("/", 200), ("/api/run", 200), ("/api/rollout?key=x", 404), ("/no", 404)])
async def test_each_answer_forbids_what_the_page_does_not_need(
    path: str, status: int, made: RunDir, page: Path
) -> None:
    async with asking(made) as session, session.get(path) as answer:
        assert answer.status == status
        policy = answer.headers["Content-Security-Policy"].split("; ")
        assert {"default-src 'none'", "script-src 'self'", "frame-ancestors 'none'", "connect-src 'self'"} <= {*policy}
        assert "unsafe" not in answer.headers["Content-Security-Policy"]
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Referrer-Policy"] == "no-referrer"
        assert answer.headers["Cache-Control"] == "no-store"
        assert not [name for name in answer.headers if name.lower().startswith("access-control")]


async def test_no_other_page_is_let_in_beforehand(made: RunDir) -> None:
    asks = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    async with asking(made, STEER, **asks) as session, session.options("/api/steer") as answer:
        assert answer.status == 403
        assert not [name for name in answer.headers if name.lower().startswith("access-control")]


async def test_files_of_the_page_are_served_without_a_token(made: RunDir, page: Path) -> None:
    async with asking(made, None) as session:
        for path, kind, text in (("/", "text/html", "<p>é</p>"), ("/vendor/some.js", "text/javascript", "1")):
            async with session.get(path) as answer:
                assert (answer.status, answer.content_type, answer.charset) == (200, kind, "utf-8")
                assert await answer.text() == text


@pytest.mark.parametrize(
    "path",
    ["/../secret.js", "/%2e%2e/secret.js", "/vendor/../../secret.js", "/..%2fsecret.js", "//etc/passwd", "/notes.py",
     "/vendor", "/%00.js", "/vendor/..%5c..%5csecret.js"],
)  # fmt: skip
async def test_no_other_file_is_served(path: str, made: RunDir, page: Path) -> None:
    reader_text = await raw(made, f"GET {path} HTTP/1.1")
    assert re.match(r"HTTP/1.1 40[04] ", reader_text), reader_text
    assert "secret\n" not in reader_text
    assert "root:" not in reader_text


async def raw(run: RunDir, line: str) -> str:
    """The answer to a request whose path no client tidies."""
    async with serving(RunDocuments(run.path), 0, LOOK) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"{line}\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n".encode())
        text = (await reader.read()).decode()
        writer.close()
    return text


@pytest.mark.parametrize(
    "query",
    [
        "/api/rollouts?step=x",
        "/api/rollouts?reward=much",
        "/api/rollout",
        "/api/lanes?seconds=x",
        "/api/metrics?after=x",
    ],
)
async def test_a_question_that_cannot_be_read_is_a_sentence(query: str, made: RunDir) -> None:
    async with asking(made) as session, session.get(query) as answer:
        assert answer.status == 400
        assert (await answer.json())["error"]


async def test_questions_reach_the_documents(made: RunDir) -> None:
    async with asking(made) as session:
        async with session.get("/api/rollouts?outcome=filtered&step=&limit=5") as answer:
            assert [row["group"] for row in (await answer.json())["rows"]] == [3]
        async with session.get("/api/metrics?after=1") as answer:
            assert (await answer.json())["steps"] == [2]
        async with session.get("/api/lanes?seconds=1&until=1000001.5") as answer:
            assert (await answer.json())["from_s"] == 1000000.5
        async with session.get("/api/logs?text=two") as answer:
            assert [line["text"] for line in (await answer.json())["lines"]] == ["INFO root: two"]


# ------------------------------------------------------------------ steering


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Command]:
    """The commands that reach the run."""
    found: list[Command] = []

    def ask(run: Path, command: Command) -> Reply:
        found.append(command)
        if isinstance(command, Pause):
            raise NotRunning("it has ended")
        if isinstance(command, Drain):
            raise CommandRefused(["one", "two"])
        return Reply(True, ("done",))

    monkeypatch.setattr(server, "ask", ask)
    return found


DONE = {"ok": True, "lines": ["done"]}


async def steered(run: RunDir, token: str, body: object, kind: str = "application/json") -> tuple[int, Any]:
    data = json.dumps(body).encode()
    async with (
        asking(run, token) as session,
        session.post("/api/steer", data=data, headers={"Content-Type": kind}) as answer,
    ):
        return answer.status, await answer.json()


@pytest.mark.parametrize(
    ("body", "command", "reply"),
    [
        ({"command": "scale", "arguments": {"reward": 4}}, Scale({"reward": 4}), DONE),
        ({"command": "set", "arguments": {"lr": 1e-6, "n": "2"}}, Set({"lr": "1e-06", "n": "2"}), DONE),
        ({"command": "rollback", "arguments": {"step": 60}}, Rollback(60), DONE),
        ({"command": "pause"}, Pause(), {"ok": False, "lines": ["it has ended"]}),
        ({"command": "drain", "arguments": {}}, Drain(), {"ok": False, "lines": ["one", "two"]}),
    ],
)
async def test_the_steer_token_steers(
    body: object, command: Command, reply: object, made: RunDir, told: list[Command]
) -> None:
    assert await steered(made, STEER, body) == (200, reply)
    assert told == [command]


@pytest.mark.parametrize(
    ("token", "body", "kind", "status"),
    [
        (LOOK, {"command": "drain"}, "application/json", 403),
        (STEER, {"command": "drain"}, "text/plain", 415),
        (STEER, {"command": "drain"}, "application/x-www-form-urlencoded", 415),
        (STEER, {"command": "status"}, "application/json", 400),
        (STEER, {"command": "explode"}, "application/json", 400),
        (STEER, {"command": "scale", "arguments": {"reward": "x"}}, "application/json", 400),
        (STEER, {"command": "rollback", "arguments": {"step": "x"}}, "application/json", 400),
        (STEER, [], "application/json", 400),
        (STEER, {"command": "drain", "more": "x" * 70_000}, "application/json", 413),
    ],
)
async def test_nothing_else_steers(
    token: str, body: object, kind: str, status: int, made: RunDir, told: list[Command]
) -> None:
    found, answer = await steered(made, token, body, kind)
    assert found == status
    assert answer["error"]
    assert told == []


async def test_steering_needs_post(made: RunDir, told: list[Command], page: Path) -> None:
    async with asking(made, STEER) as session, session.get("/api/steer?command=drain") as answer:
        assert answer.status == 404
    assert told == []


# ------------------------------------------------------------------ the command and the child


async def test_a_port_in_use_is_refused_with_a_cure(made: RunDir) -> None:
    documents = RunDocuments(made.path)
    async with serving(documents, 0, LOOK) as port:
        with pytest.raises(UsageError, match=f"--port {port} cannot be used .* choose another one, or 0"):
            async with serving(documents, port, LOOK):
                pass


def test_a_place_without_a_run_is_no_view(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["view", str(tmp_path)]) == 2
    assert "holds no run; give the run directory" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_prints_an_address_for_looking_and_one_for_steering(made: RunDir) -> None:
    child = subprocess.Popen(
        [sys.executable, str(ROOT / "launch.py"), "view", str(made.path), "--steer"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert child.stdout is not None
    looks, steers = child.stdout.readline(), child.stdout.readline()
    child.send_signal(signal.SIGTERM)
    assert child.wait(30) == 0
    pattern = r"http://127\.0\.0\.1:(\d+)/#token=([\w-]{32})"
    first, second = re.match(pattern, looks), re.match(pattern, steers)
    assert first is not None
    assert second is not None
    assert first[1] == second[1]
    assert first[2] != second[2]


@pytest.mark.slow
def test_a_run_has_its_view_beside_it_and_ends_it(made: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    printed = ""
    with viewed(made.path, True):
        for _ in range(600):
            printed += capsys.readouterr().err
            if printed:
                break
            time.sleep(0.05)
        found = re.match(r"view: (http://127\.0\.0\.1:\d+)/#token=", printed)
        assert found is not None, printed
        assert status_of(found[1]) == 401
    with pytest.raises(OSError, match="refused"):
        status_of(found[1])


def status_of(address: str) -> int:
    try:
        return int(urlopen(f"{address}/api/run", timeout=10).status)
    except HTTPError as error:
        return error.code


def test_without_view_no_child_is_started(made: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: pytest.fail("a child was started"))
    with viewed(made.path, False):
        pass
