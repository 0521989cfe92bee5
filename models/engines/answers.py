"""Checks of a client: answers that do not fit their request, and requests that no server should get.

Invariant: no part of a refused answer is used. Every refusal names the value and the rule, and is a ValueError.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from models.engines.protocol import GenerateOutput, GenerateRequest, LogprobEntry, SamplingParams, VersionSpan
from models.errors import EngineAborted, EngineProtocolError

# Errors of decoding a hostile text: bad UTF-8 is a ValueError, deep nesting a RecursionError, a number of a million
# digits an OverflowError.
UNDECODABLE: Final = (msgspec.MsgspecError, ValueError, RecursionError, OverflowError, MemoryError)
INT32: Final = 1 << 31
ROUNDING: Final = 1e-3  # how far above 0 a log-prob in half precision may come
TEXT_PER_TOKEN: Final = 1024  # characters; the longest tokens of public vocabularies have some hundred
SLACK_BYTES: Final = 1 << 20
BYTES_PER_TOKEN: Final = 1 << 10  # of JSON: id, log-prob and text
EXPERT_BYTES_PER_TOKEN: Final = 1 << 14  # base64 of layers x top-k numbers
SLACK_CHUNKS: Final = 1000
_COUNTS: Final = ("cached_tokens", "num_retractions", "spec_num_correct_drafts", "spec_num_proposed_drafts")


class AnswerLimits(Struct, frozen=True):
    """Bounds of the answer to one request. `tokens`: most new tokens of a sample, None = the request has no limit."""

    tokens: int | None
    log_probs: bool
    vocab_size: int
    samples: int
    answer_bytes: int | None  # of the whole answer, or of one event of a stream; None = no limit

    @classmethod
    def of(cls, request: GenerateRequest, vocab_size: int | None) -> AnswerLimits:
        """The limits that follow from a request. `vocab_size`: of the served model, None if it is not known."""
        params = request.sampling_params
        wanted = [each.max_new_tokens for each in ([params] if isinstance(params, SamplingParams) else params)]
        tokens = None if None in wanted else max((n for n in wanted if n is not None), default=None)
        most: int | None = None
        if tokens is not None and request.input_ids is not None:
            context = max(map(len, request.prompts), default=0) + tokens
            each = BYTES_PER_TOKEN + (EXPERT_BYTES_PER_TOKEN if request.return_routed_experts else 0)
            most = request.samples * (SLACK_BYTES + context * each)
        return cls(tokens, request.return_logprob, vocab_size or INT32, request.samples, most)

    @property
    def chunks(self) -> float:
        """Most events of a stream: an engine sends at most one event for each token of each sample."""
        return math.inf if self.tokens is None else SLACK_CHUNKS + 2 * self.samples * self.tokens

    def check(self, output: GenerateOutput) -> None:
        """Raises ValueError for an answer that cannot be true or does not fit the request."""
        meta, ids = output.meta_info, output.output_ids
        count, name = len(ids), f"response {meta.id[:80]!r}"
        if self.tokens is not None and count > self.tokens:
            raise ValueError(f"{name} has {count} new tokens, and {self.tokens} were allowed")
        self._check_ids(name, ids)
        if len(output.text) > TEXT_PER_TOKEN * (count + 1):
            raise ValueError(f"{name} has a text of {len(output.text)} characters for {count} tokens")
        for field in _COUNTS:
            value = getattr(meta, field)
            if value is not None and not 0 <= value < INT32:
                raise ValueError(f"{name} has {field}={value}, which is no count")
        if self.log_probs:
            entries = meta.output_token_logprobs or []
            if [entry[1] for entry in entries] != ids:
                raise ValueError(f"{name}: its {len(entries)} log-probs are not those of its {count} output_ids")
            check_log_probs(name, entries)
        end = 0
        for span in output.version_spans:
            if span.start != end:
                raise ValueError(f"{name}: a span of versions begins at token {span.start}, not at {end}")
            end = span.end
        if end != count:
            raise ValueError(f"{name}: the spans of versions end at token {end} of {count}")

    def check_entries(self, name: str, entries: Sequence[LogprobEntry]) -> None:
        """Raises ValueError for an unknown token or an impossible log-prob."""
        self._check_ids(name, [entry[1] for entry in entries])
        check_log_probs(name, entries)

    def _check_ids(self, name: str, ids: Sequence[int]) -> None:
        if (bad := unknown_id(ids, self.vocab_size)) is not None:
            raise ValueError(f"{name} holds token {bad}, outside the vocabulary of {self.vocab_size}")


def check_log_probs(name: str, entries: Sequence[LogprobEntry]) -> None:
    """Raises ValueError for an impossible log-prob."""
    for value, token, _ in entries:
        if value is None or not -math.inf < value <= ROUNDING:
            raise ValueError(f"{name}: token {token} has the log-prob {value}; it must be finite and at most 0")


def input_scores(url: str, output: GenerateOutput, count: int) -> npt.NDArray[np.float32]:
    """[count] log-probs of the last tokens of a scored prompt, by the engine at `url`. Raises EngineAborted if another
    client ended the request, and EngineProtocolError for log-probs that are missing or impossible."""
    if output.aborted:
        reason = output.meta_info.finish_reason
        raise EngineAborted(url, (reason and reason.message) or "no reason was given")
    name, entries = f"response {output.meta_info.id[:80]!r}", output.meta_info.input_token_logprobs or []
    scored = [entry for entry in entries[max(len(entries) - count, 0) :] if entry[0] is not None]  # the first never is
    if len(scored) != count:
        raise EngineProtocolError(url, f"{name} scores {len(scored)} of {count} prompt tokens")
    try:
        check_log_probs(name, scored)
    except ValueError as error:
        raise EngineProtocolError(url, str(error)) from error
    return np.array([value for value, _, _ in scored], dtype=np.float32)


# --------------------------------------------------------------------------------------------------
# Which version made which tokens of a response: fill in missing spans, correct boundaries.
#
# Invariant: spans are half-open, in order, without gaps, and end with the response.


def with_spans(output: GenerateOutput, spans: Sequence[VersionSpan], early_boundary: bool = False) -> GenerateOutput:
    """The response with these spans, as far as it has tokens; see `later_boundaries` for `early_boundary`."""
    count = len(output.output_ids)
    moved = later_boundaries(spans) if early_boundary else spans
    kept = [VersionSpan(s.version, s.start, min(s.end, count)) for s in moved if s.start < min(s.end, count)]
    last = kept[-1].version if kept else output.meta_info.weight_version
    meta = msgspec.structs.replace(output.meta_info, weight_versions=kept, weight_version=last)
    return msgspec.structs.replace(output, meta_info=meta)


def later_boundaries(spans: Sequence[VersionSpan]) -> list[VersionSpan]:
    """Spans with every interior boundary one token later.

    With its overlap scheduler on, SGLang 0.5.23 has one step in flight when it is paused in_place: the earlier weights
    computed the first token after the reported boundary (pinned by a contract test).
    """
    moved: list[VersionSpan] = []
    for index, span in enumerate(spans):
        start = span.start + (index > 0)
        end = span.end + (index < len(spans) - 1)
        if start < min(end, spans[-1].end):
            moved.append(VersionSpan(span.version, start, min(end, spans[-1].end)))
    return moved


# --------------------------------------------------------------------------------------------------
# Requests that a client refuses to send: a server would die, refuse them only after a queue, or serve nonsense.
#
# Invariant: every refusal names the field, the value, the rule and the cure, and is a ValueError: sending the same
# request elsewhere cannot help.


# Field, lowest value, highest value, and the rule in words. NaN fits nowhere.
_RANGES: Final = (
    ("temperature", 0.0, sys.float_info.max, "a finite number 0 or more"),
    ("top_p", math.nextafter(0.0, 1.0), 1.0, "a finite number in (0, 1]"),
    ("min_p", 0.0, 1.0, "a finite number in [0, 1]"),
    ("frequency_penalty", -2.0, 2.0, "a finite number in [-2, 2]"),
    ("presence_penalty", -2.0, 2.0, "a finite number in [-2, 2]"),
    ("repetition_penalty", 0.0, 2.0, "a finite number in [0, 2]"),
    ("n", 1, math.inf, "at least 1"),
    ("stream_interval", 1, math.inf, "at least 1"),
    ("max_new_tokens", 0, math.inf, "0 or more"),
    ("min_new_tokens", 0, math.inf, "0 or more"),
)


def check_request(request: GenerateRequest, vocab_size: int | None = None) -> None:
    """Raises ValueError for a request that must not be sent. `vocab_size`: of the served model, where it is known:
    SGLang 0.5.23 ends with all its requests when a prompt holds an id outside the vocabulary."""
    params = request.sampling_params
    for rule in params if isinstance(params, list) else [params]:
        check_params(rule)
    if isinstance(params, list) and request.input_ids is not None and len(params) != len(request.prompts):
        raise ValueError(f"sampling_params has {len(params)} entries for {len(request.prompts)} prompts; send one each")
    size = vocab_size or INT32
    for prompt in request.prompts:
        if not prompt:
            raise ValueError("input_ids holds an empty prompt; a prompt needs at least one token")
        if (bad := unknown_id(prompt, size)) is not None:
            raise ValueError(
                f"input_ids contains {bad}, outside the vocabulary of {size} tokens; "
                "tokenize with the tokenizer of the served model"
            )


def check_params(params: SamplingParams) -> None:
    """Raises ValueError for numbers that no engine samples with."""
    for name, lowest, highest, rule in _RANGES:
        value = getattr(params, name)
        if value is not None and not lowest <= value <= highest:
            raise ValueError(f"{name}={value} must be {rule}")
    if params.top_k != -1 and params.top_k < 1:
        raise ValueError(f"top_k={params.top_k} must be -1 (all) or at least 1")
    if params.max_new_tokens is not None and params.min_new_tokens > params.max_new_tokens:
        raise ValueError(
            f"min_new_tokens={params.min_new_tokens} must not exceed max_new_tokens={params.max_new_tokens}"
        )


def unknown_id(ids: Sequence[int], vocab_size: int) -> int | None:
    """The first of some token ids that is outside the vocabulary."""
    if not ids or 0 <= min(ids) <= max(ids) < vocab_size:
        return None
    return next(token for token in ids if not 0 <= token < vocab_size)
