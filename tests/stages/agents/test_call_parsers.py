"""Tool calls as families of models write them: what templates write is read as meant."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from stages.chat.bridge import as_mapping
from stages.chat.formats import PARSERS, parser_by_name
from stages.chat.messages import Message, ToolCall, ToolSchema
from stages.chat.tool_calls import Offered
from stages.tools.tool import function_schema
from tests.stages.agents import chat_templates as families
from tests.stages.agents.chat_templates import Family
from tests.stages.agents.test_chat_format import QUESTION, loaded

KINDS = {"place": "string", "times": "integer", "sure": "boolean", "more": "object"}
TOOLS: tuple[ToolSchema, ...] = (
    function_schema("look", "Looks.", {name: {"type": kind} for name, kind in KINDS.items()}, ["place"]),
    function_schema("wait", "Waits.", {}, []),
)
FAMILIES = {
    "hermes": families.QWEN3,
    "hermes, reasoning opened": families.THINKER,
    "qwen3_coder": families.QWEN3_CODER,
    "glm45": families.GLM45,
    "deepseekv31": families.DEEPSEEK,
    "deepseekv3": families.DEEPSEEK_FENCED,
    "kimi_k2": families.KIMI_K2,
    "mistral": families.MISTRAL,
    "gpt-oss": families.HARMONY,
    "llama3": families.LLAMA3,
    "pythonic": families.PYTHONIC,
}
ALONE = {"mistral", "gpt-oss", "llama3"}  # no text beside calls
SINGLE = {"gpt-oss", "llama3"}  # one call a turn
REASONING = {"hermes", "hermes, reasoning opened", "qwen3_coder", "glm45", "gpt-oss"}

prose = st.text(st.characters(codec="utf-8", exclude_characters="<|>[]{}｜"), max_size=20).map(str.strip)
texts = st.text(st.characters(codec="utf-8"), max_size=12)
plain = st.integers(-(2**63), 2**64) | st.booleans() | st.none() | texts
arguments = st.fixed_dictionaries(
    {"place": texts},
    optional={
        "times": st.integers(-99, 99),
        "sure": st.booleans(),
        "more": st.dictionaries(texts, plain | st.lists(plain, max_size=2), max_size=2),
    },
)
some_calls = st.lists(arguments.map(lambda a: ToolCall("look", a)) | st.just(ToolCall("wait", {})), max_size=3)


def message(name: str, content: str, reasoning: str, calls: list[ToolCall]) -> Message:
    """A turn that the family can write."""
    calls = calls[: 1 if name in SINGLE else 3]
    ids = {"kimi_k2": "functions.{}:{}", "mistral": "id00000{1:02d}"}.get(name, "")
    return Message(
        "assistant",
        "" if calls and name in ALONE else content,
        reasoning if name in REASONING else "",
        tuple(ToolCall(call.name, call.arguments, ids.format(call.name, n)) for n, call in enumerate(calls)),
    )


def written(family: Family, turn: Message) -> str:
    """What the model writes of a turn, by the family's template: up to the token that ends it."""
    tokenizer = loaded(family)[1]
    prompt = tokenizer.apply_chat_template([as_mapping(QUESTION)], TOOLS)
    whole = tokenizer.apply_chat_template([as_mapping(QUESTION), as_mapping(turn)], TOOLS, add_generation_prompt=False)
    assert whole.startswith(prompt)
    return whole.removeprefix(prompt).rstrip("\n")


@pytest.mark.parametrize("name", FAMILIES)
def test_the_parser_is_found_by_the_template(name: str) -> None:
    chat, tokenizer = loaded(FAMILIES[name])
    named, _ = loaded(FAMILIES[name], name.partition(",")[0])
    call = message(name, "", "Hm.", [ToolCall("look", {"place": "a", "times": 2})])
    ids = tokenizer.encode(written(FAMILIES[name], call))
    assert chat.reply(ids, TOOLS) == named.reply(ids, TOOLS)
    assert len(chat.reply(ids, TOOLS).message.tool_calls) == 1


@given(st.sampled_from(sorted(FAMILIES)), prose, prose.filter(bool), some_calls)
def test_what_a_template_writes_is_read_as_it_was(
    name: str, content: str, reasoning: str, calls: list[ToolCall]
) -> None:
    turn = message(name, content, reasoning, calls)
    chat, tokenizer = loaded(FAMILIES[name])
    reply = chat.reply(tokenizer.encode(written(FAMILIES[name], turn)), TOOLS)
    assert reply.malformed == ""
    assert replace(reply.message, content=reply.message.content.strip()) == turn  # Mistral's turns begin with a space


LOOK = ToolCall("look", {"place": "a"})
WAIT = ToolCall("wait", {})
CALLED = "<|channel|>commentary to=functions.wait <|constrain|>json<|message|>"


@pytest.mark.parametrize(
    ("parser", "text", "content", "calls"),
    [
        ("hermes", '<tool_call>{"name": "look", "arguments": "{\\"place\\": \\"a\\"}"}</tool_call>', "", (LOOK,)),
        ("hermes", '<tool_call>{"name": "look", "parameters": {"place": "a"}}</tool_call>', "", (LOOK,)),
        ("hermes", 'x <tool_call>{"name": "look", "arguments": {"place": "a"}}', "x", (LOOK,)),
        ("hermes", '<tool_call> hm <tool_call>{"name": "wait"}</tool_call>', "<tool_call> hm", (WAIT,)),
        ("qwen3_coder", "<tool_call><function=wait></function></tool_call> x", "x", (WAIT,)),
        ("qwen3_coder", "<tool_call><function=look><parameter=place>a</parameter></tool_call>", "", (LOOK,)),
        ("glm47", "<tool_call>look<arg_key>place</arg_key><arg_value>a</arg_value></tool_call>", "", (LOOK,)),
        ("mistral", '[TOOL_CALLS]look[ARGS]{"place": "a"}[TOOL_CALLS]wait[ARGS]{}', "", (LOOK, WAIT)),
        ("mistral", "x[TOOL_CALLS]wait[CALL_ID]7[ARGS]{}", "x", (ToolCall("wait", {}, "7"),)),
        ("llama3", '<|python_tag|>{"name": "wait", "parameters": {}}; {"name": "wait"}', "", (WAIT, WAIT)),
        ("llama3", '{"answer": 3}', '{"answer": 3}', ()),
        ("llama3", "{1, 2}", "{1, 2}", ()),
        ("pythonic", "<|python_start|>[look(place='a'), wait()]<|python_end|>", "", (LOOK, WAIT)),
        ("pythonic", 'I do [look(place="a")] now', "I do  now", (LOOK,)),
        ("pythonic", '[look(place="[a)\\"]")]', "", (ToolCall("look", {"place": '[a)"]'}),)),
        ("pythonic", "the interval [f(1), f(2)]", "the interval [f(1), f(2)]", ()),
        ("kimi_k2", "<|tool_call_begin|>wait<|tool_call_argument_begin|>{}<|tool_call_end|>", "", ("wait",)),
        ("gpt-oss", f"<|channel|>commentary<|message|>So.<|end|><|start|>assistant{CALLED}{{}}", "So.", (WAIT,)),
        ("gpt-oss", "no channel", "no channel", ()),
    ],
)
def test_other_ways_to_write_a_call(parser: str, text: str, content: str, calls: tuple[object, ...]) -> None:
    found = parser_by_name(parser).parse(text, Offered(TOOLS))
    assert (found.fault, found.content) == ("", content)
    # A name alone: its id is the parser's own.
    made = [call if isinstance(want, ToolCall) else call.name for call, want in zip(found.calls, calls, strict=True)]
    assert tuple(made) == calls


@pytest.mark.parametrize(
    ("parser", "text", "words"),
    [
        ("qwen3_coder", "<tool_call>look(a)</tool_call>", "has the form <function=NAME>"),
        ("qwen3_coder", "<tool_call><function=look><parameter=place>a</function></tool_call>", "is not closed"),
        ("qwen3_coder", "<tool_call><function=loook></function></tool_call>", "no tool 'loook'; did you mean 'look'?"),
        ("glm45", "<tool_call>look<arg_key>place</arg_key></tool_call>", "is not closed or not named"),
        ("glm45", "<tool_call>look<arg_key>place", "not closed: end it with </tool_call>"),
        ("deepseekv31", "<｜tool▁call▁begin｜>look<｜tool▁sep｜>{a}<｜tool▁call▁end｜>", "not valid JSON"),
        ("kimi_k2", "<|tool_call_begin|>functions.look:0<|tool_call_end|>", "not valid JSON"),
        ("kimi_k2", "<|tool_call_begin|>functions.lo:0<|tool_call_argument_begin|>{}<|tool_call_end|>", "no tool 'lo'"),
        ("mistral", '[TOOL_CALLS] [{"name": "look", "arg', "not valid JSON"),
        ("mistral", '[TOOL_CALLS] {"name": "look"}', "stands a JSON list of calls"),
        ("mistral", "[TOOL_CALLS]look[ARGS][1]", "must be a JSON object"),
        ("llama3", '{"name": "look", "parameters": {', "not valid JSON"),
        ("llama3", '{"name": "look", "parameters": 3}', "must be a JSON object"),
        ("llama3", "<|python_tag|>look(3)", "not valid JSON"),
        ("pythonic", "[look(place=a)]", "no plain value"),
        ("pythonic", "[look('a')]", "have the form [name(key=value), ...]; tools: look, wait"),
        ("pythonic", "[look(place='a'", "not closed: end it with ]"),
        ("pythonic", "[find(place='a')]", "no tool 'find'"),
        ("gpt-oss", "<|channel|>commentary to=functions.look<|message|>a", "not valid JSON"),
    ],
)
def test_what_is_wrong_with_a_call_is_reported(parser: str, text: str, words: str) -> None:
    found = parser_by_name(parser).parse(text, Offered(TOOLS))
    assert words in found.fault
    assert (found.calls, found.content) == ((), text)


MARKS = (
    *("<tool_call>", "</tool_call>", "<function=", "<parameter=", "</function>", "<arg_key>", "[TOOL_CALLS]", "[ARGS]"),
    *("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<|tool_call_begin|>", "<|channel|>", "<|message|>", "<|end|>"),
    *("look", "[look(", "{", "}", "[", "]", '"', '{"name": "look", "arguments": ', "```json", "=", "(", ",", " ", "\n"),
)


@given(st.sampled_from(sorted(PARSERS)), st.lists(st.sampled_from(MARKS) | st.text(max_size=3), max_size=30))
def test_any_text_is_read(parser: str, pieces: list[str]) -> None:
    found = parser_by_name(parser).parse("".join(pieces), Offered(TOOLS))
    json.dumps([call.arguments for call in found.calls])


@pytest.mark.parametrize("parser", sorted(PARSERS))
def test_long_and_deep_texts_are_read_too(parser: str) -> None:
    """Each of them is quadratic or too deep for a parser that is not careful; the suite would stand still."""
    begin = "<tool_call><function=look>[TOOL_CALLS]<|channel|>to=functions.look<|message|>[look(place="
    for piece in (*MARKS, "[look(", "a.", "-", "\\", "1+"):
        parser_by_name(parser).parse(begin + piece * (30_000 // len(piece)), Offered(TOOLS))


looks = arguments.map(lambda a: ToolCall("look", a))
turns = st.tuples(prose, st.lists(looks, min_size=1, max_size=2), st.booleans())
rounds = st.lists(turns, min_size=1, max_size=3)


@given(st.sampled_from(sorted(FAMILIES)), rounds, st.lists(texts.map(str.strip), min_size=8, max_size=8))
def test_bridged_tool_answers_are_those_of_the_whole_conversation(
    name: str, rounds: list[tuple[str, list[ToolCall], bool]], answers: list[str]
) -> None:
    """Between two questions templates keep reasoning; so all tokens are those of one rendering, sampled ones too."""
    chat, tokenizer = loaded(FAMILIES[name])
    messages = [QUESTION]
    ids = chat.start(messages, TOOLS)

    def text(messages: list[Message], generation_prompt: bool = True) -> str:
        shown = [as_mapping(one) for one in messages]
        return tokenizer.apply_chat_template(shown, TOOLS, add_generation_prompt=generation_prompt)

    for content, calls, ended in rounds:
        turn = message(name, content, "Hm.", calls)
        prompt, whole = text(messages), text([*messages, turn], generation_prompt=False)
        assert whole.startswith(prompt)
        sampled = tokenizer.encode(whole.removeprefix(prompt).rstrip("\n"))
        ends = {*tokenizer.eos_ids, *chat.stop_token_ids}
        if name == "glm45" and ended:
            sampled += tokenizer.encode("<|observation|>")  # what ends a turn is what opens the next message
        elif sampled[-1] in ends and not ended:
            sampled.pop()
        observed = [
            Message("tool", answers.pop(), tool_call_id=call.id or f"call00{n}", name=call.name)
            for n, call in enumerate(turn.tool_calls)
        ]
        ids = ids + sampled
        ids = ids + chat.append(ids, observed, TOOLS)
        messages = [*messages, turn, *observed]
    assert tokenizer.decode(ids, skip_special_tokens=False) == text(messages)
    assert ids == tokenizer.encode(text(messages))
