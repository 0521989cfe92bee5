"""Calls of tools in plain text, schemas of tools, and the cache of their answers."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import Config
from configs.schema.data import ToolsConfig
from configs.schema.rollout import EngineConfig
from models.tiny import TinyRecipe, make_tiny_checkpoint
from stages.agents.environment import Task, Turn
from stages.agents.stage import AgentsStage, PlainTools
from stages.agents.tool_episode import AnswerCache, ToolEpisode
from stages.chat.messages import Message, ToolCall
from stages.chat.tokenizer import load_tokenizer
from stages.chat.tool_calls import Marked, Offered
from stages.messages import RolloutSlice, Sample, VersionRun
from stages.rollouts import new_sample
from stages.sampling.requests import SampleResult
from stages.sampling.rollout_requests import append_result
from stages.tools.registry import close_tools, resolve_tools
from stages.tools.tool import Arguments, FunctionTool, Tool, ToolCallError, UnknownToolError, function_schema
from tests.stages.engine_rig import AGENTS, Log, generating, tensors_of
from tests.stages.stage_rig import (
    idle,
    make_config,
    make_context,
    make_group,
    make_sample,
    make_slice,
    numbers,
    open_rig,
    response_ids,
    running,
    take,
)

PATH = "tests.stages.toolkit.sample_tools"
CONFIG = ToolsConfig()
OPEN, CLOSE = CONFIG.tool_call_open, CONFIG.tool_call_close


def call_text(content: str) -> str:
    return f"Let me see.\n{OPEN}{content}{CLOSE}"


def parse(content: str, *names: str) -> ToolCall | str:
    offered = Offered([{"function": {"name": name}} for name in names])
    return Marked(OPEN, CLOSE).last(call_text(content), offered)


@pytest.mark.parametrize(("text", "content"), [
    (f"a {OPEN} x {CLOSE}", "x"), (f"a {OPEN}x{CLOSE}\n \n", "x"), (f"{OPEN}x{CLOSE} and {OPEN}y{CLOSE}", "y"),
    (f"{OPEN}cut off {OPEN}y{CLOSE}", "y"), (f"{OPEN}{CLOSE}", ""), (f"{OPEN}x{CLOSE} done", None), (f"{OPEN}x", None),
    (f"x{CLOSE}", None), (CLOSE + OPEN, None), ("", None),
])  # fmt: skip
def test_only_a_call_at_the_end_counts(text: str, content: str | None) -> None:
    assert Marked(OPEN, CLOSE).find_last(text) == content


@pytest.mark.parametrize(("content", "call"), [
    ('{"name": "echo", "arguments": {"text": "hi"}}', ToolCall("echo", {"text": "hi"})),
    ('\n{"name": "echo", "arguments": "{\\"text\\": \\"hi\\"}"}\n', ToolCall("echo", {"text": "hi"})),
    ('{"name": "echo", "arguments": "1+1"}', ToolCall("echo", "1+1")),
    ('{"name": "echo"}', ToolCall("echo", {})),
])  # fmt: skip
def test_calls_by_name(content: str, call: ToolCall) -> None:
    assert parse(content, "echo", "calculator") == call
    assert parse(content, "echo") == call


@pytest.mark.parametrize(("content", "arguments"), [
    ("1 + 1", "1 + 1"), ('"1 + 1"', "1 + 1"), ("42", "42"), ('{"expression": "1 + 1"}', {"expression": "1 + 1"}),
    ('{"name": "x", "expression": "1"}', {"name": "x", "expression": "1"}), ('"unclosed', '"unclosed'),
])  # fmt: skip
def test_the_only_tool_may_be_called_barely(content: str, arguments: object) -> None:
    assert parse(content, "calculator") == ToolCall("calculator", arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(("content", "words"), [
    ("1 + 1", "is a JSON object .* tools: calculator, echo"),
    ("", "is empty"),
    ("{", "not valid JSON"),
    ('{"name": "ecko", "arguments": {}}', "no tool 'ecko'; did you mean 'echo'\\? Tools: calculator, echo"),
    ('{"arguments": {}}', "is a JSON object"),
    ('{"name": 3, "arguments": {}}', "is a JSON object"),
    ('{"name": "echo", "arguments": [1]}', "arguments of a tool call must be a JSON object"),
    ("{" + " " * 40_000 + "}", "longer than 32768"),
    ('{"a":' * 10_000, "not valid JSON|longer"),
])  # fmt: skip
def test_what_the_model_reads_about_a_bad_call(content: str, words: str) -> None:
    found = parse(content, "calculator", "echo")
    assert isinstance(found, str)
    assert re.search(words, found)


VALUES = st.recursive(st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x))


@settings(deadline=None)
@given(content=st.text() | VALUES.map(json.dumps))
def test_any_content_is_a_call_or_a_sentence(content: str) -> None:
    for names in (("calculator",), ("calculator", "echo")):
        found = parse(content, *names)
        assert isinstance(found, str) or found.name in names


async def answer(content: str, *names: str) -> str:
    """What the call that ends a text is answered."""
    async with opened(*names) as tools:
        return await PlainTools(tools, ToolsConfig()).answer(call_text(content))


@asynccontextmanager
async def opened(*names: str, **limits: float) -> AsyncIterator[dict[str, Tool]]:
    tools = resolve_tools(names, **limits)
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


def test_schemas_for_chat_templates() -> None:
    tools = resolve_tools(["calculator", f"{PATH}:lookup"])
    assert list(tools) == ["calculator", "lookup"]
    calculator, lookup = json.loads(json.dumps([tool.schema["function"] for tool in tools.values()]))
    assert (calculator["name"], calculator["parameters"]["required"]) == ("calculator", ["expression"])
    text = {"type": "string"}
    properties = {"city": text, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]}, "note": text}
    parameters = {"type": "object", "properties": properties, "required": ["city"]}
    assert lookup == {"name": "lookup", "description": "Weather of a city.", "parameters": parameters}


@pytest.mark.parametrize(("name", "words"), [
    ("calculater", "'calculater' is no tool; did you mean 'calculator'\\? Known: calculator"),
    ("", "'' is no tool"),
    ("no.such:tool", "importing 'no.such' failed"),
    (f"{PATH}:missing", "has no 'missing'; check the name after the colon"),
    (f"{PATH}:plain", "make it 'async def'"),
    (f"{PATH}:variadic", "parameter 'texts' cannot be given by name"),
    (f"{PATH}:NoSchema", "is no tool; it must be an async function, or have"),
    ("asyncio:TaskGroup", "is no tool"),
    ("pathlib:Path", "is no tool"),
    ("calculator + calculator", "two of them are called 'calculator'"),
])  # fmt: skip
def test_tools_that_are_refused(name: str, words: str) -> None:
    with pytest.raises(UnknownToolError, match=words):
        resolve_tools(name.split(" + "))


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


async def test_what_declares_nothing_or_fails_is_called_each_time() -> None:
    requested, cache = Asked(), AnswerCache()
    for _ in range(2):
        assert await cache.call(requested.tool(), {"title": "a"}) == ("a 1", False)
        with pytest.raises(ToolCallError, match="it is lost"):
            await cache.call(requested.tool("1"), {"title": "lost"})
    assert requested.times == 4


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


async def test_calls_of_many_at_once_reach_the_tool_once() -> None:
    slow, cache = Slow(), AnswerCache()
    async with asyncio.TaskGroup() as tasks:
        same = [tasks.create_task(cache.call(slow, {"q": 1})) for _ in range(4)]
        other = tasks.create_task(cache.call(slow, {"q": 2}))
        await idle()
        assert len(slow.asked) == 2, "one for each question"
        slow.asked[1].set_result("two")
        assert await other == ("two", False), "does not wait for another question"
        slow.asked[0].set_result("one")
    assert [task.result() for task in same] == [("one", False), *[("one", True)] * 3]
    assert not cache._under_way


async def test_who_waits_asks_for_itself_if_the_first_failed_or_left() -> None:
    slow, cache = Slow(), AnswerCache()
    failing, leaving, third, fourth = (asyncio.create_task(cache.call(slow, {"q": 1})) for _ in range(4))
    await idle()
    slow.asked[0].set_result(None)
    with pytest.raises(ToolCallError, match="it is lost"):
        await failing
    await idle()
    leaving.cancel()
    await idle()
    assert len(slow.asked) == 3
    slow.asked[2].set_result("here")
    assert [await third, await fourth] == [("here", False), ("here", True)]


async def test_the_cache_is_bounded_and_forgets_what_was_requested_longest_ago() -> None:
    requested, cache = Asked(), AnswerCache(most_chars=3 * len('look1{"title": "a"}a 1'))
    tool = requested.tool("1")
    for title in "abcabd":
        await cache.call(tool, {"title": title})
    kept = {title: (await cache.call(tool, {"title": title}))[1] for title in "abd"}
    assert kept == {"a": True, "b": True, "d": True}
    assert not (await cache.call(tool, {"title": "c"}))[1]
    assert await cache.call(tool, {"title": "x" * 1000}) == ("x" * 1000 + " 1", False)
    assert cache._chars == 0, "longer than all: nothing is left"


async def test_episodes_of_tools_share_answers_and_report_them() -> None:
    requested = Asked()

    class Library(ToolEpisode):
        async def open_tools(self, task: Task) -> list[Tool]:
            return [requested.tool("test_episodes_of_tools")]

    call = Message("assistant", tool_calls=(ToolCall("look", {"title": "a"}, id="1"),))
    for cached in (0.0, 1.0):
        library = Library()
        await library.reset(Task())
        (answer,) = (await library.step(Turn(0, call, ""))).messages
        assert (answer.content, answer.tool_call_id) == ("a 1", "1")
        end = await library.step(Turn(1, Message("assistant", "a"), "a"))
        assert end.metrics == {"tool_calls": 1.0, "tool_errors": 0.0, "cached_calls": cached}
    assert requested.times == 1


# The tool stage and its loop through generate: a tool's tokens are not trained, the engine's not tokenised again.


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tools") / "tiny"
    return make_tiny_checkpoint(path, TinyRecipe(hidden_size=32, num_layers=1, intermediate_size=64))


def stage_of(tiny: Path, *names: str, **tools: object) -> AgentsStage:
    config = make_config(tools={"tools": names, **tools}, train={"hf_checkpoint": str(tiny)})
    return AgentsStage(make_context(config))


@asynccontextmanager
async def answering(tiny: Path, *names: str, **tools: object) -> AsyncIterator[tuple[AgentsStage, Any]]:
    """The stage, and a function that sends it a rollout, or one with this response."""
    stage = stage_of(tiny, *names, **tools)
    async with open_rig() as rig:
        ports = await rig.join({"in": ("agents", RolloutSlice)}, {"out": ("generate.return", RolloutSlice)})
        feed, out = await rig.outlet("agents"), await rig.inlet("generate.return")
        sent = itertools.count(1)

        async def answer(sample: Sample | str) -> Any:
            number = next(sent)
            if isinstance(sample, str):
                sample = make_sample(2, runs=[(3, 2), (4, 2)], response=sample)
            await feed.send(make_slice(number, sample, n_samples=4), str(number))
            (found,) = (await take(out)).samples
            return found

        async with running(stage, ports):
            yield stage, answer


def call(name: str, arguments: str) -> str:
    return f'thinking <tool_call>{{"name":"{name}","arguments":{arguments}}}</tool_call>'


SCRIPT = (  # what the model writes, and what `--tools calculator` puts behind it
    ('6*7 is <tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>', "42"),
    ("</tool_call>", "error: the tool call is not valid JSON"),  # it begins in an earlier turn
    ("<tool_call>1/0</tool_call>\n", "error: division by zero"),
    ("<tool_call>0.1 + 0.2<tool_call>1 / 3 * 3</tool_call>", "1"),
    ("<tool_call>{'expression': 1}</tool_call>", "error: the tool call is not valid JSON"),
    (call("search", "{}"), "error: there is no tool 'search'. Tools: calculator"),
    ("<tool_call></tool_call>", "error: the tool call is empty"),
    ("<think>a</think><tool_call>2**10</tool_call>", "1024"),
)


async def test_the_markup_of_scripted_turns_to_the_token(tiny: Path) -> None:
    """Every token, mask, log-prob and version of a rollout of many calls: the texts one behind the other."""
    tokenizer = load_tokenizer(str(tiny))
    prompt = [20, 21, 22]
    sample, ids, mask, runs, text = new_sample(prompt, 1), list(prompt), [0] * 3, (VersionRun(-1, 3),), ""
    async with answering(tiny, "calculator", tool_result_template="\n<r>{result}</r>\n") as (stage, ask):
        for version, (said, result) in enumerate(SCRIPT):
            made, put = tokenizer.encode(said), tokenizer.encode(f"\n<r>{result}</r>\n")
            turn = SampleResult("stop", tuple(made), (-0.5,) * len(made), (VersionRun(version, len(made)),), said)
            sample = append_result(sample, turn)
            sample = await ask(msgspec.structs.replace(sample, turns=version + 1))
            ids, mask = ids + made + put, mask + [1] * len(made) + [0] * len(put)
            runs, text = (*runs, *turn.runs, VersionRun(-1, len(put))), text + said + f"\n<r>{result}</r>\n"
            assert (sample.response, sample.answer_start) == (text, len(text))
            assert (numbers(sample.token_ids), numbers(sample.loss_mask), sample.version_runs) == (ids, mask, runs)
            assert np.asarray(sample.log_probs).tolist() == [-0.5 * value for value in mask]
            assert (sample.status, sample.done, sample.index, sample.turns) == ("completed", False, 1, version + 1)
            assert sample.fault() is None
    assert stage.activity.failures == sum(result.startswith("error") for _, result in SCRIPT)


@pytest.mark.slow
async def test_whatever_goes_wrong_is_an_answer_for_the_model(tiny: Path) -> None:
    names = ("calculator", *(f"{PATH}:{name}" for name in ("echo", "explode", "hang", "lookup")))
    async with answering(tiny, *names, tool_deadline_s=1.5) as (stage, answer):
        for response, words in (
            (call("explode", '{"text":"x"}'), "error: RuntimeError: the tool is broken"),
            (call("hang", '{"text":"x"}'), "error: no answer within 1.5 s"),
            (call("echo", '{"texts":"x"}'), "error: wrong arguments for echo"),
            ("no opening</tool_call>", "error: no tool call: the text must end in <tool_call> ... </tool_call>"),
            (call("lookup", '"Oslo"'), "error: lookup takes a JSON object with city, days, unit, note"),
        ):
            failures = stage.activity.failures
            sample = await answer(response)
            assert sample.response.startswith(f"{response}<tool_response>{words}")
            assert sample.status == "completed", "the sample goes on"
            assert sample.fault() is None
            assert stage.activity.failures == failures + 1
            again = await answer(call("echo", '{"text":"still here"}'))
            assert again.response.endswith("<tool_response>still here</tool_response>")


async def test_a_result_with_braces_goes_through_the_template_as_it_is(tiny: Path) -> None:
    async with answering(tiny, f"{PATH}:echo", tool_result_template="[{result}]{x}") as (_, answer):
        sample = await answer(call("echo", '{"text":"{result} {0}"}'))
        assert sample.response.endswith("[{result} {0}]{x}")


@pytest.mark.parametrize(("sample", "wanted"), [
    (make_sample(0, response="<tool_call>x</tool_call>\n"), True),
    (make_sample(0, response="<tool_call>x</tool_call> and more"), False),
    (make_sample(0, response="<tool_call>x</tool_call>", status="truncated"), False),
    (make_sample(0, response="<tool_call>x</tool_call>", status="failed"), False),
])  # fmt: skip
def test_a_completed_sample_that_ends_in_a_call_is_wanted(sample: Sample, wanted: bool) -> None:
    config = make_config(tools={"tools": ["calculator"]})
    assert AgentsStage.wants(config, {}, make_slice(0, sample)) is wanted
    assert not AgentsStage.wants(Config(), {}, make_slice(0, sample)), "no tools are configured"


async def test_an_unknown_tool_is_refused_before_the_stage_runs(tiny: Path) -> None:
    with pytest.raises(UnknownToolError):
        await stage_of(tiny, "calculatr").setup()


EMBEDDED = EngineConfig(engine="embedded", engine_slots=32, engine_device="cpu", engine_dtype="float32")
LETTER_CLOSE = "e"  # a random model says it often enough


async def test_trained_ids_are_the_engines_own_over_several_turns(tiny: Path, tmp_path: Path, log: Log) -> None:
    """Random bytes are mostly no valid UTF-8, so text would not tokenise back to what was sampled."""
    markup = {"tool_call_open": "(", "tool_call_close": LETTER_CLOSE, "tool_result_template": "{{{result}}}"}
    sections: dict[str, Any] = {"tools": {"tools": ("calculator",), **markup}}
    sections["rollout"] = {"rollout_max_response_len": 160, "max_turns": 3}
    prompt = [40, 49, 43]
    engine = {"engine": EMBEDDED, "model": tiny, "tensors": tensors_of([tiny])}
    async with generating(tmp_path, **engine, **AGENTS, **sections) as world:
        await world.run_agents(make_config(**sections, train={"hf_checkpoint": str(tiny)}))
        await world.ready()
        await world.ask(make_group(0, 16, prompt=prompt, seed=11))
        samples: dict[int, Sample] = {}
        while len(samples) < 16:
            samples |= {sample.index: sample for sample in (await world.answer()).samples}
    first, *rest = log
    tokenizer = load_tokenizer(str(tiny))
    for index, sample in samples.items():
        ids, mask = numbers(sample.token_ids), np.asarray(sample.loss_mask) > 0
        answers = [first.outputs[index]]
        for exchange in sorted(rest, key=lambda e: len(e.request.prompts[0])):
            context = exchange.request.prompts[0]
            if len(context) > len(prompt) and context == ids[: len(context)]:
                answers += exchange.outputs
        full = not mask[-1]  # of a tool's result: nobody is asked for the turn behind it
        assert (len(ids) == len(prompt) + 160 and sample.status == "truncated") or not full
        assert sample.turns - full == len(answers) <= 3
        assert [i for i, m in zip(ids, mask, strict=True) if m] == [i for a in answers for i in a.output_ids]
        engines = [value for a in answers for value in a.output_log_probs]
        assert np.asarray(sample.log_probs)[mask].tolist() == pytest.approx(engines)
        assert not np.asarray(sample.log_probs)[~mask].any()
        between = sample.response.split("{{")[1:] if len(answers) > 1 else []
        assert len(between) >= len(answers) - 1
        assert sample.fault() is None
        assert sample.response_length <= 160 or sample.status == "truncated"
    several = [s for s in samples.values() if s.turns > 1]
    assert several, "some rollouts have more than one turn"
    assert any(tokenizer.encode(s.response) != response_ids(s) for s in several)
