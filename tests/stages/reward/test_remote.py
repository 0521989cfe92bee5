"""`remote` against a real HTTP server that misbehaves as told. No test waits: pauses are recorded, not slept."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from configs.schema.data import RewardConfig
from stages.graders.grade import Grade
from stages.reward import remote as remote_module
from stages.reward.remote import MAX_ANSWER_BYTES, MAX_WAIT_S, MAX_WAITS, Question, RemoteReward, retry_after
from tests.stages.reward.answer_server import Answer, AnswerServer, answering
from tests.stages.stage_rig import until

ASKED = Question("3/1", "What is 1+1?", "2", "2", '{"level": 5}')


def says(body: object, status: int = 200, **headers: str) -> web.Response:
    text = body if isinstance(body, str) else json.dumps(body)
    return web.Response(text=text, status=status, headers=headers)


@asynccontextmanager
async def serving(*answers: Answer, **options: Any) -> AsyncIterator[tuple[RemoteReward, AnswerServer, list[float]]]:
    """A client, its server and the pauses that the client made."""
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        await asyncio.sleep(0)

    settings: dict[str, Any] = {"rm_concurrency": 4, "rm_timeout_s": 20.0, "rm_retries": 3, **options}
    key = settings.pop("reward_key", None)
    async with answering("/rm", *answers) as (url, server):
        reward = RewardConfig(rm_url=f"{url}/rm", **settings)
        client = RemoteReward(reward, key)
        client.sleep, client.jitter = sleep, lambda: 0.5
        try:
            yield client, server, pauses
        finally:
            await client.close()


@pytest.mark.parametrize(("answer", "words"), [
    (says({"score": None}), "'score' of the answer is null; a score must be one finite number"),
    (says("NaN"), "the answer is NaN"),
    (says({"score": "nan"}), "'score' of the answer is \"nan\""),
    (says("1e999"), "the answer is Infinity"),
    (says([1.0]), r"the answer is \[1.0\]"),
    (says("null"), "the answer is null"),
    (says({}), r"the answer has no 'score' \(--reward-key\); its keys: none"),
    (says({"reward": 1}), "its keys: reward"),
    (says("no such label", 400), "it answered 400: no such label"),
    (says("unprocessable", 422), "it answered 422: unprocessable"),
    (says("who are you", 401), "it answered 401"),
    (says("", 302, Location="/elsewhere"), "it answered 302"),
    (says("1" * (MAX_ANSWER_BYTES + 1)), "the answer is longer than"),
])  # fmt: skip
async def test_what_cannot_get_better_fails_at_once(answer: web.Response, words: str) -> None:
    async with serving(answer, says(1)) as (client, server, pauses):
        grade = await client.grade(ASKED)
        assert (grade.status, grade.score) == ("error", 0.0)
        assert re.search(words, grade.error or ""), grade.error
        assert (len(server.bodies), pauses) == (1, [])


async def drop(request: web.Request) -> web.StreamResponse:
    request.transport.abort()  # type: ignore[union-attr]
    return web.Response()


async def half(request: web.Request) -> web.StreamResponse:
    """Promise more than comes."""
    response = web.StreamResponse(headers={"Content-Length": "100"})
    await response.prepare(request)
    await response.write(b'{"score":')
    request.transport.abort()  # type: ignore[union-attr]
    return response


PASSING: dict[str, Answer] = {
    **{"html": says("<html>", 200), "empty": says("", 200), "500": says("busy", 500), "503": says("", 503)},
    **{"408": says("slow", 408), "429": says("", 429), "dropped": drop, "half": half},
}


@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING)
async def test_what_may_pass_is_tried_again(fault: Answer) -> None:
    async with serving(fault, fault, says(0.75)) as (client, server, pauses):
        assert (await client.grade(ASKED)).score == 0.75
        assert len(server.bodies) == 3
        assert pauses == [1.5, 2.5]
        assert len(set(server.keys)) == 1
        assert [body["attempt"] for body in server.bodies] == [0, 1, 2]


async def test_a_deadline_counts_for_the_whole_try() -> None:
    """Headers in time do not help a body that never ends."""
    stop = asyncio.Event()

    async def trickle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while not stop.is_set():
            await response.write(b" ")
            await asyncio.sleep(0.01)
        return response

    async with serving(trickle, trickle, says(1), rm_timeout_s=0.3, rm_retries=2) as (client, server, _):
        assert await client.grade(ASKED) == Grade(1.0)
        assert len(server.bodies) == 3
        server.answers[:] = [trickle]
        grade = await client.grade(ASKED)
        assert grade.status == "timeout"
        assert "no answer within 0.3 s (--rm-timeout-s), in 3 tries" in (grade.error or "")
        stop.set()


async def test_retry_after_uses_up_no_try_but_is_bounded() -> None:
    """And of an overloaded server it is obeyed within the budget."""
    later = says("later", 429, **{"Retry-After": "7"})
    async with serving(*[later] * 5, says(1), rm_retries=0) as (client, _, pauses):
        assert await client.grade(ASKED) == Grade(1.0)
        assert pauses == [7.5] * 5
    async with serving(says("later", 429, **{"Retry-After": "86400"}), rm_retries=2) as (client, server, pauses):
        grade = await client.grade(ASKED)
        assert "it answered 429" in (grade.error or "")
        assert len(server.bodies) == 1 + MAX_WAITS + 2
        assert max(pauses) == MAX_WAIT_S + 0.5
    async with serving(says("", 503, **{"Retry-After": "9"}), rm_retries=2) as (client, server, pauses):
        assert (await client.grade(ASKED)).status == "error"
        assert (len(server.bodies), pauses) == (3, [9.5, 9.5])


def test_retry_after_as_a_date() -> None:
    soon = retry_after(format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True))
    assert 25 < (soon or 0.0) <= 30
    assert retry_after(format_datetime(datetime.now(UTC) - timedelta(days=1), usegmt=True)) == 0.0
    assert retry_after("12") == 12.0
    assert retry_after("soon") is None
    assert retry_after(None) is None


async def test_a_dict_gives_parts_and_the_key_picks_one() -> None:
    body = {"score": 0.5, "acc": 1, "is_correct": True, "extracted": "2", "note": "fine", "flags": [1]}
    async with serving(says(body)) as (client, _, _):
        assert await client.grade(ASKED) == Grade(0.5, True, {"acc": 1.0}, "2")
        client.reward_key = "acc"
        assert await client.grade(ASKED) == Grade(1.0, True, {"score": 0.5, "acc": 1.0}, "2")
        client.reward_key = "accuracy"
        words = "the answer has no 'accuracy' (--reward-key); its keys: score, acc"
        assert words in ((await client.grade(ASKED)).error or "")


KEYS = st.sampled_from(["score", "acc", "is_correct"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner),
    max_leaves=6,
)


@given(st.binary(max_size=200) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_whatever_a_server_says_is_a_finite_score_or_a_fault(data: bytes) -> None:
    for key in (None, "acc"):
        found = remote_module._answer(data, key)
        if isinstance(found, Grade):
            assert all(math.isfinite(number) for number in (found.score, *found.parts.values()))
            assert found.error is None
        else:
            assert found.reason


async def test_no_more_requests_at_one_time_than_allowed() -> None:
    gate = asyncio.Event()

    async def wait(request: web.Request) -> web.StreamResponse:
        await gate.wait()
        return web.Response(text="1")

    async with serving(wait, rm_concurrency=3) as (client, server, _), asyncio.TaskGroup() as tasks:
        for _ in range(12):
            tasks.create_task(client.grade(ASKED))
        await until(lambda: server.open >= 3)
        await asyncio.sleep(0.05)
        assert server.most_open == 3
        gate.set()
    assert server.most_open == 3
    assert len(server.bodies) == 12


async def test_no_server_and_no_address() -> None:
    async def refusal(url: str | None) -> str:
        client = RemoteReward(RewardConfig(rm_url=url, rm_retries=1))
        client.sleep = lambda _: asyncio.sleep(0)
        grade = await client.grade(ASKED)
        await client.close()
        return grade.error or ""

    nobody = await refusal("http://127.0.0.1:9")
    assert "ClientConnectorError" in nobody
    assert "in 2 tries" in nobody
    assert "write --rm-url http://host:port/path" in await refusal("no address")
    assert "set --rm-url" in await refusal(None)
