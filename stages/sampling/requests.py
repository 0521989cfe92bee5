"""What a caller may ask of engines: a sampled answer, or log-probs of tokens that are there. No engine is named in it.

Invariant: a request says whose weights it wants (`policy`), never which engine: it may be answered by several, one
after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from models.engines.protocol import SamplingParams
from stages.engine_entries import POLICY
from stages.sampling.slots import FIRST_COME


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
