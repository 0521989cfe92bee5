"""The packs with tools: functions, servers of the Model Context Protocol, and search."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from models.tiny import ARITHMETIC_CHARACTERS, TinyRecipe, make_tiny_checkpoint
from stages.agents.environment import InfrastructureError
from stages.agents.packs.functions import Functions
from stages.agents.packs.mcp import Mcp
from stages.agents.packs.search import Search, town_facts, town_names, town_questions
from stages.tools.tool import UnknownToolError
from tests.other_programs import free_port, served_app
from tests.stages.agents.play import Episode, needs, playing, world
from tests.stages.stage_rig import until

TOOLS = "tests.stages.toolkit.sample_tools"


async def test_functions_answer_in_a_conversation_until_there_is_no_call(tmp_path: Path) -> None:
    tiny = make_tiny_checkpoint(tmp_path / "tiny", TinyRecipe(hidden_size=32, num_layers=1))
    tools = ["calculator", f"{TOOLS}:echo", f"{TOOLS}:hang"]
    table = world("stages.agents.packs.functions:Functions", options={"tools": tools, "deadline_s": 1.0})
    async with playing(tiny, table) as play:
        slice_ = await play.begin()
        for name, argument, result in (
            ("calculator", '"expression": "6*7"', "42"),
            ("echo", '"text": "hi"', "hi"),
            ("hang", '"text": "hi"', "error: no answer within 1 s"),
        ):
            call = f'<tool_call>{{"name": "{name}", "arguments": {{{argument}}}}}</tool_call>'
            slice_ = await play.turn(slice_, call)
            assert slice_.samples[0].response.endswith(f"</tool_call>tool\n{result}assistant\n")
        (sample,) = (await play.turn(slice_, "It is 42.")).samples
        assert (sample.done, sample.response) == (True, "It is 42.")
        assert (sample.metrics["env/world/tool_calls"], sample.metrics["env/world/tool_errors"]) == (3.0, 1.0)


def test_what_is_no_tool_is_refused_before_an_episode() -> None:
    with pytest.raises(UnknownToolError, match="did you mean 'calculator'"):
        Functions(["calculatr"])


COMMAND = [sys.executable, str(Path(__file__).with_name("mcp_server.py"))]


@asynccontextmanager
async def episode(**options: object) -> AsyncIterator[Episode]:
    environment = Mcp(**({"command": COMMAND} | options))  # type: ignore[arg-type]
    played = Episode(environment)
    try:
        yield played
    finally:
        await environment.close()


@needs("mcp")
@pytest.mark.slow
async def test_an_episode_with_a_server_of_its_own() -> None:
    async with episode(tools=["add", "fail", "say"]) as played, episode() as other:
        start = await played.start("Add things up.")
        functions: list[Any] = [tool["function"] for tool in start.tools]
        assert [function["name"] for function in functions] == ["add", "fail", "say"]
        assert functions[0]["description"] == "Add to the sum, and answer with it."
        assert functions[0]["parameters"]["properties"]["number"]["type"] == "integer"
        await other.start("Something else.")
        assert await played.call("add", {"number": 5}) == "5"
        assert await played.call("add", {"number": 6}) == "11"
        assert await other.call("add", {"number": 1}) == "1"
        for name, wrong in (("fail", {"why": "it does not work"}), ("add", {"number": "many"}), ("add", {})):
            assert (await played.call(name, wrong)).startswith("error: ")
        assert await played.call("say", "long") == "error: say takes a JSON object of arguments"
        assert "characters left out" in await played.call("say", {"length": 1_000_000})
        assert (await played.call("sleep", {"seconds": 0})).startswith("error: there is no tool 'sleep'")
        end = await played.say("It is 11.")
        assert (end.done, end.reward) == (True, None)


@needs("mcp")
@pytest.mark.slow
async def test_a_server_that_is_slow_or_gone() -> None:
    async with episode(deadline_s=0.5) as played:
        await played.start("?")
        assert await played.call("sleep", {"seconds": 30}) == "error: no answer within 0.5 s"
    async with episode() as played:
        await played.start("?")
        with pytest.raises(InfrastructureError, match="is gone"):
            await played.call("die", {})


@needs("mcp")
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


@needs("mcp")
@pytest.mark.slow
async def test_a_shared_server_over_http() -> None:
    port = free_port()

    def up() -> bool:
        with socket.socket() as trying:
            return trying.connect_ex(("127.0.0.1", port)) == 0

    with subprocess.Popen([*COMMAND, str(port)], stderr=subprocess.DEVNULL) as server:  # noqa: ASYNC220
        try:
            async with asyncio.timeout(60):
                await until(up)
            options = {"command": (), "url": f"http://127.0.0.1:{port}/mcp", "shared": True}
            async with episode(**options) as first, episode(**options) as second:
                await first.start("?")
                await second.start("?")
                assert await first.call("add", {"number": 5}) == "5"
                assert await second.call("add", {"number": 6}) == "11"
        finally:
            server.kill()


@needs("mcp")
def test_options_that_name_no_server_are_refused() -> None:
    for options in ({}, {"command": ["x"], "url": "http://x"}):
        with pytest.raises(ValueError, match="either a command or a url"):
            Mcp(**options)  # type: ignore[arg-type]


CORPUS = [
    {"id": "0", "contents": '"Alpha"\nThe first letter of the Greek alphabet.'},
    {"title": "Beta", "text": "The second letter, behind alpha."},
    {"text": "A river. " + "It is long. " * 400},
]


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(map(json.dumps, CORPUS)) + "\n\n")
    return str(path)


@needs("bm25s")
async def test_an_episode_over_a_file(corpus: str) -> None:
    played = Episode(Search(corpus=corpus, topk=2, document_chars=60))
    start = await played.start("Which letter comes after alpha?")
    assert [tool["function"]["name"] for tool in start.tools] == ["search"]  # type: ignore[index]
    assert await played.call("search", {"query": "Alpha alphabet"}) == (
        "1. Alpha: The first letter of the Greek alphabet.\n2. Beta: The second letter, behind alpha.\n"
    )
    cut = await played.call("search", "river")
    assert cut.startswith("1. A river. It is long.")
    assert "characters left out" in cut
    assert len(cut) < 120
    assert await played.call("search", {"query": "zzz"}) == "nothing was found\n"
    assert await played.call("search", {"q": "alpha"}) == "error: search needs the text argument 'query'"
    refused = await played.call("search", "alpha")
    assert refused == "error: all 4 calls are used up; give the answer"
    end = await played.say("Beta")
    counted = {"tool_calls": 5.0, "tool_errors": 2.0, "cached_calls": 0.0}
    assert (end.done, end.reward, end.metrics) == (True, None, counted)


@needs("bm25s")
@pytest.mark.parametrize(
    "query", ["\ud800", "?!", "a " * 1_000_000, "\x00", "x" * 1_000_000, "AND OR NOT (*"], ids=range(6)
)
async def test_hostile_queries_find_something_or_nothing(query: str) -> None:
    played = Episode(Search())
    await played.start("?")
    assert "error" not in await played.call("search", {"query": query})


@needs("bm25s")
async def test_every_fact_of_the_towns_is_found_by_its_words() -> None:
    played = Episode(Search(topk=1, max_calls=100))
    await played.start("?")
    for split in ("train", "heldout"):
        for task in islice(Search.tasks(split, 3), 40):
            (start, end), text = task["tool_spans"][0], task["demonstration"]
            assert await played.call("search", task["input"].rstrip("=")) == text[start:end]
            assert text.endswith(f"\n{task['label']}\n")


def test_the_towns_are_of_the_tiny_models_characters_and_the_splits_share_none() -> None:
    facts = town_facts()
    assert len({fact[:2] for fact in facts}) == len(facts) == 3200
    assert {c for town, what, number in facts for c in f"{town} {what} {number}"} <= set(ARITHMETIC_CHARACTERS)
    requested = [{fact[0] for fact in islice(town_questions(split, 0), 5000)} for split in ("train", "heldout")]
    assert not requested[0] & requested[1]
    assert (len(requested[0]), len(requested[1])) == (320, 80)
    assert town_names()[:3] == ("roten", "sotonest", "doranon")  # the same on every machine


@asynccontextmanager
async def serving(handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/retrieve", handler)
    async with served_app(app) as url:
        yield f"{url}/retrieve"


async def test_a_server_of_search_r1s_form_is_queried() -> None:
    requested = []

    async def retrieve(request: web.Request) -> web.StreamResponse:
        requested.append(await request.json())
        found = [{"document": entry, "score": 1.5} for entry in CORPUS[:2]]
        return web.json_response({"result": [[*found, CORPUS[2]]]})

    async with serving(retrieve) as url:
        played = Episode(Search(url=url, topk=2))
        await played.start("?")
        answer = await played.call("search", {"query": "letters"})
    assert requested == [{"queries": ["letters"], "topk": 2, "return_scores": True}]
    assert answer == "1. Alpha: The first letter of the Greek alphabet.\n2. Beta: The second letter, behind alpha.\n"


DOCUMENT = b'{"result": [[{"document": {"contents": 3}}]]}'
BODIES = (b"no", b"{}", b'{"result": 3}', b'{"result": []}', DOCUMENT, b"[" * 100_000, b"x" * (9 << 20))


async def test_a_server_that_is_out_of_order_is_not_the_models_fault() -> None:
    answers = [*((body, 200) for body in BODIES), *((b"{}", status) for status in (500, 404, 302))]

    async def broken(request: web.Request) -> web.StreamResponse:
        headers = {"Location": "/elsewhere"} if status == 302 else None
        return web.Response(body=body, status=status, headers=headers)

    async with serving(broken) as url:
        played = Episode(Search(url=url, max_calls=100))
        await played.start("?")
        for body, status in answers:  # noqa: B007 - for the handler
            with pytest.raises(InfrastructureError, match="retrieval server"):
                await played.call("search", "x")
    with pytest.raises(InfrastructureError, match="does not answer"):  # and now it is gone
        await played.call("search", "x")


@needs("bm25s")
def test_options_that_make_no_search_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no such file"):
        Search(corpus=str(tmp_path / "none.jsonl"))
    with pytest.raises(ValueError, match="url is 'localhost:80'"):
        Search(url="localhost:80")
    with pytest.raises(ValueError, match="topk is 0"):
        Search(topk=0)
