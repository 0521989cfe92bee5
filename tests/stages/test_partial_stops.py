"""A stop string that an abort cuts in two still ends the response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.engines.protocol import SamplingParams
from models.engines.text import ends_within_stop, find_stop
from stages.sampling.attempt import Attempt
from stages.sampling.losses import Losses
from stages.sampling.partial_rollouts import Call, Emit, PartialRollouts
from stages.sampling.requests import SampleRequest
from stages.sampling.results import Chunk, SampleResult


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

    async def survives(self, *_: object, progress: bool) -> bool:
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
    call = Call(request, Losses.until(None), lambda _, result: emitted.append(result), tell if told else None)
    await PartialRollouts(sender, keeps_partial=True).answer(call)
    assert [result.finish for result in emitted] == ["stop"]
    first, second = sender.asked
    assert first == SampleResult()
    assert (second.resumed, second.spent_s, second.finish) == (1, 1.0, "aborted")
    kept = kept or told  # of chunks none is taken back
    assert (second.token_ids, second.text) == (((1, 2), text) if kept else ((), ""))


@given(st.text("ab"), st.text("ab", min_size=1, max_size=5), st.text("ab", min_size=1))
def test_a_stop_can_only_be_completed_where_it_has_begun(text: str, stop: str, more: str) -> None:
    if find_stop(text, [stop]) is None and find_stop(more, [stop]) is None and find_stop(text + more, [stop]):
        assert ends_within_stop(text, [stop])
    if ends_within_stop(text, [stop]):
        assert any(text.endswith(stop[:n]) and 0 < n < len(stop) for n in range(len(stop)))
