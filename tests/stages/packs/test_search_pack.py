"""The search pack: an index by bm25s, a server of Search-R1's form, and episodes with either."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path

import pytest
from aiohttp import web
from episodes import Episode

from models.tiny import ARITHMETIC_CHARACTERS
from stages.agents.environment import InfrastructureError
from stages.agents.packs.search import Search, town_facts, town_names, town_questions
from tests.served_app import served_app


def need_bm25s() -> None:
    pytest.importorskip("bm25s", reason="bm25s is not installed: pip install bm25s")


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


async def test_an_episode_over_a_file(corpus: str) -> None:
    need_bm25s()
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
    assert (end.done, end.reward, end.metrics) == (
        True,
        None,
        {"tool_calls": 5.0, "tool_errors": 2.0, "cached_calls": 0.0},
    )


@pytest.mark.parametrize(
    "query", ["\ud800", "?!", "a " * 1_000_000, "\x00", "x" * 1_000_000, "AND OR NOT (*"], ids=range(6)
)
async def test_hostile_queries_find_something_or_nothing(query: str) -> None:
    need_bm25s()
    played = Episode(Search())
    await played.start("?")
    assert "error" not in await played.call("search", {"query": query})


async def test_every_fact_of_the_towns_is_found_by_its_words() -> None:
    need_bm25s()
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
    asked = [{fact[0] for fact in islice(town_questions(split, 0), 5000)} for split in ("train", "heldout")]
    assert not asked[0] & asked[1]
    assert (len(asked[0]), len(asked[1])) == (320, 80)
    assert town_names()[:3] == ("roten", "sotonest", "doranon")  # the same on every machine


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/retrieve", handler)
    async with served_app(app) as url:
        yield f"{url}/retrieve"


async def test_a_server_of_search_r1s_form_is_asked() -> None:
    asked = []

    async def retrieve(request: web.Request) -> web.StreamResponse:
        asked.append(await request.json())
        found = [{"document": entry, "score": 1.5} for entry in CORPUS[:2]]
        return web.json_response({"result": [[*found, CORPUS[2]]]})

    async with serving(retrieve) as url:
        played = Episode(Search(url=url, topk=2))
        await played.start("?")
        answer = await played.call("search", {"query": "letters"})
    assert asked == [{"queries": ["letters"], "topk": 2, "return_scores": True}]
    assert answer == "1. Alpha: The first letter of the Greek alphabet.\n2. Beta: The second letter, behind alpha.\n"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"no", 200),
        (b"{}", 200),
        (b'{"result": 3}', 200),
        (b'{"result": []}', 200),
        (b'{"result": [[{"document": {"contents": 3}}]]}', 200),
        (b"[" * 100_000, 200),
        (b"x" * (9 << 20), 200),
        (b"{}", 500),
        (b"{}", 404),
        (b"{}", 302),
    ],
    ids=["text", "empty", "number", "none", "type", "nested", "huge", "500", "404", "302"],
)
async def test_a_server_that_is_out_of_order_is_not_the_models_fault(body: bytes, status: int) -> None:
    async def broken(request: web.Request) -> web.StreamResponse:
        return web.Response(body=body, status=status, headers={"Location": "/elsewhere"} if status == 302 else None)

    async with serving(broken) as url:
        played = Episode(Search(url=url))
        await played.start("?")
        with pytest.raises(InfrastructureError, match="retrieval server"):
            await played.call("search", "x")
    with pytest.raises(InfrastructureError, match="does not answer"):  # and now it is gone
        await played.call("search", "x")


def test_options_that_make_no_search_are_refused(tmp_path: Path) -> None:
    need_bm25s()
    with pytest.raises(ValueError, match="there is no such file"):
        Search(corpus=str(tmp_path / "none.jsonl"))
    with pytest.raises(ValueError, match="url is 'localhost:80'"):
        Search(url="localhost:80")
    with pytest.raises(ValueError, match="topk is 0"):
        Search(topk=0)
