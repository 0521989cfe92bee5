"""Streamed responses: the received part of each sample, and how much of it is certain if the engine is lost.

Invariants:
- no version is guessed. SGLang names the versions span by span only in the last chunk of a response; an earlier chunk
  has the server's label at the time of sending, which may be newer than the tokens but never older. So the certain
  prefix of a sample ends before the first chunk whose label differs from the sample's first label. Chunks with spans
  (from our engines) are certain as a whole;
- chunks are cumulative or, with --incremental-streaming-output, hold new tokens only. The chunk's own count of tokens
  decides which, also for two odd chunks of SGLang 0.5.23: a cumulative chunk may hold more tokens than it counts (the
  surplus counts for the next chunk), and the last chunk of an incremental response that was aborted while it waited
  repeats its last token;
- a chunk is kept as bytes, and only its header is decoded on arrival; tokens are decoded once, at the end.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Final

import msgspec
from msgspec import Raw, Struct

from models.engines.answers import UNDECODABLE, AnswerLimits, with_spans
from models.engines.protocol import DEFAULT_LABEL, ErrorDetail, FinishReason, GenerateOutput, LogprobEntry, VersionSpan

_EMPTY: Final = Raw(b"[]")
_PREFIX: Final = b"data:"
DONE: Final = b"[DONE]"


class EventLines:
    """Splits a server-sent event stream into the payloads of its `data:` lines. Each byte is scanned once."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._seen = 0  # bytes of the buffer that hold no line end

    @property
    def waiting(self) -> int:
        """Bytes of a line that has not ended."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads completed by `data`."""
        found: list[bytes] = []
        self._buffer += data
        start = 0
        while (end := self._buffer.find(b"\n", max(start, self._seen))) >= 0:
            if self._buffer.startswith(_PREFIX, start):
                found.append(bytes(self._buffer[start + len(_PREFIX) : end].strip()))
            start = end + 1
        del self._buffer[:start]
        self._seen = len(self._buffer)
        return found


class _HeadMeta(Struct):
    id: str = ""
    finish_reason: FinishReason | None = None
    completion_tokens: int | None = None
    weight_version: str | None = None
    weight_versions: list[VersionSpan] | None = None


class _Head(Struct):
    """A chunk without its long lists: skipping them costs a fraction of decoding them."""

    meta_info: _HeadMeta = msgspec.field(default_factory=_HeadMeta)
    output_ids: Raw = _EMPTY
    index: int = 0
    error: ErrorDetail | str | None = None


_decode_head = msgspec.json.Decoder(_Head).decode
_decode_chunk = msgspec.json.Decoder(GenerateOutput).decode


class StreamBroken(Exception):
    """A chunk does not fit those before it. The client turns it into an `EngineProtocolError`."""


Part = tuple[bytes, int]  # a chunk, and the sample's count of tokens up to its end


@dataclass(slots=True)
class _Sample:
    """The received part of one sample. A cumulative chunk replaces the parts before it."""

    parts: list[Part] = field(default_factory=list)
    sure: list[Part] = field(default_factory=list)  # the certain parts
    label: str | None = None  # of the sample's first chunk
    spans: list[VersionSpan] | None = None  # of the certain tokens, if the engine reports spans
    foreign: bool = False  # a chunk had another label
    finish: FinishReason | None = None
    last: bytes = b""
    whole: GenerateOutput | None = None  # the finished response, decoded once
    reported: int = 0  # certain tokens that `news` has returned

    @property
    def tokens(self) -> int:
        return self.parts[-1][1] if self.parts else 0

    def take(self, raw: bytes, head: _Head, sent_label: str | None) -> None:
        """Add a chunk. Raises `StreamBroken` if it does not continue the sample."""
        meta, have = head.meta_info, self.tokens
        held = _count(head.output_ids)
        total = held if meta.completion_tokens is None else meta.completion_tokens
        ended = meta.finish_reason is not None
        whole = held >= total
        if not whole and total != have and not (have + held == total or (ended and have + held > total)):
            raise StreamBroken(f"a chunk of response {meta.id} brings {held} tokens and counts {total}, after {have}")
        self.last, self.finish = raw, meta.finish_reason
        if self.label is None:
            self.label = sent_label if sent_label is not None else meta.weight_version
        if whole:
            self.parts = [(raw, total)]
        elif total != have:
            self.parts.append((raw, total))
        if meta.weight_versions is not None:
            self.spans = meta.weight_versions
        else:
            self.foreign = self.foreign or meta.weight_version != self.label
            if self.spans is not None or self.foreign:
                return  # the versions of its tokens are not known
        if len(self.sure) + 1 == len(self.parts):
            self.sure.append(self.parts[-1])
        else:
            self.sure = self.parts[:]

    def news(self) -> list[LogprobEntry]:
        """The certain tokens since the last call. Each chunk is decoded once."""
        found: list[LogprobEntry] = []
        for raw, total in self.sure[bisect_right(self.sure, self.reported, key=itemgetter(1)) :]:
            chunk = _decode_chunk(raw)
            ids = chunk.output_ids
            start = self.reported if len(ids) >= total else 0  # else the chunk holds new tokens only
            entries = chunk.meta_info.output_token_logprobs or [(None, token, None) for token in ids]
            found += entries[start : start + total - self.reported]
            self.reported = total
        return found

    def certain(self, index: int, early_boundary: bool) -> GenerateOutput | None:
        """The certain tokens as an unfinished response, None without any; a finished response whole."""
        if self.finish is not None:
            return self.finished(index, early_boundary)
        if not self.sure or self.sure[-1][1] == 0:
            return None
        return self._with_spans(_join(self.sure, self.sure[-1][0], index), early_boundary)

    def finished(self, index: int, early_boundary: bool) -> GenerateOutput:
        """The whole response. If its label changed and the engine reports no spans, it counts as aborted at the end of
        its certain prefix: the caller continues from there."""
        if self.whole is None:
            cut = self.spans is None and self.foreign
            output = _join(self.sure if cut else self.parts, self.last, index)
            if cut:
                reason = FinishReason(type="abort", message="the weights changed, and the engine reports no spans")
                meta = msgspec.structs.replace(output.meta_info, finish_reason=reason)
                output = msgspec.structs.replace(output, meta_info=meta)
            self.whole = self._with_spans(output, early_boundary)
        return self.whole

    def _with_spans(self, output: GenerateOutput, early_boundary: bool) -> GenerateOutput:
        count = len(output.output_ids)
        spans = self.spans if self.spans is not None else [VersionSpan(self.label or DEFAULT_LABEL, 0, count)]
        return with_spans(output, spans, early_boundary)


class PartialOutputs:
    """The received part of one streamed request, for `EngineClient.generate(request, partial=...)`. Good for one call.

    `sent_label`: the label of the weights on every engine that could get the request, at the time of sending, if known.
    Then only chunks with this label are certain. Without it the label of a sample's first chunk counts; that is wrong
    if an update lands within the milliseconds between the first token and its chunk.
    `ended` is called at once for each finished sample, while other samples continue; not for a rejected sample, because
    a rejection is an error of the whole call. `grew` is called with new certain tokens (log-prob, id, text), `counted`
    with the number of certain tokens of a sample.
    """

    _limits: AnswerLimits

    def __init__(
        self,
        sent_label: str | None = None,
        ended: Callable[[int, GenerateOutput], None] | None = None,
        grew: Callable[[int, list[LogprobEntry]], None] | None = None,
        counted: Callable[[int, int], None] | None = None,
    ) -> None:
        self.sent_label, self._ended, self._grew, self._counted = sent_label, ended, grew, counted
        self.chunks = 0
        self._samples: list[_Sample] = []
        self._early_boundary = False

    @property
    def tokens(self) -> int:
        """Received tokens of all samples, certain or not."""
        return sum(sample.tokens for sample in self._samples)

    @property
    def complete(self) -> bool:
        """True if all samples have finished."""
        return bool(self._samples) and all(sample.finish is not None for sample in self._samples)

    def certain(self) -> list[GenerateOutput | None]:
        """By sample (prompt by prompt, the `n` samples of each side by side): the response if it has finished, else the
        prefix whose versions are certain, with its spans and without a finish reason; None if nothing is certain."""
        return [self.certain_of(index) for index in range(len(self._samples))]

    def outputs(self) -> list[GenerateOutput]:
        """All responses. Raises `StreamBroken` if one has not finished."""
        missing = [index for index, sample in enumerate(self._samples) if sample.finish is None]
        if missing:
            raise StreamBroken(f"the stream ended before samples {missing} of {len(self._samples)} had finished")
        return [sample.finished(index, self._early_boundary) for index, sample in enumerate(self._samples)]

    @property
    def most_bytes(self) -> float:
        """Of one event."""
        return self._limits.answer_bytes or math.inf

    def begin(self, limits: AnswerLimits, *, early_boundary: bool) -> None:
        """Called by the client before it sends the request."""
        if self._samples:
            raise ValueError("a PartialOutputs holds one request; make a new one for each call")
        self._samples = [_Sample() for _ in range(limits.samples)]
        self._limits = limits
        self._early_boundary = early_boundary

    def take(self, raw: bytes) -> ErrorDetail | str | None:
        """Add a chunk; returns the error if it is one. Raises `StreamBroken` or `msgspec.MsgspecError`."""
        head = _decode_head(raw)
        if head.error is not None:
            return head.error
        if not 0 <= head.index < len(self._samples):
            raise StreamBroken(f"a chunk is of sample {head.index}, but the request has {len(self._samples)} samples")
        sample, reason = self._samples[head.index], head.meta_info.finish_reason
        sample.take(raw, head, self.sent_label)
        self.chunks += 1
        try:
            self._check(max(sample.tokens, _count(head.output_ids)))  # a chunk may hold more than it counts
        except StreamBroken:
            self._samples[head.index] = _Sample()  # nothing of it is certain, not even its beginning
            raise
        if self._grew is not None and (news := sample.news()):
            if self._limits.log_probs:
                self._limits.check_entries(f"response {head.meta_info.id[:80]!r}", news)
            self._grew(head.index, news)
        if self._counted is not None and reason is None:
            self._counted(head.index, sample.sure[-1][1] if sample.sure else 0)
        if self._ended is not None and reason is not None and reason.status_code is None:
            self._ended(head.index, sample.finished(head.index, self._early_boundary))
        return None

    def _check(self, count: int) -> None:
        """Raises StreamBroken if no response of this request can have so many tokens."""
        if self.chunks > self._limits.chunks:
            raise StreamBroken(f"the stream has brought {self.chunks} chunks for {self.tokens} tokens, and no end")
        if self._limits.tokens is not None and count > self._limits.tokens:
            raise StreamBroken(f"a response has {count} new tokens, and {self._limits.tokens} were allowed")

    def certain_of(self, index: int) -> GenerateOutput | None:
        """As `certain`, for one sample. A sample whose chunks make no sense has no certain tokens."""
        try:
            return self._samples[index].certain(index, self._early_boundary)
        except (StreamBroken, *UNDECODABLE):
            return None

    def rejection(self) -> FinishReason | None:
        """Why the engine ended a sample with an error status, if it did: an answer not streamed would carry it."""
        reasons = [s.finish for s in self._samples if s.finish is not None and s.finish.status_code is not None]
        return next((reason for reason in reasons if reason.type == "abort"), None)


def _count(ids: Raw) -> int:
    """Entries of a JSON list of numbers."""
    text = bytes(ids)
    return text.count(b",") + 1 if text.strip(b"[] ") else 0


def _join(parts: list[Part], last: bytes, index: int) -> GenerateOutput:
    """One response, joined from its parts, with the meta information of its last chunk."""
    ids: list[int] = []
    entries: list[LogprobEntry] = []
    text: list[str] = []
    meta = None
    for raw, _ in parts:
        chunk = _decode_chunk(raw)
        ids += chunk.output_ids
        entries += chunk.meta_info.output_token_logprobs or ()
        text.append(chunk.text)
        meta = chunk.meta_info if raw is last else None
    meta = meta or _decode_chunk(last).meta_info
    count = parts[-1][1] if parts else 0
    del ids[count:], entries[count:]
    if entries and [token for _, token, _ in entries] != ids:
        raise StreamBroken(f"the log-probs of response {meta.id} are of other tokens than its output_ids")
    meta = msgspec.structs.replace(
        meta, output_token_logprobs=entries, output_token_logprobs_length=len(entries), completion_tokens=count
    )
    return GenerateOutput(meta_info=meta, text="".join(text), output_ids=ids, index=index)
