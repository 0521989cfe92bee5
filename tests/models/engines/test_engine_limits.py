"""What the client refuses before it is sent, and the helpers of answers: boundaries, spans, experts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.engines.answers import RequestLimits, later_boundaries, with_spans
from models.engines.protocol import GenerateOutput, GenerateRequest, MetaInfo, SamplingParams, VersionSpan


def request(ids: object = (1, 2, 3), **params: object) -> GenerateRequest:
    return GenerateRequest(input_ids=list(ids), sampling_params=SamplingParams(**params))  # type: ignore[arg-type, call-overload]


@pytest.mark.parametrize(
    ("field", "value"),
    [(field, value) for field in ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty",
     "repetition_penalty") for value in (math.nan, math.inf, -math.inf, -3.0)]
    + [("top_p", 0.0), ("top_p", 1.1), ("min_p", 1.5)],
)  # fmt: skip
def test_numbers_that_are_none_are_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{field}={value} must be a finite number"):
        RequestLimits().check(request(**{field: value}))


def test_each_set_of_params_is_looked_at() -> None:
    params = [SamplingParams(), SamplingParams(temperature=math.nan)]
    with pytest.raises(ValueError, match="temperature=nan"):
        RequestLimits().check(GenerateRequest(input_ids=[[1], [2]], sampling_params=params))
    with pytest.raises(ValueError, match="2 entries for 1 prompts"):
        RequestLimits().check(GenerateRequest(input_ids=[[1]], sampling_params=[SamplingParams()] * 2))
    with pytest.raises(ValueError, match="n=0 must be at least 1"):
        RequestLimits().check(request(n=0))


def test_ids_without_a_known_vocabulary_are_still_numbers_of_the_wire() -> None:
    RequestLimits().check(request([0, 2**31 - 1]))
    for bad in (-1, 2**31):
        with pytest.raises(ValueError, match=f"input_ids contains {bad}"):
            RequestLimits().check(request([1, bad]))
    with pytest.raises(ValueError, match="empty prompt"):
        RequestLimits().check(request([[1], []]))


def test_lengths_beyond_the_context_are_refused() -> None:
    limits = RequestLimits(context_length=10)
    limits.check(request(range(4), max_new_tokens=6))
    limits.check(request(range(9), max_new_tokens=None))
    limits.check(GenerateRequest(text="of unknown length"))
    for count, new in ((4, 7), (10, 0), (10, None)):
        with pytest.raises(ValueError, match=rf"{count} tokens and max_new_tokens={new}.* is 10"):
            limits.check(request(range(count), max_new_tokens=new))


def test_how_many_answers_a_request_asks_for() -> None:
    params = SamplingParams(n=3)
    assert GenerateRequest(input_ids=[1, 2], sampling_params=params).samples == 3
    assert GenerateRequest(input_ids=[[1], [2]], sampling_params=params).samples == 6
    assert GenerateRequest(text=["a", "b"]).samples == 2
    assert GenerateRequest(text="a").samples == 1
    assert GenerateRequest(input_ids=[[1], [2]], sampling_params=[params, SamplingParams()]).samples == 4


def spans(*ends: int) -> list[VersionSpan]:
    starts = (0, *ends[:-1])
    return [VersionSpan(f"v{i}", start, end) for i, (start, end) in enumerate(zip(starts, ends, strict=True))]


def test_boundaries_move_one_token_on() -> None:
    assert later_boundaries(spans(5, 9)) == [VersionSpan("v0", 0, 6), VersionSpan("v1", 6, 9)]
    assert later_boundaries(spans(9)) == spans(9)
    assert later_boundaries([]) == []
    # One token of the last version was reported, and was made by the one before.
    assert later_boundaries(spans(8, 9)) == [VersionSpan("v0", 0, 9)]
    assert later_boundaries(spans(5, 6, 9)) == [
        VersionSpan("v0", 0, 6),
        VersionSpan("v1", 6, 7),
        VersionSpan("v2", 7, 9),
    ]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_moved_spans_still_cover_every_token_once(lengths: list[int]) -> None:
    before = spans(*np.cumsum(lengths).tolist())
    after = later_boundaries(before)
    owner = [span.version for span in before for _ in range(span.end - span.start)]
    moved = [span.version for span in after for _ in range(span.end - span.start)]
    assert moved == [owner[0], *owner[:-1]], "every token belongs to whom the token before it was said to belong to"
    assert [span.start for span in after] == [0, *[span.end for span in after[:-1]]]


def test_spans_end_with_the_tokens() -> None:
    output = GenerateOutput(output_ids=[1, 2, 3], meta_info=MetaInfo(id="r"))
    filled = with_spans(output, [VersionSpan("a", 0, 2), VersionSpan("b", 2, 9), VersionSpan("c", 9, 9)])
    assert filled.version_spans == [VersionSpan("a", 0, 2), VersionSpan("b", 2, 3)]
    assert filled.meta_info.weight_version == "b"
