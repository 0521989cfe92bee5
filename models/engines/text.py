"""Token ids to text and back, from a checkpoint's `tokenizer.json`. Light: the `tokenizers` library only.

Invariant: a directory without a tokenizer still serves token ids; text is then empty, and the intake
refuses requests that need text (a text prompt, a stop string).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.errors import EngineStartError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
import asyncio
from typing import Final

import msgspec

from models.engines.core import Completion
from models.engines.protocol import CachedDetails, GenerateOutput, LogprobEntry, MetaInfo


class TextCodec:
    """Decodes and encodes with one tokenizer, or with none."""

    def __init__(self, tokenizer: Tokenizer | None, eos_id: int | None) -> None:
        self._tokenizer = tokenizer
        self.eos_id = eos_id

    @classmethod
    def load(cls, directory: Path) -> TextCodec:
        """The tokenizer of a Hugging Face directory; an empty codec if there is none."""
        path = directory / "tokenizer.json"
        if not path.is_file():
            return cls(None, None)
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise EngineStartError(f"tokenizer.json of {directory} cannot be read: {error}; save it again") from error
        return cls(tokenizer, _eos_id(directory, tokenizer))

    @property
    def available(self) -> bool:
        return self._tokenizer is not None

    def encode(self, text: str) -> list[int]:
        assert self._tokenizer is not None, "the intake refuses text without a tokenizer"
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        if self._tokenizer is None or not ids:
            return ""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)
        return text

    def decode_many(self, rows: Sequence[Sequence[int]], skip_special: bool) -> list[str]:
        """One call for all rows: the library then decodes them without holding the interpreter."""
        if self._tokenizer is None:
            return [""] * len(rows)
        texts: list[str] = self._tokenizer.decode_batch([list(row) for row in rows], skip_special_tokens=skip_special)
        return texts


def _eos_id(directory: Path, tokenizer: Any) -> int | None:
    path = directory / "tokenizer_config.json"
    if not path.is_file():
        return None
    token = json.loads(path.read_text()).get("eos_token")
    if isinstance(token, dict):  # written as an AddedToken
        token = token.get("content")
    found: int | None = tokenizer.token_to_id(token) if isinstance(token, str) else None
    return found


def find_stop(text: str, stops: Sequence[str]) -> str | None:
    """The stop string that occurs first in `text`, None if none does."""
    hits = [(place, stop) for stop in stops if (place := text.find(stop)) >= 0]
    return min(hits)[1] if hits else None


def ends_within_stop(text: str, stops: Sequence[str]) -> bool:
    """Whether a text ends with the beginning of a stop string, so that the next tokens may complete it."""
    return any(text.endswith(stop[:length]) for stop in stops for length in range(1, len(stop)))


def tail_tokens(stops: Sequence[str]) -> int:
    """How many last tokens must be decoded to see any stop string that the newest token completes: each token that
    shows at all carries a byte or more; the margin is for special tokens that are skipped."""
    return max(len(stop.encode()) for stop in stops) + 8


# --------------------------------------------------------------------------------------------------
# From completions to answers: text, meta information, the JSON of /generate and its stream.
#
# Invariants:
# - a chunk of a stream is cumulative (text, ids and log-probs from 0), the default of SGLang, or holds new tokens; in
#   both it counts all tokens, and names the versions of all of them: SGLang does that in the last chunk only;
# - a completion's lists may grow in another thread while a chunk is built, so lengths are read once.


_HALF: Final = "\ufffd"  # what a decoder writes for a character of which bytes are missing


class Reply:
    """Waits for the completions of one request. Lives in the event loop."""

    def __init__(self, completions: Sequence[Completion]) -> None:
        self.completions = completions
        self._open = {id(completion) for completion in completions}
        self._finished = asyncio.Event()
        self._changed = asyncio.Event()

    def notify(self, completion: Completion) -> None:
        """A completion finished or made progress."""
        if completion.finish is not None:
            self._open.discard(id(completion))
            if not self._open:
                self._finished.set()
        self._changed.set()

    async def finished(self) -> None:
        """Wait for all completions; unblocked by the delivery of the last one."""
        await self._finished.wait()

    async def progress(self) -> bool:
        """Wait for progress of any completion; False once all have finished."""
        await self._changed.wait()
        self._changed.clear()
        return bool(self._open)


def outputs(completions: Sequence[Completion], codec: TextCodec, label: str, log_probs: bool) -> list[GenerateOutput]:
    """The answers to finished completions, in their order."""
    texts = _texts(completions, codec)
    return [output(c, text, label, log_probs) for c, text in zip(completions, texts, strict=True)]


def output(completion: Completion, text: str, label: str, log_probs: bool, count: int | None = None) -> GenerateOutput:
    """The answer to one completion; `count` limits it to its first tokens (a chunk of a stream)."""
    ids = completion.output_ids if count is None else completion.output_ids[:count]
    meta = _meta(completion, ids, label, log_probs, finished=count is None)
    return GenerateOutput(text=text, output_ids=ids, meta_info=meta)


class Chunks:
    """Chunks of one streamed completion, the `index`-th of its request. In an incremental stream, the text of a chunk
    is the difference between the text so far and the text before."""

    def __init__(
        self, completion: Completion, index: int, codec: TextCodec, *, log_probs: bool, incremental: bool
    ) -> None:
        self.completion = completion
        self._index, self._codec, self._log_probs, self._incremental = index, codec, log_probs, incremental
        self._sent = 0
        self._text = ""

    def next(self, label: str, ended: bool) -> GenerateOutput | None:
        """The next chunk; None if there is not enough for one."""
        c = self.completion
        count = min(len(c.output_ids), len(c.log_probs))
        if ended:
            [chunk] = outputs([c], self._codec, label, self._log_probs)
        elif c.stream and count - self._sent >= (c.stream_interval if self._sent else 1):
            text = self._codec.decode(c.output_ids[:count], c.rule.skip_special_tokens)
            text = text.rstrip(_HALF)  # the rest of the character is still to come
            chunk = output(c, text, label, self._log_probs, count)
        else:
            return None
        chunk = msgspec.structs.replace(chunk, index=self._index)
        sent = self._news(chunk) if self._incremental else chunk
        self._sent, self._text = len(chunk.output_ids), chunk.text
        return sent

    def _news(self, chunk: GenerateOutput) -> GenerateOutput:
        meta, sent = chunk.meta_info, self._sent
        if meta.output_token_logprobs is not None:
            meta = msgspec.structs.replace(meta, output_token_logprobs=meta.output_token_logprobs[sent:])
        text = chunk.text[len(self._text) :]
        return msgspec.structs.replace(chunk, text=text, output_ids=chunk.output_ids[sent:], meta_info=meta)


def _meta(c: Completion, ids: list[int], label: str, log_probs: bool, finished: bool) -> MetaInfo:
    count = len(ids)
    spans = c.spans_over(count)
    duration = c.finished_s - c.received_s if finished else None
    decode_s = c.finished_s - c.first_token_s if c.first_token_s else 0.0
    out: list[LogprobEntry] | None = None
    scored: list[LogprobEntry] | None = None
    if log_probs:
        out = [(value, token, None) for value, token in zip(c.log_probs, ids, strict=False)]
        prompt = c.prompt[c.score_from :].tolist() if c.score_from >= 0 else []
        scored = [(value, token, None) for value, token in zip(c.prompt_log_probs, prompt, strict=False)]
    return MetaInfo(
        id=c.rid,
        finish_reason=c.finish if finished else None,
        prompt_tokens=c.prompt_tokens,
        completion_tokens=count,
        cached_tokens=c.cached_tokens,
        cached_tokens_details=CachedDetails(device=c.cached_tokens) if c.cached_tokens else None,
        weight_version=spans[-1].version if spans else label,
        weight_versions=spans,
        num_retractions=c.retractions,
        input_token_logprobs=scored,
        output_token_logprobs=out,
        output_token_logprobs_length=count if log_probs else None,
        e2e_latency=duration,
        queue_time=max(0.0, c.admitted_s - c.received_s) if c.admitted_s else None,
        first_token_latency=c.first_token_s - c.received_s if c.first_token_s else None,
        decode_throughput=(count - 1) / decode_s if finished and decode_s > 0 and count > 1 else None,
    )


def _texts(completions: Sequence[Completion], codec: TextCodec) -> list[str]:
    """Text without what ended it (unless the request keeps it): a stop token's ids stay in `output_ids`, and so do the
    tokens of a stop string."""
    ends = [c.finish.matched if c.finish is not None and not c.rule.no_stop_trim else None for c in completions]
    rows = [
        c.output_ids[:-1] if isinstance(end, int) else c.output_ids for c, end in zip(completions, ends, strict=True)
    ]
    skip = {completion.rule.skip_special_tokens for completion in completions}
    if len(skip) == 1:
        texts = codec.decode_many(rows, skip.pop())
    else:
        texts = [codec.decode(row, c.rule.skip_special_tokens) for row, c in zip(rows, completions, strict=True)]
    return [text.partition(end)[0] if isinstance(end, str) else text for text, end in zip(texts, ends, strict=True)]
