"""Routes for clients that send tokens: vLLM's POST /inference/v1/generate and SGLang's POST /generate.

The engine gets the client's tokens unchanged. Every answer has the log-probs and weight versions of its tokens, also
without `logprobs` in the request.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import msgspec
from msgspec import Struct

from models.engines.protocol import FinishReason, GenerateOutput, MetaInfo, VersionSpan
from stages.gateway.answers import Answer, Ask, Dialect, Json, Refused, Sampling, event, texts
from stages.gateway.chat_completions import OpenAIErrors
from stages.gateway.requests import decode


class SamplingParams(Struct, frozen=True):
    """Sampling parameters of both routes."""

    max_tokens: int | None = None
    max_new_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    n: int | None = None
    no_stop_trim: bool | None = None


class TokensRequest(Struct, frozen=True):
    token_ids: list[int]
    model: str = "policy"
    sampling_params: SamplingParams = SamplingParams()
    stream: bool | None = None


class SglangRequest(Struct, frozen=True):
    input_ids: list[int] | None = None
    text: str | None = None
    sampling_params: SamplingParams = SamplingParams()
    stream: bool | None = None


class VllmGenerate(OpenAIErrors):
    def read(self, body: bytes) -> Ask:
        parsed = decode(body, TokensRequest)
        if parsed.stream:
            raise Refused("invalid", "stream is not supported on this route; leave it out")
        return _ask(parsed.model, parsed.sampling_params, parsed.token_ids)

    def answer(self, ask: Ask, answer: Answer) -> Json:
        choice = {
            "index": 0,
            "token_ids": answer.token_ids,
            "finish_reason": "length" if answer.finish == "length" else "stop",
            "logprobs": {"content": answer.token_log_probs},
        }
        return {"request_id": answer.id, "choices": [choice], "prompt_logprobs": None}

    def events(self, ask: Ask, answer: Answer) -> Iterator[bytes]:
        raise NotImplementedError("`read` refuses streams")


class SglangGenerate(Dialect):
    """One prompt to a request. A stream is one cumulative chunk, as in SGLang."""

    def read(self, body: bytes) -> Ask:
        request = decode(body, SglangRequest)
        if (request.input_ids is None) == (request.text is None):
            raise Refused("invalid", "give either input_ids or text")
        ids, text = request.input_ids or (), request.text or ""
        return _ask("policy", request.sampling_params, ids, text, stream=bool(request.stream))

    def answer(self, ask: Ask, answer: Answer) -> Json:
        ends = list(itertools.accumulate(run.n_tokens for run in answer.runs))
        runs = zip(answer.runs, ends, strict=True)
        spans = [VersionSpan(str(run.version), end - run.n_tokens, end) for run, end in runs]
        n, cut = len(answer.token_ids), answer.finish == "length"
        log_probs = zip(answer.log_probs, answer.token_ids, strict=True)
        meta = MetaInfo(
            id=answer.id,
            finish_reason=FinishReason("length", length=n) if cut else FinishReason("stop", answer.stop or None),
            prompt_tokens=len(answer.prompt_ids),
            completion_tokens=n,
            cached_tokens=answer.cached_tokens,
            weight_version=spans[-1].version if spans else None,
            weight_versions=spans,
            output_token_logprobs=[(value, token, None) for value, token in log_probs],
            output_token_logprobs_length=n,
        )
        output = GenerateOutput(meta_info=meta, text=answer.text, output_ids=list(answer.token_ids))
        return msgspec.to_builtins(output)  # type: ignore[no-any-return]

    def events(self, ask: Ask, answer: Answer) -> Iterator[bytes]:
        yield event(self.answer(ask, answer))
        yield b"data: [DONE]\n\n"

    def error(self, refused: Refused) -> Json:
        return {"error": {"message": refused.message}}


def _ask(model: str, params: SamplingParams, ids: Sequence[int], text: str = "", *, stream: bool = False) -> Ask:
    if (params.n or 1) != 1:
        raise Refused("invalid", f"n is {params.n}; the gateway gives one answer to a request: send more requests")
    return Ask(
        model,
        ids=tuple(ids),
        text=text,
        max_tokens=params.max_new_tokens if params.max_tokens is None else params.max_tokens,
        stop=texts(params.stop),
        stop_token_ids=tuple(params.stop_token_ids or ()),
        keep_stop=bool(params.no_stop_trim),
        sampling=Sampling(params.temperature, params.top_p, params.top_k),
        stream=stream,
    )
