"""Streams taken apart: both forms of chunks, the odd ones, what is certain, errors, and that the cost stays linear."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.engines import streamed as module
from models.engines.answers import AnswerLimits
from models.engines.protocol import GenerateOutput, GenerateRequest, VersionSpan
from models.engines.streamed import EventLines, PartialOutputs, StreamBroken
from models.errors import EngineProtocolError, EngineRefused, EngineUnreachable
from tests.models.engines.conftest import on_sglang, opened
from tests.models.engines.harness import Target, ask, idle, streamed, until

FINISH = {"type": "length", "length": 0}
ABORT = {"type": "abort", "message": "Abort in waiting queue"}


def chunk(ids: list[int], total: int | None = None, label: str | None = "v1", **more: object) -> bytes:
    """A chunk as SGLang sends it: token t has log-prob -t."""
    meta = {
        "id": "r",
        "finish_reason": more.pop("finish", None),
        "weight_version": label,
        "completion_tokens": len(ids) if total is None else total,
        "output_token_logprobs": [[-float(t), t, None] for t in more.pop("entries", ids)],  # type: ignore[attr-defined]
        **more.pop("meta", {}),  # type: ignore[dict-item]
    }
    return json.dumps({"text": "".join(map(chr, ids)), "output_ids": ids, "meta_info": meta, **more}).encode()


def unlimited(samples: int) -> AnswerLimits:
    return AnswerLimits(None, False, 1 << 31, samples, None)


def taken(*chunks: bytes, samples: int = 1, sent_label: str | None = None, early: bool = False) -> PartialOutputs:
    partial = PartialOutputs(sent_label)
    partial.begin(unlimited(samples), early_boundary=early)
    for raw in chunks:
        assert partial.take(raw) is None
    return partial


def ids_and_spans(output: GenerateOutput | None) -> tuple[list[int], list[tuple[str, int, int]]] | None:
    if output is None:
        return None
    assert output.output_log_probs == [-float(token) for token in output.output_ids]
    return output.output_ids, [(span.version, span.start, span.end) for span in output.version_spans]


SPANS = [{"version": "v1", "start": 0, "end": 3}, {"version": "v2", "start": 3, "end": 5}]
# The same response in both forms: 1, then 2, 3, then an update, 4 and 5. The last chunk has spans, as SGLang's has.
WHOLE = [
    chunk([65]),
    chunk([65, 66, 67]),
    chunk([65, 66, 67, 68], label="v2"),
    chunk([65, 66, 67, 68, 69], label="v2", finish=FINISH, meta={"weight_versions": SPANS}),
]
NEWS = [
    chunk([65]),
    chunk([66, 67], 3),
    chunk([68], 4, label="v2"),
    chunk([69], 5, label="v2", finish=FINISH, meta={"weight_versions": SPANS}),
]


@pytest.mark.parametrize("chunks", [WHOLE, NEWS], ids=["whole", "news"])
def test_certain_is_what_came_before_another_label(chunks: list[bytes]) -> None:
    assert [ids_and_spans(taken(*chunks[:count]).certain()[0]) for count in range(5)] == [
        None,
        ([65], [("v1", 0, 1)]),
        ([65, 66, 67], [("v1", 0, 3)]),
        ([65, 66, 67], [("v1", 0, 3)]),
        ([65, 66, 67, 68, 69], [("v1", 0, 3), ("v2", 3, 5)]),
    ]
    partial = taken(*chunks)
    [output] = partial.outputs()
    assert partial.certain() == [output]
    assert (output.text, output.meta_info.completion_tokens, partial.tokens) == ("ABCDE", 5, 5)
    assert not taken(*chunks[:3]).complete
    with pytest.raises(StreamBroken, match=r"samples \[0\] of 1 had finished"):
        taken(*chunks[:3]).outputs()


def test_boundaries_are_moved_where_the_engine_reports_them_early() -> None:
    [output] = taken(*NEWS, early=True).outputs()
    assert output.version_spans == [VersionSpan("v1", 0, 4), VersionSpan("v2", 4, 5)]


@pytest.mark.parametrize("chunks", [
    [chunk([65]), chunk([66, 67], 3), chunk([67], 3, entries=[65, 66, 67], finish=ABORT)],
    # Both last chunks in one, as a slow reader gets them:
    [chunk([65, 66]), chunk([67, 67], 3, entries=[67, 65, 66, 67], finish=ABORT)],
    [chunk([65]), chunk([66, 67], 3), chunk([], 3, finish=ABORT)],
])  # fmt: skip
def test_an_abort_of_what_waits_repeats_no_token(chunks: list[bytes]) -> None:
    """SGLang then sends the last token again, and all log-probs."""
    [output] = taken(*chunks).outputs()
    assert ids_and_spans(output) == ([65, 66, 67], [("v1", 0, 3)])
    assert output.aborted


def test_a_label_change_without_spans_ends_a_response_where_it_is_certain() -> None:
    """Older servers report no spans: the response counts as aborted there, and its sender goes on from there."""
    [output] = taken(chunk([65, 66]), chunk([67], 3, label="v2", finish=FINISH)).outputs()
    assert output.aborted
    assert ids_and_spans(output) == ([65, 66], [("v1", 0, 2)])
    [unchanged] = taken(chunk([65, 66]), chunk([67], 3, finish=FINISH)).outputs()
    assert not unchanged.aborted
    assert ids_and_spans(unchanged) == ([65, 66, 67], [("v1", 0, 3)])


def test_samples_are_distinguished_by_index() -> None:
    partial = taken(chunk([65], index=1), chunk([66], index=0), chunk([67], 2, index=1, finish=FINISH), samples=3)
    assert [ids_and_spans(output) for output in partial.certain()] == [
        ([66], [("v1", 0, 1)]),
        ([65, 67], [("v1", 0, 2)]),
        None,
    ]
    assert partial.certain()[1].index == 1  # type: ignore[union-attr]
    assert (partial.tokens, partial.chunks) == (3, 3)
    with pytest.raises(StreamBroken, match="of sample 3, but the request has 3 samples"):
        partial.take(chunk([65], index=3))


def test_log_probs_of_other_tokens_are_an_error() -> None:
    with pytest.raises(StreamBroken, match="log-probs of response r are of other tokens"):
        taken(chunk([65, 66], entries=[65, 67], finish=FINISH)).outputs()


def test_a_partial_is_for_one_request() -> None:
    with pytest.raises(ValueError, match="holds one request"):
        taken(chunk([65])).begin(unlimited(1), early_boundary=False)


@given(st.lists(st.binary(max_size=20).filter(lambda b: b"\n" not in b and b"\r" not in b)), st.data())
def test_events_are_found_however_the_bytes_are_cut(payloads: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(b"data: " + payload + data.draw(st.sampled_from([b"\n\n", b"\r\n\r\n"])) for payload in payloads)
    stream = b": a comment\n" + stream + b"data: without its end"
    lines, found, start = EventLines(), [], 0
    while start < len(stream):
        end = data.draw(st.integers(start + 1, len(stream)))
        found += lines.feed(stream[start:end])
        start = end
    assert found == [payload.strip() for payload in payloads]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=12), st.booleans(), st.integers(0, 12), st.booleans())
def test_any_cut_of_a_stream_gives_a_true_prefix(sizes: list[int], whole: bool, change: int, spans: bool) -> None:
    """The chunks from `change` on are labelled v2, though the first of them may hold tokens of v1."""
    tokens = list(range(sum(sizes)))
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    for stop in range(len(sizes) + 1):
        sent, before = [], 0
        for index, end in enumerate(ends[:stop]):
            ids = tokens[:end] if whole else tokens[before:end]
            label = "v1" if index < change else "v2"
            true = [{"version": "v1", "start": 0, "end": end}]
            sent.append(chunk(ids, end, label=label, meta={"weight_versions": true} if spans else {}))
            before = end
        [found] = taken(*sent, sent_label="v1").certain()
        certain = ends[:stop][-1] if spans and stop else (ends[min(stop, change) - 1] if min(stop, change) else 0)
        assert ids_and_spans(found) == ((tokens[:certain], [("v1", 0, certain)]) if certain else None)


def event(raw: bytes) -> bytes:
    return b"data: " + raw + b"\n\n"


def rejected(code: int) -> bytes:
    return event(chunk([], 3, finish={**ABORT, "status_code": code}))


DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(("tail", "error", "words"), [
    ([], EngineUnreachable, r"ended without \[DONE\]"),
    ([*map(event, NEWS[2:])], EngineUnreachable, r"ended without \[DONE\]"),
    ([DONE], EngineUnreachable, r"before samples \[0\] of 1 had finished"),
    ([event(b'{"error":{"message":"too long","code":400}}'), DONE], EngineRefused, "with 400: too long"),
    ([event(b'{"error":{"message":"gone","code":503}}')], EngineUnreachable, "503: gone"),
    ([event(b'{"error":{"message":"gone","code":"no_worker"}}')], EngineUnreachable, "no_worker: gone"),
    ([event(b'{"error":"gone"}')], EngineUnreachable, "gone"),
    ([event(b"{]")], EngineProtocolError, "streamed b'{]'"),
    ([event(chunk([1], 9))], EngineProtocolError, "counts 9, after 3"),
    ([rejected(400), DONE], EngineRefused, "with 400: Abort in waiting queue"),
    ([rejected(503), DONE], EngineUnreachable, "with 503: Abort in waiting queue"),
])  # fmt: skip
async def test_however_a_stream_ends_what_came_is_kept(canned, tail: list[bytes], error, words: str) -> None:  # type: ignore[no-untyped-def]
    client, server = await canned(*map(event, NEWS[:2]), *tail)
    partial, request = PartialOutputs(), GenerateRequest(input_ids=[1, 2])
    with pytest.raises(error, match=words):
        await client.generate(request, partial=partial, headers={"X-Key": "k"})
    assert msgspec.json.decode(server.bodies[0])["stream"] is True
    assert server.headers[0]["X-Key"] == "k"
    [found] = partial.certain()
    assert found.output_ids[:3] == [65, 66, 67]


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The chunks that are decoded."""
    seen: list[bytes] = []
    original = module._decode_chunk
    monkeypatch.setattr(module, "_decode_chunk", lambda raw: (seen.append(raw), original(raw))[1])
    return seen


def test_nothing_is_decoded_twice(decoded: list[bytes]) -> None:
    """A cumulative stream is decoded once, at its end, whatever its length; one of news chunk by chunk, once each."""
    whole = [chunk(list(range(end)), finish=FINISH if end == 400 else None) for end in range(1, 401)]
    partial = taken(*whole)
    assert decoded == []
    partial.outputs()
    assert len(decoded) == 1
    decoded.clear()
    news = [chunk([end], end + 1, finish=FINISH if end == 399 else None) for end in range(400)]
    taken(*news).outputs()
    assert len(decoded) == 400


@pytest.mark.parametrize("cumulative", [True, False])
def test_news_are_given_out_once_and_each_chunk_is_decoded_once(cumulative: bool, decoded: list[bytes]) -> None:
    reported: list[int] = []
    partial = PartialOutputs(None, None, lambda index, entries: reported.extend(entry[1] for entry in entries))
    partial.begin(unlimited(1), early_boundary=False)
    for end in range(1, 101):
        ids = list(range(end)) if cumulative else [end - 1]
        partial.take(chunk(ids, None if cumulative else end))
    assert reported == list(range(100))
    assert len(decoded) == 100


# Streams of every engine in both forms, through the client: the same responses, and what is left of a broken one.


STREAMS = [*itertools.product(("embedded", "simulated"), (False, True)), *on_sglang("sglang", "sglang_overlap")]


@pytest.fixture(params=STREAMS, ids=lambda p: p if isinstance(p, str) else f"{p[0]}-{'news' if p[1] else 'whole'}")
async def streaming(request: pytest.FixtureRequest) -> AsyncIterator[Target]:
    """An engine that streams every 8 tokens, all so far or what is new."""
    kind, incremental = (request.param, False) if isinstance(request.param, str) else request.param
    async with opened(kind, request, stream_interval=8, incremental_streaming_output=incremental) as made:
        yield made


async def test_a_streamed_response_is_the_response(streaming: Target) -> None:
    partial = PartialOutputs()
    request = ask([[1, 2, 3], [4, 5]], n=2, max_new_tokens=90, temperature=0.0)
    in_stream = await streaming.client.generate(request, partial=partial)
    plain = await streaming.client.generate(request)
    assert [output.meta_info.prompt_tokens for output in in_stream] == [3, 3, 2, 2]
    assert [output.index for output in in_stream] == [0, 1, 2, 3]
    for ours, theirs in zip(in_stream, plain, strict=True):
        assert ours.version_spans == theirs.version_spans == [VersionSpan("first", 0, 90)]
        assert ours.meta_info.finish_reason == theirs.meta_info.finish_reason
        assert len(ours.output_ids) == len(ours.output_log_probs) == ours.meta_info.completion_tokens == 90
        assert ours.output_log_probs == pytest.approx(theirs.output_log_probs, abs=1e-4)  # greedy: whoever is beside it
    assert partial.complete
    assert (partial.tokens, partial.chunks >= 8) == (360, True)
    assert partial.certain() == in_stream


async def test_a_caller_that_stops_waiting_keeps_what_came_and_ends_the_request(streaming: Target) -> None:
    partial = PartialOutputs()
    task = asyncio.ensure_future(streaming.client.generate(ask([7, 8], max_new_tokens=900), partial=partial))
    await streamed(partial, 40)
    task.cancel()
    await until(lambda: idle(streaming), timeout_s=20.0)
    [prefix] = partial.certain()
    assert 40 <= len(prefix.output_ids) == len(prefix.output_log_probs) < 900
    assert prefix.version_spans == [VersionSpan("first", 0, len(prefix.output_ids))]
    rest = ask([7, 8, *prefix.output_ids], max_new_tokens=10)
    [resumed] = await streaming.client.generate(rest, partial=PartialOutputs())
    assert len(resumed.output_ids) == 10
