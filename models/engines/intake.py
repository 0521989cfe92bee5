"""From a /generate body to completions: defaults, validation, and refusals in SGLang's words.

Invariants: every accepted request can be served (its longest possible context fits a slot); a field that this engine
does not serve is refused if it is set, never silently ignored.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from operator import attrgetter
from typing import Final

import msgspec
import numpy as np

from models.engines.answers import check_params, unknown_id
from models.engines.core import Completion, EngineFacts
from models.engines.noise import sample_seed
from models.engines.protocol import GenerateRequest, SamplingParams
from models.engines.text import TextCodec
from models.errors import RequestRefused

_NOT_SERVED: Final = (
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "stop_regex",
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
    "custom_params",
    "beam_width",
)
_NOT_SERVED_TOP: Final = ("top_logprobs_num", "token_ids_logprob", "return_routed_experts", "return_hidden_states")
_DEFAULTS: Final = SamplingParams()
_TOP_DEFAULTS: Final = GenerateRequest()
# All of them in one call: a request is checked at once, and field by field only to say which one is wrong.
_unserved: Final = attrgetter(*_NOT_SERVED)
_unserved_top: Final = attrgetter(*_NOT_SERVED_TOP)
_UNSET: Final = (_unserved(_DEFAULTS), _unserved_top(_TOP_DEFAULTS))


class Intake:
    """Turns requests into completions. `draw_seed` gives the seed of a request that brings none, `stream_interval` the
    tokens of a chunk of one that does not say; 0: a stream of it has one chunk for each response, when that has ended.
    """

    def __init__(
        self, facts: EngineFacts, text: TextCodec, draw_seed: Callable[[], int], stream_interval: int = 0
    ) -> None:
        self._facts, self._text = facts, text
        self._stream_interval, self._draw_seed = stream_interval, draw_seed
        self._groups = itertools.count()
        self._decoder = msgspec.json.Decoder(GenerateRequest)

    def parse(self, body: bytes) -> GenerateRequest:
        """Decode a body; raises `RequestRefused`."""
        try:
            return self._decoder.decode(body)
        except msgspec.ValidationError as error:
            raise RequestRefused(_in_sglangs_words(str(error)), shaped=False) from error
        except msgspec.DecodeError as error:
            raise RequestRefused(f"the body is not JSON: {error}", shaped=False) from error

    def expand(self, request: GenerateRequest) -> tuple[list[Completion], bool]:
        """All completions of a request, prompt by prompt, and whether the answer is a list."""
        prompts = self._prompts(request)
        many = bool(request.text) if isinstance(request.text, list) else len(request.prompts) > 1
        many = many or bool(request.input_ids and isinstance(request.input_ids[0], list))
        params = request.sampling_params
        rules = params if isinstance(params, list) else [params] * len(prompts)
        if len(rules) != len(prompts):
            raise RequestRefused(f"sampling_params has {len(rules)} entries for {len(prompts)} prompts; send one each")
        for name in _NOT_SERVED_TOP if _unserved_top(request) != _UNSET[1] else ():
            if getattr(request, name) != getattr(_TOP_DEFAULTS, name):
                raise RequestRefused(f"{name} is not served by the {self._facts.engine} engine; leave it unset")
        rids = self._rids(request, len(prompts))
        completions: list[Completion] = []
        for rid, prompt, rule in zip(rids, prompts, rules, strict=True):
            completions += self._one_prompt(request, rid, prompt, rule)
        return completions, many or any(rule.n > 1 for rule in rules)

    def _prompts(self, request: GenerateRequest) -> list[list[int]]:
        if request.input_ids is not None and request.text is not None:
            raise RequestRefused("both text and input_ids are set; send one of them")
        if request.text is not None:
            if not self._text.available:
                raise RequestRefused("text is set, but the served model has no tokenizer.json; send input_ids")
            texts = request.text if isinstance(request.text, list) else [request.text]
            prompts = [self._text.encode(text) for text in texts]
        else:
            prompts = request.prompts
        if not prompts or not all(prompts):
            raise RequestRefused("a prompt is empty; input_ids or text must hold at least one token")
        if any(set(map(type, prompt)) != {int} for prompt in prompts):
            raise RequestRefused("input_ids mixes token ids and lists; send one list of ids, or a list of such lists")
        return prompts

    def _rids(self, request: GenerateRequest, count: int) -> list[str]:
        rid = request.rid
        if rid is None:
            return [os.urandom(16).hex() for _ in range(count)]
        if isinstance(rid, str):
            return [rid] if count == 1 else [f"{rid}_{index}" for index in range(count)]
        if len(rid) != count:
            raise RequestRefused(f"rid has {len(rid)} entries for {count} prompts; send one each")
        return rid

    def _one_prompt(
        self, request: GenerateRequest, rid: str, prompt: list[int], params: SamplingParams
    ) -> list[Completion]:
        self._check_params(params)
        size = self._facts.vocab_size
        if (bad := unknown_id(prompt, size)) is not None:
            raise RequestRefused(
                f"The input_ids contain {bad}, outside the vocabulary of {size} tokens (ids 0 to {size - 1})."
            )
        max_new = self._budget(len(prompt), params)
        ids = np.asarray(prompt, dtype=np.int32)
        key = ids.tobytes()
        strings = (params.stop,) if isinstance(params.stop, str) else tuple(params.stop or ())
        strings = tuple(stop for stop in strings if stop)
        if strings and not self._text.available:
            raise RequestRefused("stop is set, but the served model has no tokenizer.json; use stop_token_ids")
        stop_ids = () if params.ignore_eos else (*(params.stop_token_ids or ()), *sorted(self._facts.eos_ids))
        seed = params.sampling_seed if params.sampling_seed is not None else self._draw_seed()
        group = next(self._groups)
        score_from = self._score_from(request, len(prompt))
        interval = params.stream_interval or self._stream_interval
        return [
            Completion(
                rid=rid if params.n == 1 else f"{rid}_{sample}",
                group=group,
                sample=sample,
                prompt=ids,
                prompt_key=key,
                rule=params,
                seed=sample_seed(seed, sample),
                max_new=max_new,
                stop_ids=stop_ids,
                stop_strings=strings,
                stream=request.stream and interval > 0,
                stream_interval=max(interval, 1),
                extra_key=request.extra_key or "",
                score_from=score_from,
                score_temperature=request.input_logprob_temperature or 1.0,
            )
            for sample in range(params.n)
        ]

    def _score_from(self, request: GenerateRequest, prompt_tokens: int) -> int:
        """Where the scores of a prompt begin, -1 if there are none."""
        start = request.logprob_start_len
        temperature = request.input_logprob_temperature
        if temperature is not None and temperature <= 0.0:
            raise RequestRefused(f"input_logprob_temperature={temperature} must be above 0")
        if start < -1:
            raise RequestRefused(f"logprob_start_len={start} must be -1 (no scores) or a position of the prompt")
        if not request.return_logprob or start == -1:
            return -1
        if start > prompt_tokens:
            raise RequestRefused(
                f"logprob_start_len={start} is higher than the number of input tokens {prompt_tokens}. Please use a "
                "smaller logprob_start_len."
            )
        return start if start < prompt_tokens else -1

    def _check_params(self, params: SamplingParams) -> None:
        for name in _NOT_SERVED if _unserved(params) != _UNSET[0] else ():
            if getattr(params, name) != getattr(_DEFAULTS, name):
                raise RequestRefused(f"{name} is not served by the {self._facts.engine} engine; leave it unset")
        try:
            check_params(params)
        except ValueError as error:
            raise RequestRefused(str(error)) from error

    def _budget(self, prompt_tokens: int, params: SamplingParams) -> int:
        limit = self._facts.context_length
        if prompt_tokens >= limit:
            raise RequestRefused(
                f"The input ({prompt_tokens} tokens) is longer than the model's context length ({limit} tokens)."
            )
        if params.max_new_tokens is None:
            return limit - prompt_tokens
        total = prompt_tokens + params.max_new_tokens
        if total > limit:
            raise RequestRefused(
                f"Requested token count exceeds the model's maximum context length of {limit} tokens: "
                f"{prompt_tokens} in the input and {params.max_new_tokens} to be generated make {total}."
            )
        return params.max_new_tokens


def _in_sglangs_words(message: str) -> str:
    """SGLang names the field and the known ones: "unknown field `x`, expected one of ..."."""
    if "unknown field" not in message:
        return message
    name = message.split("`")[1]
    known = ", ".join(f"`{field}`" for field in SamplingParams.__struct_fields__)
    return f"unknown field `{name}`, expected one of {known}"
