"""What a caller may ask of engines: a sampled answer, or log-probs of tokens that are there. No engine is named in it.

Invariant: a request says whose weights it wants (`policy`), never which engine: it may be answered by several, one
after the other, each of which gets it with what the ones before it made (`on_the_wire`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from models.engines.noise import sample_seed
from models.engines.protocol import GenerateRequest, SamplingParams
from stages.engine_entries import POLICY
from stages.sampling.slots import FIRST_COME

SHORT_RESPONSE: Final = 16  # tokens; the members of a request for so few end within milliseconds of each other


@dataclass(frozen=True)
class SampleRequest:
    """`params.n` answers to one context, the members of the request. A partial answer that the caller has already is
    part of `token_ids`.

    With `engine_s` a member is given back as it is when engines have worked on it for so long; waiting for one does not
    count. With `deadline_s` the whole call, waiting included, fails at that time, and until then is sent again as often
    as it is lost; without, losses are counted.
    """

    params: SamplingParams  # max_new_tokens and sampling_seed are those of the request, whatever pieces it comes in
    token_ids: Sequence[int] = ()
    text: str = ""  # instead of token ids, for an engine to tokenise
    prompt_length: int = 0  # tokens that all requests of a prompt have in common; 0: all
    policy: str = POLICY
    session: str = ""  # requests of one session go to one engine, where the policy of routing heeds it
    returning: bool = False  # it has been here before, and goes before those that have not
    order: tuple[int, int] = FIRST_COME  # smaller ones go first, among those that are alike in this
    log_probs: bool = True
    pinned_version: int = -1  # engines with this version come first
    priority: int | None = None  # in the engine's queue
    engine_s: float | None = None
    deadline_s: float | None = None

    @property
    def n(self) -> int:
        return self.params.n


@dataclass(frozen=True)
class ScoreRequest:
    """Log-probs of `token_ids[start:]`, each given all tokens before it, of log_softmax(logits / temperature)."""

    token_ids: npt.NDArray[np.int32]
    start: int
    temperature: float = 1.0
    policy: str = POLICY
    session: str = ""
    deadline_s: float | None = None


def on_the_wire(request: SampleRequest, rid: str, index: int, n: int, made: Sequence[int]) -> GenerateRequest:
    """The request as an engine gets it for the `n` members from `index` on, which have the tokens `made` so far. A
    member that goes on alone draws what it would have drawn among all."""
    params = request.params
    budget = None if params.max_new_tokens is None else params.max_new_tokens - len(made)
    seed = params.sampling_seed
    if n == 1 and seed is not None:
        seed = sample_seed(seed, index)
    return GenerateRequest(
        rid=rid,
        input_ids=None if request.text else [*request.token_ids, *made],
        text=request.text or None,
        sampling_params=replace(params, n=n, max_new_tokens=budget, sampling_seed=seed),
        return_logprob=request.log_probs,
        priority=request.priority,
    )


def told_each(wire: GenerateRequest, tokens: int) -> GenerateRequest:
    """The request to an engine that would tell of a member only when it has ended."""
    params = wire.sampling_params
    if isinstance(params, list):
        return wire
    return replace(wire, sampling_params=replace(params, stream_interval=tokens))


def worth_a_stream(request: SampleRequest) -> bool:
    """Whether hearing of each member when it ends, instead of all at the end, gives slots back in time that counts."""
    budget = request.params.max_new_tokens
    return request.n > 1 and (budget is None or budget > SHORT_RESPONSE)
