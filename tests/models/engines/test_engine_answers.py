"""Answers of engines that lie: each is refused with the reason, and nothing of it is used."""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest

from models.engines.answers import SLACK_BYTES, AnswerLimits
from models.engines.protocol import GenerateOutput, GenerateRequest, MetaInfo, SamplingParams, VersionSpan
from models.engines.streamed import PartialOutputs
from models.errors import EngineProtocolError, EngineUnreachable

REQUEST = GenerateRequest(
    input_ids=[1, 2, 3], sampling_params=SamplingParams(max_new_tokens=4), return_logprob=True, rid="r"
)
LIMITS = AnswerLimits.of(REQUEST, 100)


def answer(ids: list[int], text: str = "", **meta: object) -> GenerateOutput:
    values: dict[str, object] = {
        "id": "r",
        "output_token_logprobs": [(-0.5, token, None) for token in ids],
        "weight_versions": [VersionSpan("1.0", 0, len(ids))],
        **meta,
    }
    return GenerateOutput(meta_info=msgspec.convert(values, MetaInfo), output_ids=ids, text=text)


def spans(*ends: tuple[int, int]) -> list[VersionSpan]:
    return [VersionSpan("1.0", start, end) for start, end in ends]


@pytest.mark.parametrize(("wrong", "words"), [
    (answer([1, 2, 3, 4, 5]), "has 5 new tokens, and 4 were allowed"),
    (answer([1, 100]), "holds token 100, outside the vocabulary of 100"),
    (answer([1, -1]), "holds token -1"),
    (answer([1, 1 << 31]), "holds token 2147483648"),
    (answer([(1 << 32) + 5]), "holds token 4294967301"),
    (answer([1], text="x" * 3000), "a text of 3000 characters for 1 tokens"),
    (answer([1, 2], output_token_logprobs=[(-1.0, 1, None)]), "its 1 log-probs are not those of its 2 output_ids"),
    (answer([1, 2], output_token_logprobs=None), "its 0 log-probs are not those"),
    (answer([1], output_token_logprobs=[(-1.0, 2, None)]), "are not those of its 1 output_ids"),
    (answer([1], output_token_logprobs=[(None, 1, None)]), "token 1 has the log-prob None"),
    (answer([1], output_token_logprobs=[(float("nan"), 1, None)]), "token 1 has the log-prob nan"),
    (answer([1], output_token_logprobs=[(float("-inf"), 1, None)]), "token 1 has the log-prob -inf"),
    (answer([1], output_token_logprobs=[(0.5, 1, None)]), "token 1 has the log-prob 0.5; it must be finite"),
    (answer([1], cached_tokens=-4), "cached_tokens=-4, which is no count"),
    (answer([1], num_retractions=1 << 40), "num_retractions=1099511627776"),
    (answer([1], spec_num_proposed_drafts=1 << 70), "spec_num_proposed_drafts="),
    (answer([1, 2, 3], weight_versions=spans((0, 2))), "the spans of versions end at token 2 of 3"),
    (answer([1, 2, 3], weight_versions=spans((0, 5))), "end at token 5 of 3"),
    (answer([1, 2, 3], weight_versions=spans((0, 1), (2, 3))), "begins at token 2, not at 1"),
    (answer([1, 2, 3], weight_versions=spans((0, 2), (1, 3))), "begins at token 1, not at 2"),
    (answer([1, 2], weight_versions=spans((1, 2))), "begins at token 1, not at 0"),
])  # fmt: skip
def test_what_cannot_be_true_is_refused_with_the_reason(wrong: GenerateOutput, words: str) -> None:
    with pytest.raises(ValueError, match="response 'r'") as refused:
        LIMITS.check(wrong)
    assert words in str(refused.value)


# ------------------------------------------------------------------------------ over HTTP


def event(payload: object) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def piece(ids: list[int], finish: str | None = None, count: int | None = None) -> dict[str, object]:
    meta = {
        "id": "r",
        "finish_reason": finish and {"type": finish},
        "completion_tokens": len(ids) if count is None else count,
        "output_token_logprobs": [[-0.5, token, None] for token in ids],
    }
    return {"output_ids": ids, "meta_info": meta}


NESTED = b"[" * 200_000 + b"]" * 200_000


@pytest.mark.parametrize("body", [
    b'{"meta_info":{"id":"r","x":' + NESTED + b"}}",
    b'{"meta_info":{"id":"\xff\xfe"}}',
    b'{"output_ids":[1e400],"meta_info":{"id":"r"}}',
    b'{"output_ids":[NaN],"meta_info":{"id":"r"}}',
], ids=["nested", "utf-8", "overflow", "nan"])  # fmt: skip
async def test_text_that_breaks_decoders_is_an_error_of_the_engine(canned, body: bytes) -> None:  # type: ignore[no-untyped-def]
    client, _ = await canned(body, vocab_size=100, timeout_s=120)
    with pytest.raises(EngineProtocolError, match="does not decode"):
        await client.generate(REQUEST)
    client, _ = await canned(event(piece([1])), b"data: " + body + b"\n\n", vocab_size=100, timeout_s=120)
    partial = PartialOutputs()
    with pytest.raises((EngineProtocolError, EngineUnreachable), match=r"streamed|ended without"):
        await client.generate(REQUEST, partial=partial)
    [kept] = partial.certain()
    assert kept is None or kept.output_ids == [1], "no more than what came before it"


async def test_an_answer_that_never_ends_is_cut(canned) -> None:  # type: ignore[no-untyped-def]
    client, _ = await canned(b"[", b" " * 100_000, endless=True, vocab_size=100, timeout_s=120)
    with pytest.raises(EngineProtocolError, match=f"more than {LIMITS.answer_bytes} bytes"):
        await client.generate(REQUEST)
    assert LIMITS.answer_bytes < 2 * SLACK_BYTES


@pytest.mark.parametrize(("first", "again", "words"), [
    (b"", b"x" * 100_000, "bytes without an end of line"),
    (b"", event(piece([])), "chunks for 0 tokens, and no end"),
    (event(piece([1])), event(piece([1])), "chunks for 1 tokens, and no end"),
    (event(piece([1, 2, 3, 4])), event(piece([1, 2, 3, 4, 5])), "has 5 new tokens, and 4 were allowed"),
    (event(piece([1] * 50, "stop", 3)), event(piece([])), "has 50 new tokens, and 4 were allowed"),
], ids=["line", "nothing", "the same", "more", "more than counted"])  # fmt: skip
async def test_a_stream_that_never_ends_is_cut(canned, first: bytes, again: bytes, words: str) -> None:  # type: ignore[no-untyped-def]
    client, _ = await canned(first, again, endless=True, vocab_size=100, timeout_s=120)
    partial = PartialOutputs()
    with pytest.raises(EngineProtocolError, match=words):
        await client.generate(REQUEST, partial=partial)
    if b'"stop"' in first:  # not even the beginning of a response that is too long
        assert partial.certain() == [None]


async def test_what_follows_the_last_word_is_not_waited_for(canned) -> None:  # type: ignore[no-untyped-def]
    whole = event(piece([1, 2], "stop"))
    client, _ = await canned(whole + b"data: [DONE]\n\n", b"x" * 10_000, endless=True, vocab_size=100, timeout_s=120)
    async with asyncio.timeout(60):
        [output] = await client.generate(REQUEST, partial=PartialOutputs())
    assert output.output_ids == [1, 2]


async def test_chunks_that_contradict_each_other_leave_nothing_certain(canned) -> None:  # type: ignore[no-untyped-def]
    """Ids and log-probs are of other tokens: the stream breaks off, and what is asked of it afterwards is no error."""
    odd = piece([1, 2])
    odd["meta_info"]["output_token_logprobs"] = [[-0.5, 7, None], [-0.5, 8, None]]  # type: ignore[index]
    client, _ = await canned(event(odd), vocab_size=100, timeout_s=120)
    partial = PartialOutputs()
    with pytest.raises(Exception, match="ended without"):
        await client.generate(REQUEST, partial=partial)
    assert partial.certain() == [None]


async def test_scores_that_are_no_numbers_are_refused(canned) -> None:  # type: ignore[no-untyped-def]
    meta = {"id": "r", "input_token_logprobs": [[None, 1, None], [0.7, 2, None], [-1.0, 3, None]]}
    client, _ = await canned(json.dumps({"output_ids": [], "meta_info": meta}).encode(), vocab_size=100, timeout_s=120)
    with pytest.raises(EngineProtocolError, match=r"log-prob 0\.7"):
        await client.score([1, 2, 3], 1)
