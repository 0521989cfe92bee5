"""The sampler: results of the members of a request as each ends, chunks of tokens, and continued partial responses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema.rollout import EngineConfig
from models.engines.protocol import SamplingParams
from models.engines.text import ends_within_stop, find_stop
from stages.sampling.attempt import Attempt, Call, Emit
from stages.sampling.partial_rollouts import UnknownPolicy, answer
from stages.sampling.requests import Chunk, SampleRequest, SampleResult
from stages.sampling.routes import RetryState
from tests.stages.engine_rig import FAST_MS, LENGTH, SLOW_MS, Log, World, core_of, generating, simulated, started
from tests.stages.stage_rig import idle, make_group, until


def uneven() -> EngineConfig:
    """Responses of very different lengths."""
    slow = simulated(SLOW_MS)
    return msgspec.structs.replace(slow, simulated=msgspec.structs.replace(slow.simulated, length_sigma=1.0))


async def stop_while(world: World, some: Callable[[int], bool]) -> int:
    """Pause the engine when so many of its responses run; it is fast from then on."""
    core = core_of(world.engines[0])

    def running() -> int:
        core.load()  # brings the schedule up to now
        return core.schedule.running

    await until(lambda: some(running()))
    await core.pause("in_place")
    core.schedule.config = msgspec.structs.replace(core.schedule.config, a_ms=FAST_MS)
    assert core.schedule.running > 0
    return core.schedule.running


async def test_a_slow_member_keeps_its_own_slot_only(tmp_path: Path, log: Log) -> None:
    async with started(tmp_path, engine=uneven(), rollout={"server_concurrency": 4}) as world:
        core = core_of(world.engines[0])
        await world.ask(make_group(0, 6))
        await until(lambda: core.schedule.running == 6)
        await world.ask(make_group(1, 6))
        await idle()
        assert len(log) == 1, "all slots are taken"
        slow = await stop_while(world, lambda running: 0 < running <= 2)
        await until(lambda: len(log) == 2)
        here: list[int] = []
        while len(here) < 6 - slow:
            slice_ = await world.answer()
            assert slice_.group.group_id == 0
            here += [sample.index for sample in slice_.samples]
        assert world.rig.hubs["generate"].stats().settled == 0, "the slow ones still lease their group"
        await core.resume()
        late = [await world.answer()]
        while sum(len(slice_.samples) for slice_ in late) < slow + 6:
            late.append(await world.answer())
        here += [sample.index for slice_ in late if slice_.group.group_id == 0 for sample in slice_.samples]
        assert sorted(here) == list(range(6)), "each member once"
        await world.rig.hubs["generate"].wait_empty()


# The sampler by itself


async def test_who_leaves_a_stream_ends_its_request(tmp_path: Path) -> None:
    async with started(tmp_path, engine=uneven()) as world:
        core = core_of(world.engines[0])
        async with world.stage.sampler.stream(asked(6)) as members:
            await anext(members)
            assert core.schedule.running > 0
        await until(lambda: core.schedule.running == 0)
        [target] = world.stage.sampler.directory.serving()
        assert (target.in_flight, target.slots.taken) == (0, 0)


async def test_a_policy_without_engines_fails_every_member_in_words(tmp_path: Path) -> None:
    """As a deadline, which counts waiting. Chunks of a text are refused."""
    async with generating(tmp_path, start=0) as world:
        results = await world.stage.sampler.sample(asked(2, policy="judge"))
        assert [result.finish for result in results] == ["failed", "failed"]
        assert isinstance(results[0].error, UnknownPolicy)
        assert str(results[0].error) == "no engine is called 'judge' here; the known names are policy"
        (result,) = await world.stage.sampler.sample(asked(1, deadline_s=0.05))
        assert result.finish == "failed"
        assert "it was not up within 0.05 s; see logs/engine-*.log" in str(result.error)
        with pytest.raises(ValueError, match="cannot be continued at another engine; give its token ids"):
            await Heard(1).listen(world, asked(1, text="hello", token_ids=[]))


SLOW: dict[str, Any] = {"proxied": True, "engine": simulated(SLOW_MS)}


class Heard:
    """What came of each member: the tokens of its chunks, and its result."""

    def __init__(self, n: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(n)]
        self.log_probs: list[list[float]] = [[] for _ in range(n)]
        self.results: list[SampleResult | None] = [None] * n
        self.chunks = 0

    async def listen(self, world: World, request: SampleRequest) -> None:
        async with world.stage.sampler.chunks(request) as members:
            async for index, item in members:
                assert self.results[index] is None, "the result comes last"
                if isinstance(item, Chunk):
                    self.chunks += 1
                    self.tokens[index] += item.token_ids
                    self.log_probs[index] += item.log_probs
                else:
                    self.results[index] = item

    def check(self) -> None:
        for tokens, log_probs, result in zip(self.tokens, self.log_probs, self.results, strict=True):
            assert result.finish in ("stop", "length")
            assert tokens == list(result.token_ids[: len(tokens)])
            assert log_probs == list(result.log_probs[: len(tokens)])


def asked(n: int, **fields: Any) -> SampleRequest:
    params = SamplingParams(n=n, max_new_tokens=LENGTH, sampling_seed=5, stream_interval=fields.pop("interval", None))
    return SampleRequest(params, **{"token_ids": [1, 2, 3], **fields})


@pytest.mark.parametrize("streamed", [False, True], ids=["cumulative", "sglang"])
@pytest.mark.parametrize(("n", "interval"), [(1, None), (3, 4)])
async def test_tokens_come_before_the_result(n: int, interval: int | None, streamed: bool, tmp_path: Path) -> None:
    heard = Heard(n)
    async with started(tmp_path, streamed=streamed, engine=simulated(SLOW_MS)) as world, asyncio.TaskGroup() as tasks:
        tasks.create_task(heard.listen(world, asked(n, interval=interval)))
        await until(lambda: all(heard.tokens))
        assert not any(heard.results)
        world.hurry(0)
    heard.check()
    assert [len(tokens) for tokens in heard.tokens] == [len(result.token_ids) for result in heard.results if result]
    assert heard.chunks >= 2 * n, "the first token at once, and the others behind it"


@pytest.mark.parametrize("streamed", [False, True], ids=["cumulative", "sglang"])
@pytest.mark.parametrize("n", [1, 3])
async def test_what_was_told_survives_its_engine_although_partial_rollout_is_off(
    n: int, streamed: bool, tmp_path: Path, log: Log
) -> None:
    heard = Heard(n)
    async with (
        started(tmp_path, engines=2, streamed=streamed, rollout={"partial_rollout": False}, **SLOW) as world,
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(heard.listen(world, asked(n)))
        await until(lambda: min(len(tokens) for tokens in heard.tokens) >= 2)
        lost = next(i for i, engine in enumerate(world.engines) if log[0].url == world.proxies[i].url)
        world.hurry(1 - lost)
        reported = [list(tokens) for tokens in heard.tokens]
        world.proxies[lost].kill()
    heard.check()
    assert len(log) == 1 + n, "each member goes on alone"
    for index, result in enumerate(heard.results):
        assert heard.tokens[index][: len(reported[index])] == reported[index]
        assert result.reused_tokens >= len(reported[index]) >= 2


class AbortsOnce:
    """Gives the member back once as it is then, and whole the second time; `asked` has what it was to go on from."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.asked: list[SampleResult] = []

    async def ask(self, call: Call, index: int, results: Sequence[SampleResult], ended: Emit) -> Attempt:
        self.asked += results
        finish: Any = "aborted" if len(self.asked) == 1 else "stop"
        ended(0, SampleResult(finish, token_ids=(1, 2), log_probs=(-1.0, -2.0), text=self.text, spent_s=1.0))
        return Attempt(call, index, [], ended)

    async def wait_to_retry(self, *_: object, progress: bool) -> bool:
        raise AssertionError("nothing fails")

    def drains(self, request: SampleRequest) -> bool:
        return False


@pytest.mark.parametrize(
    ("text", "kept"), [("ab", True), ("ab</to", False), ("ab<", False), ("<ab", True), ("</tool_call", False)]
)
@pytest.mark.parametrize("reported", [False, True])
async def test_what_ends_within_a_stop_string_begins_again(text: str, kept: bool, reported: bool) -> None:
    sender, emitted = AbortsOnce(text), []

    def tell(index: int, chunk: Chunk) -> None:
        raise AssertionError("no chunk comes")

    request = SampleRequest(SamplingParams(stop=["</tool_call>", "\n\n"]), token_ids=[3])
    call = Call(request, RetryState.until(None), lambda _, result: emitted.append(result), tell if reported else None)
    await answer(sender, call)
    assert [result.finish for result in emitted] == ["stop"]
    first, second = sender.asked
    assert first == SampleResult()
    assert (second.resumed, second.spent_s, second.finish) == (1, 1.0, "aborted")
    kept = kept or reported  # of chunks none is taken back
    assert (second.token_ids, second.text) == (((1, 2), text) if kept else ((), ""))


@given(st.text("ab"), st.text("ab", min_size=1, max_size=5), st.text("ab", min_size=1))
def test_a_stop_can_only_be_completed_where_it_has_begun(text: str, stop: str, more: str) -> None:
    if find_stop(text, [stop]) is None and find_stop(more, [stop]) is None and find_stop(text + more, [stop]):
        assert ends_within_stop(text, [stop])
    if ends_within_stop(text, [stop]):
        assert any(text.endswith(stop[:n]) and 0 < n < len(stop) for n in range(len(stop)))
