"""Plans how long a simulated response becomes, and writes its tokens and the scores of its prompt when it ends.

Invariant: a response that was aborted and is sent again (prompt plus partial output, to the same engine) gets the
tokens that were left of its planned length, so that aborting does not change the distribution of lengths.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import numpy as np
import xxhash

from configs.schema.engine import SimulatedEngineConfig
from models.engines.core import Completion
from models.engines.protocol import FinishReason
from models.engines.simulated.policy import (
    simulated_length,
    simulated_log_prob,
    simulated_scores,
    simulated_tokens,
)

_REMEMBERED: Final = 65_536  # aborted responses whose rest is kept in mind


class Writer:
    """Content of the responses of one engine."""

    def __init__(self, config: SimulatedEngineConfig, model_path: str) -> None:
        self._config, self._model_path = config, model_path
        self._left: OrderedDict[int, int] = OrderedDict()  # hash of prompt plus partial output -> tokens left

    def plan(self, completion: Completion) -> tuple[int, bool]:
        """Output tokens of a completion, and whether it ends by itself there. With `ignore_eos` (no stop ids) it is as
        long as allowed."""
        if not completion.stop_ids:
            return completion.max_new, False
        left = self._left.get(xxhash.xxh3_64_intdigest(completion.prompt_key))
        length = left if left is not None else simulated_length(self._config, completion.seed)
        length = max(length, completion.min_new)
        return min(length, completion.max_new), length <= completion.max_new

    def extend(self, completion: Completion, count: int) -> None:
        """Lengthen the outputs to `count` tokens, each by the version of its span."""
        size, start, have = self._config.vocab_size, completion.prompt_tokens, len(completion.output_ids)
        for span in completion.spans_over(count):
            positions = np.arange(start + max(span.start, have), start + span.end, dtype=np.int64)
            tokens = simulated_tokens(completion.prompt_key, completion.seed, positions, span.version, size)
            completion.output_ids += tokens.tolist()
        completion.log_probs = [simulated_log_prob(size)] * count

    def write(self, completion: Completion, count: int, reason: FinishReason) -> None:
        """Fill in the outputs at the end: `count` tokens, what streamed of them already included."""
        self.extend(completion, count)
        if reason.type == "stop":
            completion.output_ids[-1] = completion.stop_ids[0]
        elif reason.type == "abort" and count and completion.stop_ids:
            self._remember(completion, count)
        if completion.to_score and completion.span_starts:  # it entered
            first = completion.score_from + 1
            scores = simulated_scores(completion.prompt, first, self._model_path, self._config.vocab_size)
            completion.prompt_log_probs = [None, *scores.tolist()]

    def _remember(self, completion: Completion, count: int) -> None:
        key = xxhash.xxh3_64_intdigest(completion.prompt_key)
        natural = self._left.get(key)
        if natural is None:
            natural = simulated_length(self._config, completion.seed)
        context = completion.prompt_key + np.asarray(completion.output_ids, dtype="<i4").tobytes()
        self._left[xxhash.xxh3_64_intdigest(context)] = max(1, natural - count)
        if len(self._left) > _REMEMBERED:
            self._left.popitem(last=False)
