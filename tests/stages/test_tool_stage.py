"""The tool stage and its loop through generate: a tool's tokens are not trained, the engine's not tokenised again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from configs.schema import Config
from configs.schema.rollout import EngineConfig
from models.tiny import make_tiny_checkpoint
from stages.agents.stage import AgentsStage
from stages.chat.tokenizer import load_tokenizer
from stages.messages import RolloutSlice, Sample, VersionRun
from stages.rollouts import append_untrained, join_runs, new_sample
from stages.sampling.requests import SampleResult
from stages.sampling.rollout_requests import append_result
from stages.tools.tool import UnknownToolError
from tests.stages.engine_rig import Log, generating, tensors_of
from tests.stages.stage_rig import (
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

TOOLS = "tests.stages.toolkit.sample_tools"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(
        tmp_path_factory.mktemp("tools") / "tiny", hidden_size=32, num_layers=1, intermediate_size=64
    )


def tool_config(*names: str, **tools: object) -> Config:
    return make_config(tools={"tools": names, **tools})


def of_model(config: Config, checkpoint: Path) -> Config:
    train = msgspec.structs.replace(config.train, hf_checkpoint=str(checkpoint))
    return msgspec.structs.replace(config, train=train)


Answer = Callable[[str], Awaitable[Sample]]


@asynccontextmanager
async def answering(tiny: Path, config: Config) -> AsyncIterator[tuple[AgentsStage, Answer]]:
    """The stage, and a function that sends it a sample with this response."""
    stage = AgentsStage(make_context(of_model(config, tiny)))
    async with open_rig() as rig:
        ports = await rig.join({"in": ("agents", RolloutSlice)}, {"out": ("generate.return", RolloutSlice)})
        feed, out = await rig.outlet("agents"), await rig.inlet("generate.return")
        sent = 0

        async def answer(response: str) -> Sample:
            nonlocal sent
            sent += 1
            sample = make_sample(2, runs=[(3, 2), (4, 2)], response=response)
            await feed.send(make_slice(sent, sample, n_samples=4), str(sent))
            back = await take(out)
            assert back.group.group_id == sent
            (found,) = back.samples
            assert isinstance(found, Sample)
            return found

        async with running(stage, ports):
            yield stage, answer


@asynccontextmanager
async def looping(config: Config) -> AsyncIterator[Callable[[Sample], Awaitable[Sample]]]:
    """A function that sends the stage a rollout."""
    async with open_rig() as rig:
        ports = await rig.join({"in": ("agents", RolloutSlice)}, {"out": ("generate.return", RolloutSlice)})
        feed, out = await rig.outlet("agents"), await rig.inlet("generate.return")

        async def ask(sample: Sample) -> Sample:
            await feed.send(make_slice(1, sample, n_samples=4), f"1/{sample.turns}")
            (found,) = (await take(out)).samples
            return found

        async with running(AgentsStage(make_context(config)), ports):
            yield ask


def call(name: str, arguments: str) -> str:
    return f'thinking <tool_call>{{"name":"{name}","arguments":{arguments}}}</tool_call>'


async def test_a_result_is_appended_with_mask_zero_and_log_prob_zero(tiny: Path) -> None:
    async with answering(tiny, tool_config("calculator", f"{TOOLS}:echo")) as (stage, answer):
        asked = call("calculator", '{"expression":"6*7"}')
        sample = await answer(asked)
        text = "<tool_response>42</tool_response>"
        tool_ids = load_tokenizer(str(tiny)).encode(text)
        assert sample.response == asked + text
        assert sample.answer_start == len(sample.response), "what the tool said is no answer"
        assert response_ids(sample) == [20, 21, 22, 23, *tool_ids]
        assert numbers(sample.loss_mask) == [0] * 3 + [1] * 4 + [0] * len(tool_ids)
        assert np.asarray(sample.log_probs).tolist() == [0.0] * 3 + [-0.5] * 4 + [0.0] * len(tool_ids)
        assert sample.version_runs[1:] == (VersionRun(3, 2), VersionRun(4, 2), VersionRun(-1, len(tool_ids)))
        assert sample.fault() is None
        assert (sample.index, sample.turns, sample.status) == (2, 1, "completed")
        assert stage.activity.failures == 0


SCRIPT = (  # what the model writes, and what `--tools calculator` puts behind it
    ('6*7 is <tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>', "42"),
    ("</tool_call>", "error: the tool call is not valid JSON"),  # it begins in an earlier turn
    ("<tool_call>1/0</tool_call>\n", "error: division by zero"),
    ("<tool_call>0.1 + 0.2<tool_call>1 / 3 * 3</tool_call>", "1"),
    ("<tool_call>{'expression': 1}</tool_call>", "error: the tool call is not valid JSON"),
    (
        '<tool_call>{"name": "search", "arguments": {}}</tool_call>',
        "error: there is no tool 'search'. Tools: calculator",
    ),
    ("<tool_call></tool_call>", "error: the tool call is empty"),
    ("<think>a</think><tool_call>2**10</tool_call>", "1024"),
)


async def test_the_markup_of_scripted_turns_to_the_token(tiny: Path) -> None:
    """Every token, mask, log-prob and version of a rollout of many calls: the texts one behind the other."""
    tokenizer = load_tokenizer(str(tiny))
    config = of_model(tool_config("calculator", tool_result_template="\n<r>{result}</r>\n"), tiny)
    prompt = [20, 21, 22]
    sample, ids, mask, runs, text = new_sample(prompt, 1), list(prompt), [0] * 3, (VersionRun(-1, 3),), ""
    async with looping(config) as ask:
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


@pytest.mark.parametrize(
    ("response", "words"),
    [
        (call("calculator", '{"expression":"1/0"}'), "error: division by zero"),
        (call("explode", '{"text":"x"}'), "error: RuntimeError: the tool is broken"),
        (call("hang", '{"text":"x"}'), "error: no answer within 3 s"),
        (call("calculater", "{}"), "error: there is no tool 'calculater'; did you mean 'calculator'?"),
        (call("echo", '{"texts":"x"}'), "error: wrong arguments for echo"),
        ("<tool_call>{not json</tool_call>", "error: the tool call is not valid JSON"),
        ("no opening</tool_call>", "error: no tool call: the text must end in <tool_call> ... </tool_call>"),
    ],
)
async def test_whatever_goes_wrong_is_an_answer_for_the_model(tiny: Path, response: str, words: str) -> None:
    names = ("calculator", *(f"{TOOLS}:{name}" for name in ("echo", "explode", "hang")))
    async with answering(tiny, tool_config(*names, tool_deadline_s=3.0)) as (stage, answer):
        sample = await answer(response)
        assert sample.response.startswith(f"{response}<tool_response>{words}")
        assert sample.status == "completed", "the sample goes on"
        assert sample.fault() is None
        assert stage.activity.failures == 1
        again = await answer(call("echo", '{"text":"still here"}'))
        assert again.response.endswith("<tool_response>still here</tool_response>")


async def test_a_result_with_braces_goes_through_the_template_as_it_is(tiny: Path) -> None:
    async with answering(tiny, tool_config(f"{TOOLS}:echo", tool_result_template="[{result}]{x}")) as (_, answer):
        sample = await answer(call("echo", '{"text":"{result} {0}"}'))
        assert sample.response.endswith("[{result} {0}]{x}")


@pytest.mark.parametrize(
    ("sample", "wanted"),
    [
        (make_sample(0, response="<tool_call>x</tool_call>"), True),
        (make_sample(0, response="<tool_call>x</tool_call>\n"), True),
        (make_sample(0, response="<tool_call>x</tool_call> and more"), False),
        (make_sample(0, response="<tool_call>x</tool_call>", status="truncated"), False),
        (make_sample(0, response="<tool_call>x</tool_call>", status="failed"), False),
        (make_sample(0, response="done"), False),
    ],
)
def test_a_completed_sample_that_ends_in_a_call_is_wanted(sample: Sample, wanted: bool) -> None:
    assert AgentsStage.wants(tool_config("calculator"), {}, make_slice(0, sample)) is wanted
    assert not AgentsStage.wants(Config(), {}, make_slice(0, sample)), "no tools are configured"


async def test_an_unknown_tool_is_refused_before_the_stage_runs(tiny: Path) -> None:
    stage = AgentsStage(make_context(of_model(tool_config("calculatr"), tiny)))
    with pytest.raises(UnknownToolError, match="did you mean 'calculator'"):
        await stage.setup()


def test_runs_are_joined_and_empty_ones_dropped() -> None:
    first = (VersionRun(1, 2), VersionRun(2, 1))
    assert join_runs(first, (VersionRun(2, 3), VersionRun(3, 0))) == (VersionRun(1, 2), VersionRun(2, 4))
    sample = make_sample(0, runs=[(5, 3)])
    assert append_untrained(sample, [], "").version_runs == sample.version_runs
    assert append_untrained(sample, [1, 2], "ab").version_runs[1:] == (VersionRun(5, 3), VersionRun(-1, 2))


EMBEDDED = EngineConfig(engine="embedded", engine_slots=32, engine_device="cpu", engine_dtype="float32")
CLOSE = "e"  # a random model says it often enough


async def test_trained_ids_are_the_engines_own_over_several_turns(tiny: Path, tmp_path: Path, log: Log) -> None:
    """Random bytes are mostly no valid UTF-8, so text would not tokenise back to what was sampled."""
    sections: dict[str, Any] = {
        "tools": {
            "tools": ("calculator",),
            "tool_call_open": "(",
            "tool_call_close": CLOSE,
            "tool_result_template": "{{{result}}}",
        },
        "rollout": {"rollout_max_response_len": 160, "max_turns": 3},
    }
    prompt = [40, 49, 43]
    async with generating(
        tmp_path,
        engine=EMBEDDED,
        model=tiny,
        tensors=tensors_of([tiny]),
        inlets={"return": ("generate.return", RolloutSlice)},
        outlets={"loop.agents": ("agents", RolloutSlice)},
        loops=("agents=stages.agents.stage:AgentsStage",),
        **sections,
    ) as world:
        stage = AgentsStage(make_context(of_model(make_config(**sections), tiny)))
        ports = await world.rig.ports({"in": "agents"}, {"out": "generate.return"}, replica="agents-0")
        async with running(stage, ports):
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
