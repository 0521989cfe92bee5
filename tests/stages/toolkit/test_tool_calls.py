"""Calls of tools in plain text, schemas of tools, and the cache of their answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema.data import ToolsConfig
from stages.agents.environment import Task, Turn
from stages.agents.stage import PlainTools
from stages.agents.tool_episode import AnswerCache, ToolEpisode
from stages.chat.marked_calls import Marked
from stages.chat.messages import Message, ToolCall
from stages.chat.tool_calls import Offered
from stages.tools.registry import close_tools, resolve_tools
from stages.tools.tool import Arguments, FunctionTool, Tool, ToolCallError, UnknownToolError, function_schema

PATH = "tests.stages.toolkit.sample_tools"
CONFIG = ToolsConfig()
OPEN, CLOSE = CONFIG.tool_call_open, CONFIG.tool_call_close


def call_text(content: str) -> str:
    return f"Let me see.\n{OPEN}{content}{CLOSE}"


def parse(content: str, *names: str) -> ToolCall | str:
    offered = Offered([{"function": {"name": name}} for name in names])
    return Marked(OPEN, CLOSE).last(call_text(content), offered)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (f"a {OPEN} x {CLOSE}", "x"),
        (f"a {OPEN}x{CLOSE}\n \n", "x"),
        (f"{OPEN}x{CLOSE} and {OPEN}y{CLOSE}", "y"),
        (f"{OPEN}cut off {OPEN}y{CLOSE}", "y"),
        (f"{OPEN}{CLOSE}", ""),
        (f"{OPEN}x{CLOSE} done", None),
        (f"{OPEN}x", None),
        (f"x{CLOSE}", None),
        (CLOSE + OPEN, None),
        ("", None),
    ],
)
def test_only_a_call_at_the_end_counts(text: str, content: str | None) -> None:
    assert Marked(OPEN, CLOSE).find_last(text) == content


@pytest.mark.parametrize(
    ("content", "call"),
    [
        ('{"name": "echo", "arguments": {"text": "hi"}}', ToolCall("echo", {"text": "hi"})),
        ('\n{"name": "echo", "arguments": "{\\"text\\": \\"hi\\"}"}\n', ToolCall("echo", {"text": "hi"})),
        ('{"name": "echo", "arguments": "1+1"}', ToolCall("echo", "1+1")),
        ('{"name": "echo"}', ToolCall("echo", {})),
    ],
)
def test_calls_by_name(content: str, call: ToolCall) -> None:
    assert parse(content, "echo", "calculator") == call
    assert parse(content, "echo") == call


@pytest.mark.parametrize(
    ("content", "arguments"),
    [
        ("1 + 1", "1 + 1"),
        ('"1 + 1"', "1 + 1"),
        ("42", "42"),
        ('{"expression": "1 + 1"}', {"expression": "1 + 1"}),
        ('{"name": "x", "expression": "1"}', {"name": "x", "expression": "1"}),
        ('"unclosed', '"unclosed'),
    ],
)
def test_the_only_tool_may_be_called_barely(content: str, arguments: object) -> None:
    assert parse(content, "calculator") == ToolCall("calculator", arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("1 + 1", "is a JSON object .* tools: calculator, echo"),
        ("", "is empty"),
        ("{", "not valid JSON"),
        ('{"name": "ecko", "arguments": {}}', "no tool 'ecko'; did you mean 'echo'\\? Tools: calculator, echo"),
        ('{"arguments": {}}', "is a JSON object"),
        ('{"name": 3, "arguments": {}}', "is a JSON object"),
        ('{"name": "echo", "arguments": [1]}', "arguments of a tool call must be a JSON object"),
        ("{" + " " * 40_000 + "}", "longer than 32768"),
        ('{"a":' * 10_000, "not valid JSON|longer"),
    ],
)
def test_what_the_model_is_told_of_a_bad_call(content: str, words: str) -> None:
    found = parse(content, "calculator", "echo")
    assert isinstance(found, str)
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(found)


@settings(deadline=None)
@given(
    content=st.text()
    | st.recursive(st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)).map(json.dumps)
)
def test_any_content_is_a_call_or_a_sentence(content: str) -> None:
    for names in (("calculator",), ("calculator", "echo")):
        found = parse(content, *names)
        assert isinstance(found, str) or found.name in names


async def answer_call(tools: dict[str, Tool], text: str, deadline_s: float) -> str:
    """Carry out the call that ends the text."""
    return await PlainTools(tools, ToolsConfig(tool_deadline_s=deadline_s)).answer(text)


async def answer(content: str, *tools: str, deadline_s: float = 60.0) -> str:
    async with opened(*tools) as found:
        return await answer_call(found, call_text(content), deadline_s)


@asynccontextmanager
async def opened(*names: str) -> AsyncIterator[dict[str, Tool]]:
    tools = resolve_tools(names)
    try:
        yield tools
    finally:
        await close_tools(tools)


async def test_answers() -> None:
    assert await answer("2 * 21", "calculator") == "42"
    assert await answer('{"name": "calculator", "arguments": {"expression": "1/4"}}', "calculator") == "0.25"
    assert await answer('{"name": "echo", "arguments": {"text": "hi"}}', "calculator", f"{PATH}:echo") == "hi"
    assert await answer("backwards", f"{PATH}:Reverse") == "sdrawkcab"
    weather = await answer('{"name": "lookup", "arguments": {"city": "Oslo", "days": 2}}', f"{PATH}:lookup")
    assert json.loads(weather) == {"city": "Oslo", "days": 2, "unit": "C"}


@pytest.mark.parametrize(
    ("content", "tool", "words"),
    [
        ("9**9**9", "calculator", "error: the power is too large"),
        ("x", f"{PATH}:explode", "error: RuntimeError: the tool is broken"),
        ("x", f"{PATH}:hang", "error: no answer within 0.05 s"),
        ('{"name": "lookup", "arguments": {"town": "Oslo"}}', f"{PATH}:lookup", "error: wrong arguments for lookup"),
        ("Oslo", f"{PATH}:lookup", "error: lookup takes a JSON object with city, days, unit, note"),
        ("{", "calculator", "error: the tool call is not valid JSON"),
    ],
)
async def test_errors_are_answers(content: str, tool: str, words: str) -> None:
    assert (await answer(content, tool, deadline_s=0.05 if "within" in words else 60.0)).startswith(words)


async def test_no_call_is_an_answer_too() -> None:
    tools = resolve_tools(["calculator"])
    assert (await answer_call(tools, "no call here", 1.0)).startswith("error: no tool call")


def test_schemas_for_chat_templates() -> None:
    tools = resolve_tools(["calculator", f"{PATH}:lookup"])
    assert list(tools) == ["calculator", "lookup"]
    schemas = json.loads(json.dumps([tool.schema for tool in tools.values()]))
    assert schemas[0]["function"]["name"] == "calculator"
    assert schemas[0]["function"]["parameters"]["required"] == ["expression"]
    assert schemas[1]["function"] == {
        "name": "lookup",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "unit": {"enum": ["C", "F"]},
                "note": {"type": "string"},
            },
            "required": ["city"],
        },
    }


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("calculater", "'calculater' is no tool; did you mean 'calculator'\\? Known: calculator"),
        ("", "'' is no tool"),
        ("no.such:tool", "importing 'no.such' failed"),
        (f"{PATH}:missing", "has no 'missing'; check the name after the colon"),
        (f"{PATH}:plain", "make it 'async def'"),
        (f"{PATH}:variadic", "parameter 'texts' cannot be given by name"),
        (f"{PATH}:NoSchema", "is no tool; it must be an async function, or have"),
        ("asyncio:TaskGroup", "is no tool"),
        ("pathlib:Path", "is no tool"),
    ],
)
def test_tools_that_are_refused(name: str, words: str) -> None:
    with pytest.raises(UnknownToolError, match=words):
        resolve_tools([name])


def test_two_tools_of_one_name() -> None:
    with pytest.raises(UnknownToolError, match="two of them are called 'calculator'"):
        resolve_tools(["calculator", "calculator"])


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
