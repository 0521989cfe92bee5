"""The gateway as a server: keys, limits, refusals in each dialect's form, clients that go away, engines that fail."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import tracemalloc
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from models.engines.client import EngineClient
from models.errors import EngineUnreachable
from stages.chat.messages import TooLong
from stages.gateway import server
from stages.gateway.requests import Limits
from tests.stages.engine_rig import core_of
from tests.stages.gateway.gateway_rig import ANTHROPIC, ASK, CHAT, RESPONSES, TOKENS, Rig, ToyChat, opened
from tests.stages.stage_rig import until

QUESTION: dict[str, Any] = {"messages": ASK}


def hello(prompt: str) -> str:
    return "Hello."


def asked(content: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content}]}


def words(path: str, answer: dict[str, Any]) -> str:
    """What an error says, in the form of the dialect."""
    if path == ANTHROPIC:
        assert answer["type"] == "error"
        assert answer["error"]["type"].endswith("error") or answer["error"]["type"] == "request_too_large"
    elif path != TOKENS:
        assert {"message", "type", "code", "param"} == set(answer["error"])
    return str(answer["error"]["message"])


async def test_nothing_is_answered_without_the_key_of_an_open_session(tmp_path: Path) -> None:
    async with opened(tmp_path, hello) as rig:
        for path in (CHAT, ANTHROPIC, RESPONSES, TOKENS):
            for keys in ({"key": ""}, {"key": "x"}, {"x_api_key": "x"}):
                status, answer = await rig.post(path, QUESTION, **keys)
                assert (status, "no open session has this key" in words(path, answer)) == (401, True)
        with rig.another_session() as (other, other_key):
            assert (await rig.post(CHAT, QUESTION, key=other_key))[0] == 200
        assert (await rig.post(CHAT, QUESTION, key=other_key))[0] == 401, "it is closed"
        assert rig.place.session.samples() == ()
        assert len(other.session.samples()) == 1


NOT_STR = "Expected `str | array | null`, got `int` - at `$.messages[0].content`"
WRONG: list[tuple[str, Any, str]] = [
    (CHAT, b"{", "cannot be read"),
    (CHAT, b'{"messages": [], "tools": [{"a": ' + b"[" * 100_000, "nested too deeply"),
    (CHAT, b'{"x": ' + b"[" * 100_000, "nested too deeply"),
    (CHAT, asked(7), NOT_STR),
    (CHAT, {**QUESTION, "n": 2}, "one answer to a request"),
    (CHAT, {"messages": []}, "messages is empty"),
    (CHAT, asked("a", "king"), "role 'king'"),
    (CHAT, asked([{"type": "image_url"}]), "'image_url' is not supported"),
    (CHAT, asked("a", "assistant"), "last message is the assistant's"),
    (CHAT, {**QUESTION, "max_tokens": 0}, "must be at least 1"),
    (ANTHROPIC, asked([{"type": "image"}]), "'image' is not supported"),
    (ANTHROPIC, {"max_tokens": 5}, "missing required field `messages`"),
    (RESPONSES, {"input": "a", "previous_response_id": "resp_1"}, "previous_response_id is not supported"),
    (RESPONSES, {"input": [{"type": "computer_call"}]}, "'computer_call' are not supported"),
    (TOKENS, {"sampling_params": {}}, "either input_ids or text"),
    (TOKENS, {"input_ids": [1, 264]}, "from 0 to 263"),
    (TOKENS, {"input_ids": []}, "from 0 to 263"),
    (TOKENS, {"input_ids": [1], "sampling_params": {"n": 4}}, "one answer to a request"),
]


async def test_what_is_wrong_with_a_request_is_reported(tmp_path: Path) -> None:
    async with opened(tmp_path, hello) as rig:
        for path, body, said in WRONG:
            status, answer = await rig.post(path, body)
            assert (status, said in words(path, answer)) == (400, True), (said, answer)
        assert rig.samples() == ()


async def test_sizes_are_limited(tmp_path: Path) -> None:
    async with opened(tmp_path, hello, limits=Limits(body_bytes=2000, messages=2, tools=1)) as rig:
        for path, body in (
            (ANTHROPIC, asked("a" * 3000)),
            (CHAT, {"messages": QUESTION["messages"] * 3}),
            (CHAT, {**QUESTION, "tools": [{"function": {"name": "a"}}] * 2}),
        ):
            status, answer = await rig.post(path, body)
            assert status == 413
            assert words(path, answer)
        assert (await rig.get("/v1/nothing"))[0] == 404


async def talked(rig: Rig, *pieces: bytes, closes: bool = True) -> bytes:
    """What the gateway sends to a client that sends this and no more, until it closes (or the first piece)."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(rig.gateway.url.rpartition(":")[2]))
    for piece in pieces:
        writer.write(piece.replace(b"KEY", rig.endpoint.api_key.encode()))
    try:
        return await (reader.read() if closes else reader.read(1 << 16))
    finally:
        writer.close()


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer KEY\r\n"


async def test_a_conversation_that_is_too_long_ends_as_truncated(tmp_path: Path) -> None:
    """A body that cannot fit is refused before it is read as JSON, one that says its length before any of it came."""
    chat = ToyChat()
    async with opened(tmp_path, hello, chat=chat, max_context=40) as rig:
        assert (await rig.post(CHAT, {**QUESTION, "metadata": {"a": "b" * (1 << 20)}}))[0] == 200, "1 MiB, 32 a token"
        assert not rig.place.truncated
        chat.tokenised.clear()
        status, answer = await rig.post(CHAT, asked("a" * (2 << 20)))
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert rig.place.truncated
        said = await talked(rig, HEAD + b"Content-Length: 99000000\r\n\r\n", closes=False)
        assert b" 400 " in said
        assert chat.tokenised == []
        rig.place.truncated = False
        status, answer = await rig.post(CHAT, asked("a" * 50))
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert rig.place.truncated
        assert words(ANTHROPIC, (await rig.post(ANTHROPIC, asked("a" * 50)))[1]).startswith("prompt is too long: ")


PLAIN, BOMB = json.dumps(QUESTION).encode(), bytes(20 << 20)
PACKED = (
    ("gzip", gzip.compress(PLAIN), 200, ""),
    ("deflate", zlib.compress(PLAIN), 200, ""),
    ("gzip", gzip.compress(BOMB, 1), 400, "over 1179648 bytes"),
    ("deflate", zlib.compress(BOMB, 1), 400, "over 1179648 bytes"),
    ("gzip", gzip.compress(b"{}") + bytes(100), 400, "the body is not what its headers say"),
    ("gzip", b"no gzip", 400, "the body is not what its headers say"),
    ("gzip", gzip.compress(PLAIN)[:30], 400, "cannot be read"),
    ("br", b"\x00", 400, "Content-Encoding is 'br'; send gzip, deflate or no encoding"),
    ("compress", b"\x00", 400, "Content-Encoding is 'compress'; send gzip, deflate or no encoding"),
)


async def test_a_packed_body_is_unpacked_as_far_as_it_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unpacked: list[bytes] = []  # by the HTTP server, which would do so for refused bodies too
    monkeypatch.setattr("aiohttp.http_parser.DeflateBuffer.feed_data", lambda _, data: unpacked.append(data))
    async with opened(tmp_path, hello) as rig:
        for packing, packed, status, said in PACKED:
            tracemalloc.start()
            answered, answer = await rig.post(CHAT, packed, content_encoding=packing)
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert (answered, said in json.dumps(answer)) == (status, True), (said, answer)
            assert peak < 16 << 20
            assert not unpacked
            assert rig.gateway._bodies.held == rig.place.body_bytes == 0


async def test_bytes_of_bodies_in_memory_are_bounded(tmp_path: Path) -> None:
    """A session may have a quarter; what slow clients have announced and not sent takes no room."""
    async with opened(tmp_path, hello, limits=Limits(all_bodies=8000)) as rig, asyncio.TaskGroup() as tasks:
        half = HEAD + b"Content-Length: 3000\r\n\r\n" + b"a" * 600
        slow = [tasks.create_task(talked(rig, half)) for _ in range(3)]
        await until(lambda: rig.gateway._bodies.held == 1800)
        said = await talked(rig, HEAD + b"Content-Length: 500\r\n\r\n" + b"a" * 500, closes=False)
        assert said.startswith(b"HTTP/1.1 503 ")
        assert b"Retry-After: 1\r\n" in said
        with rig.another_session() as (_, other_key):
            assert (await rig.post(CHAT, QUESTION, key=other_key))[0] == 200, "it has a share of its own"
            rig.gateway._bodies.held = 8000
            assert (await rig.post(CHAT, QUESTION, key=other_key))[0] == 503
            rig.gateway._bodies.held = 1800
        for task in slow:
            task.cancel()
        await until(lambda: rig.gateway._bodies.held == rig.place.body_bytes == 0)


async def test_half_requests_end_and_connections_are_counted(tmp_path: Path) -> None:
    async with opened(tmp_path, hello, limits=Limits(body_s=0.05, head_s=0.05, connections=2)) as rig:
        said = await talked(rig, HEAD + b"Content-Length: 3000\r\n\r\n", b"{", closes=False)
        assert said.startswith(b"HTTP/1.1 408 ")
        assert await talked(rig, HEAD) == b"", "half a head is closed"
    (tmp_path / "more").mkdir()
    async with opened(tmp_path / "more", hello, limits=Limits(connections=2)) as rig, asyncio.TaskGroup() as tasks:
        open_ones = [tasks.create_task(talked(rig, HEAD)) for _ in range(2)]
        runner = rig.gateway._runner
        assert runner is not None
        assert runner.server is not None
        await until(lambda: runner.server is not None and len(runner.server.connections) == 2)
        said = await talked(rig, b"")
        assert said.startswith(b"HTTP/1.1 503 ")
        assert b"Retry-After" in said
        for task in open_ones:
            task.cancel()


class Stuck(ToyChat):
    """Takes long for long texts."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go_on = threading.Event(), threading.Event()

    def start(self, messages: Any, tools: Any, most: int | None = None) -> list[int]:
        if len(messages[0].content) > 1 << 19:
            self.begun.set()
            self.go_on.wait(60)
            raise TooLong("over 4096 tokens")
        return super().start(messages, tools, most)


async def test_other_sessions_are_answered_while_a_long_text_is_tokenised(tmp_path: Path) -> None:
    chat = Stuck()
    async with opened(tmp_path, hello, chat=chat) as rig, asyncio.TaskGroup() as tasks:
        with rig.another_session() as (_, other_key):
            long = tasks.create_task(rig.post(CHAT, asked("a" * 1_000_000)))
            await until(chat.begun.is_set)
            for size in (1, 3000):  # read by the event loop, and by the thread of short bodies
                assert (await rig.post(CHAT, {**QUESTION, "user": "b" * 16 * size}, key=other_key))[0] == 200
            assert not long.done()
            chat.go_on.set()
            assert (await long)[1]["error"]["code"] == "context_length_exceeded"
    assert rig.place.truncated


async def test_turns_are_limited(tmp_path: Path) -> None:
    async with opened(tmp_path, hello, rollout={"max_turns": 2}) as rig:
        statuses = [(await rig.post(CHAT, QUESTION))[0] for _ in range(3)]
        assert statuses == [200, 200, 400]
        assert rig.place.truncated
        assert len(rig.samples()) == 2


async def test_a_client_or_a_session_that_goes_away_ends_its_requests(tmp_path: Path) -> None:
    async def begun() -> None:
        await until(lambda: bool(core.schedule.running))

    async def lost(key: str) -> None:
        with pytest.raises(aiohttp.ClientError):
            await rig.post(CHAT, QUESTION, key=key)

    async with opened(tmp_path, hello, step_ms=1000.0, limits=Limits(in_flight=1)) as rig:
        core = core_of(rig.world.engines[0])
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(rig.post(CHAT, QUESTION))
            await begun()
            task.cancel()
        await until(lambda: not core.schedule.running)
        assert core.totals().num_aborted_requests == 1
        assert rig.place.session.samples() == ()
        assert rig.place.session.started == 1
        async with asyncio.TaskGroup() as tasks:
            with rig.another_session() as (_, other_key):
                tasks.create_task(lost(other_key))
                await begun()
                status, answer = await rig.post(CHAT, QUESTION, key=other_key)
                said = "this session has 1 requests under way; wait for one of them"
                assert (status, words(CHAT, answer)) == (429, said)
        await until(lambda: not core.schedule.running)
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(talked(rig, HEAD + b"Content-Length: 3000\r\n\r\n{"))
            await until(lambda: bool(rig.place.under_way))
            assert (await rig.post(CHAT, QUESTION))[0] == 429, "what is being read counts as well"
            task.cancel()


async def test_engines_that_fail_are_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def generate(client: EngineClient, *args: Any, **options: Any) -> Any:
        raise EngineUnreachable(client.base_url, "it has gone")

    async with opened(tmp_path, hello, rollout={"max_retries": 0}) as rig:
        for path in (CHAT, ANTHROPIC):
            known = len(rig.samples())
            with monkeypatch.context() as patch:
                patch.setattr(EngineClient, "generate", generate)
                status, answer = await rig.post(path, QUESTION)
            assert status == 503, "clients ask again"
            assert "it has gone" in words(path, answer)
            assert len(rig.place.unanswered) == 1
            assert len(rig.samples()) == known
            assert (await rig.post(path, QUESTION))[0] == 200
            assert not rig.place.unanswered


@pytest.mark.parametrize("path", [CHAT, ANTHROPIC, RESPONSES])
async def test_a_stream_says_that_it_is_alive_and_how_it_failed(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "COMMENT_S", 0.01)
    body = {"input": "Hi", "stream": True} if path == RESPONSES else {**QUESTION, "stream": True}
    async with opened(tmp_path, hello, step_ms=30.0) as rig:
        headers = {"Authorization": f"Bearer {rig.endpoint.api_key}"}
        stream = partial(rig.http.post, rig.endpoint.base_url + path, json=body, headers=headers)
        async with stream() as response:
            assert await response.content.readline() == b": wait\n"
            assert "Hello." in (await response.read()).decode()
        async with stream() as response:
            assert await response.content.readline() == b": wait\n"
            rig.world.rig.topic.publish("drain", b"1")
            await core_of(rig.world.engines[0]).stop()
            events = [line for line in (await response.read()).decode().splitlines() if line.startswith("data: ")]
        said = json.loads(events[-1].removeprefix("data: "))
        assert "the engines did not answer" in (said["message"] if path == RESPONSES else words(path, said))
        assert rig.place.drained
        assert len(rig.samples()) == 1


@pytest.mark.parametrize("honoured", [False, True])
async def test_sampling_is_the_policys_unless_set_otherwise(honoured: bool, tmp_path: Path) -> None:
    async with opened(tmp_path, hello, client_sampling=honoured) as rig:
        for temperature in (0.25, 1.0):
            await rig.ask(CHAT, {**QUESTION, "temperature": temperature})
        assert [rule.temperature for _, rule, _, _ in rig.writer.planned] == [0.25 if honoured else 1.0, 1.0]
        cold, warm = rig.place.session.samples()
    assert bool(cold.loss_mask.any()) is not honoured, "what was sampled otherwise is not trained"
    assert warm.loss_mask.any()
