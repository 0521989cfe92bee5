"""What a client refuses to send, because a server would die of it, refuse it only after a queue, or serve nonsense.

Invariant: every refusal names the field, the value, the rule and the cure, and is a ValueError: sending the same
request elsewhere cannot help.
"""

from __future__ import annotations

import math
from typing import Final

from msgspec import Struct

from models.engines.protocol import GenerateRequest, SamplingParams

_INT32: Final = 1 << 31
# Field, lowest value, highest value, and the rule in words. Infinity and NaN fit nowhere.
_RANGES: Final = (
    ("temperature", 0.0, math.inf, "0 or more"),
    ("top_p", math.nextafter(0.0, 1.0), 1.0, "in (0, 1]"),
    ("min_p", 0.0, 1.0, "in [0, 1]"),
    ("frequency_penalty", -2.0, 2.0, "in [-2, 2]"),
    ("presence_penalty", -2.0, 2.0, "in [-2, 2]"),
    ("repetition_penalty", 0.0, 2.0, "in [0, 2]"),
)


class RequestLimits(Struct):
    """Limits of one served model, in tokens; None where they are not known.

    SGLang 0.5.23 ends with all its requests when a prompt holds an id outside the vocabulary.
    """

    vocab_size: int | None = None
    context_length: int | None = None

    def check(self, request: GenerateRequest) -> None:
        """Raises ValueError for what must not be sent."""
        params = request.sampling_params
        by_prompt = params if isinstance(params, list) else [params] * max(1, len(request.prompts))
        for rule in by_prompt if isinstance(params, list) else by_prompt[:1]:
            _check_numbers(rule)
        if isinstance(params, list) and request.input_ids is not None and len(params) != len(request.prompts):
            raise ValueError(
                f"sampling_params has {len(params)} entries for {len(request.prompts)} prompts; send one each"
            )
        for prompt, rule in zip(request.prompts, by_prompt, strict=False):
            self._check_ids(prompt)
            self._check_length(len(prompt), rule.max_new_tokens)

    def _check_ids(self, prompt: list[int]) -> None:
        if not prompt:
            raise ValueError("input_ids holds an empty prompt; a prompt needs at least one token")
        size = self.vocab_size or _INT32
        if not 0 <= min(prompt) <= max(prompt) < size:
            bad = next(token for token in prompt if not 0 <= token < size)
            raise ValueError(
                f"input_ids contains {bad}, outside the vocabulary of {size} tokens; "
                "tokenize with the tokenizer of the served model"
            )

    def _check_length(self, prompt_tokens: int, max_new_tokens: int | None) -> None:
        limit = self.context_length
        if limit is not None and (prompt_tokens >= limit or prompt_tokens + (max_new_tokens or 0) > limit):
            raise ValueError(
                f"input_ids has {prompt_tokens} tokens and max_new_tokens={max_new_tokens}, and the model's "
                f"context length is {limit}, of which the prompt must leave at least one; shorten one of them"
            )


def _check_numbers(params: SamplingParams) -> None:
    for name, lowest, highest, rule in _RANGES:
        value = getattr(params, name)
        if not (math.isfinite(value) and lowest <= value <= highest):
            raise ValueError(f"{name}={value} must be a finite number {rule}")
    if params.n < 1:
        raise ValueError(f"n={params.n} must be at least 1")
