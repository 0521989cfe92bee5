"""Answers of deterministic tools: kept by what decides them, within a bound, and of no other tool."""

from __future__ import annotations

import asyncio

import pytest

from stages.agents.environment import Task, Turn
from stages.agents.tool_episode import AnswerCache, ToolEpisode
from stages.chat.messages import Message, ToolCall
from stages.tools.tool import Arguments, FunctionTool, Tool, ToolCallError, function_schema


class Asked:
    """Tools that count how often they are asked."""

    def __init__(self) -> None:
        self.times = 0

    def tool(self, version: str | None = None) -> Tool:
        async def look(title: str, page: int = 1) -> str:
            self.times += 1
            if title == "lost":
                raise ToolCallError("it is lost")
            return f"{title} {page}"

        return FunctionTool(look, "here:look", version)


async def test_what_is_asked_again_is_answered_from_the_cache() -> None:
    asked, cache = Asked(), AnswerCache()
    tool = asked.tool("1")
    assert await cache.call(tool, {"title": "a", "page": 2}) == ("a 2", False)
    assert await cache.call(tool, {"page": 2, "title": "a"}) == ("a 2", True)
    assert await cache.call(asked.tool("1"), {"page": 2, "title": "a"}) == ("a 2", True), "another episode's"
    assert asked.times == 1
    assert await cache.call(tool, {"title": "a", "page": 3}) == ("a 3", False)
    assert await cache.call(asked.tool("2"), {"title": "a", "page": 2}) == ("a 2", False), "another version"
    assert asked.times == 3


async def test_what_declares_nothing_or_fails_is_asked_each_time() -> None:
    asked, cache = Asked(), AnswerCache()
    for _ in range(2):
        assert await cache.call(asked.tool(), {"title": "a"}) == ("a 1", False)
        with pytest.raises(ToolCallError, match="it is lost"):
            await cache.call(asked.tool("1"), {"title": "lost"})
    assert asked.times == 4


class Slow:
    """A tool whose answers come when they are let through; a `None` is a failure."""

    def __init__(self) -> None:
        self.name, self.version = "slow", "1"
        self.schema = function_schema("slow", "", {}, [])
        self.asked: list[asyncio.Future[str | None]] = []

    async def call(self, arguments: Arguments) -> str:
        self.asked.append(asyncio.get_running_loop().create_future())
        if (answer := await self.asked[-1]) is None:
            raise ToolCallError("it is lost")
        return answer


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_what_is_asked_by_many_at_once_is_asked_of_the_tool_once() -> None:
    slow, cache = Slow(), AnswerCache()
    async with asyncio.TaskGroup() as tasks:
        same = [tasks.create_task(cache.call(slow, {"q": 1})) for _ in range(4)]
        other = tasks.create_task(cache.call(slow, {"q": 2}))
        await settle()
        assert len(slow.asked) == 2, "one for each question"
        slow.asked[1].set_result("two")
        assert await other == ("two", False), "does not wait for another question"
        slow.asked[0].set_result("one")
    assert [task.result() for task in same] == [("one", False), *[("one", True)] * 3]
    assert not cache._under_way


async def test_who_waits_asks_for_itself_if_the_first_failed_or_left() -> None:
    slow, cache = Slow(), AnswerCache()
    failing, leaving, third, fourth = (asyncio.create_task(cache.call(slow, {"q": 1})) for _ in range(4))
    await settle()
    slow.asked[0].set_result(None)
    with pytest.raises(ToolCallError, match="it is lost"):
        await failing
    await settle()
    leaving.cancel()
    await settle()
    assert len(slow.asked) == 3
    slow.asked[2].set_result("here")
    assert [await third, await fourth] == [("here", False), ("here", True)]


async def test_the_cache_is_bounded_and_forgets_what_was_asked_for_longest_ago() -> None:
    asked, cache = Asked(), AnswerCache(most_chars=3 * len('look1{"title": "a"}a 1'))
    tool = asked.tool("1")
    for title in "abcabd":
        await cache.call(tool, {"title": title})
    kept = {title: (await cache.call(tool, {"title": title}))[1] for title in "abd"}
    assert kept == {"a": True, "b": True, "d": True}
    assert not (await cache.call(tool, {"title": "c"}))[1]
    assert await cache.call(tool, {"title": "x" * 1000}) == ("x" * 1000 + " 1", False)
    assert cache._chars == 0, "longer than all: nothing is left"


async def test_episodes_of_tools_share_answers_and_report_them() -> None:
    asked = Asked()

    class Library(ToolEpisode):
        async def open_tools(self, task: Task) -> list[Tool]:
            return [asked.tool("test_episodes_of_tools")]

    call = Message("assistant", tool_calls=(ToolCall("look", {"title": "a"}, id="1"),))
    for cached in (0.0, 1.0):
        library = Library()
        await library.reset(Task())
        (answer,) = (await library.step(Turn(0, call, ""))).messages
        assert (answer.content, answer.tool_call_id) == ("a 1", "1")
        end = await library.step(Turn(1, Message("assistant", "a"), "a"))
        assert end.metrics == {"tool_calls": 1.0, "tool_errors": 0.0, "cached_calls": cached}
    assert asked.times == 1
