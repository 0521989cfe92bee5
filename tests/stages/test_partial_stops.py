"""What members of a request go on from: a stop string that an abort cuts in two still ends the response, and those that
have ended are not asked again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.engines.protocol import SamplingParams
from models.engines.text import ends_within_stop, find_stop
from models.errors import EngineUnreachable
from stages.sampling.attempt import Attempt
from stages.sampling.partial_rollouts import Call, Emit, PartialRollouts, RetryState
from stages.sampling.requests import Chunk, SampleRequest, SampleResult


class AbortsOnce:
    """Gives the member back once as it is then, and whole the second time; `asked` has what it was to go on from."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.asked: list[SampleResult] = []

    async def ask(self, call: Call, index: int, results: Sequence[SampleResult], ended: Emit) -> Attempt:
        self.asked += results
        finish: Any = "aborted" if len(self.asked) == 1 else "stop"
        ended(0, SampleResult(finish, token_ids=(1, 2), log_probs=(-1.0, -2.0), text=self.text, spent_s=1.0))
        return Attempt(call.request, [], ended, True)

    async def wait_to_retry(self, *_: object, progress: bool) -> bool:
        raise AssertionError("nothing fails")

    def drains(self, request: SampleRequest) -> bool:
        return False


@pytest.mark.parametrize(
    ("text", "kept"), [("ab", True), ("ab</to", False), ("ab<", False), ("<ab", True), ("</tool_call", False)]
)
@pytest.mark.parametrize("told", [False, True])
async def test_what_ends_within_a_stop_string_begins_again(text: str, kept: bool, told: bool) -> None:
    sender, emitted = AbortsOnce(text), []

    def tell(index: int, chunk: Chunk) -> None:
        raise AssertionError("no chunk comes")

    request = SampleRequest(SamplingParams(stop=["</tool_call>", "\n\n"]), token_ids=[3])
    call = Call(request, RetryState.until(None), lambda _, result: emitted.append(result), tell if told else None)
    await PartialRollouts(sender, keeps_partial=True).answer(call)
    assert [result.finish for result in emitted] == ["stop"]
    first, second = sender.asked
    assert first == SampleResult()
    assert (second.resumed, second.spent_s, second.finish) == (1, 1.0, "aborted")
    kept = kept or told  # of chunks none is taken back
    assert (second.token_ids, second.text) == (((1, 2), text) if kept else ((), ""))


class LosesTwoOfThree:
    """Ends the second member, and then the engine is lost before anything of the others has come."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []  # index of the first member, and how many

    async def ask(self, call: Call, index: int, results: Sequence[SampleResult], ended: Emit) -> Attempt:
        self.asked.append((index, len(results)))
        attempt = Attempt(call.request, list(results), ended, True)
        if len(self.asked) == 1:
            attempt.left.pop(1)
            ended(1, SampleResult("stop", token_ids=(7,)))
            attempt.error = EngineUnreachable("http://engine", "it was lost")
        else:
            attempt.end_all("stop")
        return attempt

    async def wait_to_retry(self, *_: object, progress: bool) -> bool:
        return True

    def drains(self, request: SampleRequest) -> bool:
        return False


async def test_those_that_are_left_go_on_under_their_own_numbers() -> None:
    sender, emitted = LosesTwoOfThree(), dict[int, SampleResult]()
    request = SampleRequest(SamplingParams(n=3), token_ids=[3])
    call = Call(request, RetryState.until(None), lambda index, result: emitted.update({index: result}))
    await PartialRollouts(sender, keeps_partial=True).answer(call)
    assert sender.asked[0] == (0, 3)
    assert sorted(sender.asked[1:]) == [(0, 1), (2, 1)]
    assert {index: result.token_ids for index, result in emitted.items()} == {0: (), 1: (7,), 2: ()}


@given(st.text("ab"), st.text("ab", min_size=1, max_size=5), st.text("ab", min_size=1))
def test_a_stop_can_only_be_completed_where_it_has_begun(text: str, stop: str, more: str) -> None:
    if find_stop(text, [stop]) is None and find_stop(more, [stop]) is None and find_stop(text + more, [stop]):
        assert ends_within_stop(text, [stop])
    if ends_within_stop(text, [stop]):
        assert any(text.endswith(stop[:n]) and 0 < n < len(stop) for n in range(len(stop)))
