"""What the simulated engine answers: lengths, tokens, scores of prompts, and which prefixes its cache holds. No torch.

Invariant: a client may resend an aborted response (prompt plus partial output) to the same engine. It gets the rest of
its planned length, so that aborting does not change the distribution of lengths.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from statistics import NormalDist
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from configs.schema.rollout import SimulatedEngineConfig
from models.engines.core import Completion
from models.engines.noise import mix, uniform, uniforms
from models.engines.protocol import FinishReason

# --------------------------------------------------------------------------------------------------
# What the simulated engine writes: tokens, lengths and log-probs as pure functions, for tests to recompute.
#
# The "policy" draws uniformly from the vocabulary without its last id, which stands for the end of a response. When a
# response ends is not left to its tokens but to a length drawn from the request's seed, so that lengths have exactly
# the configured distribution. No torch.


_LENGTH_POSITION: Final = -1  # of the noise that draws a length; tokens use positions from 0


def simulated_tokens(
    key: bytes, seed: int, positions: npt.NDArray[np.int64], version: str, vocab_size: int
) -> npt.NDArray[np.int32]:
    """The tokens at `positions` (counted from the start of the prompt) of a response by weights `version`.

    `key`: the prompt as little-endian 32-bit ids. Sample i of a request with sampling seed s has seed
    `noise.sample_seed(s, i)`. The last token of a response that ended by itself is not drawn: it is the request's first
    stop token id, else `vocab_size - 1`.
    """
    stream = mix(mix(xxhash.xxh3_64_intdigest(key) ^ mix(seed)) ^ xxhash.xxh3_64_intdigest(version.encode()))
    return (uniforms(stream, positions) * (vocab_size - 1)).astype(np.int32)


def simulated_length(config: SimulatedEngineConfig, seed: int) -> int:
    """Tokens of a response that nothing cuts short: lognormal with the configured mean and sigma, at most the cap."""
    location = math.log(config.length_mean) - config.length_sigma**2 / 2
    u = min(max(uniform(seed, _LENGTH_POSITION), 1e-12), 1.0 - 1e-12)  # the inverse is infinite at the ends
    length = round(math.exp(location + config.length_sigma * NormalDist().inv_cdf(u)))
    return min(max(length, 1), config.length_cap)


def simulated_log_prob(vocab_size: int) -> float:
    """Log-prob of every token: the draw is uniform."""
    return -math.log(vocab_size - 1)


def simulated_scores(
    prompt: npt.NDArray[np.int32], first: int, model_path: str, vocab_size: int
) -> npt.NDArray[np.float64]:
    """[P - first] log-probs of the prompt's tokens from position `first` >= 1 on.

    Uniform less a number in [0, 1) that hangs on the checkpoint's path, the position, the token and the one before it:
    another checkpoint, or the same tokens in another place, have other scores.
    """
    ids = prompt.astype(np.int64)
    positions = np.arange(first, len(prompt), dtype=np.int64)
    pairs = (ids[first - 1 : -1] << 32) ^ ids[first:]
    noise = uniforms(xxhash.xxh3_64_intdigest(model_path.encode()), pairs ^ (positions << 20))
    return simulated_log_prob(vocab_size) - noise


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
        length = max(length, completion.rule.min_new_tokens)
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
        natural = self._left.get(xxhash.xxh3_64_intdigest(completion.prompt_key))
        if natural is None:
            natural = simulated_length(self._config, completion.seed)
        context = completion.prompt_key + np.asarray(completion.output_ids, dtype="<i4").tobytes()
        self._left[xxhash.xxh3_64_intdigest(context)] = max(1, natural - count)
        if len(self._left) > _REMEMBERED:
            self._left.popitem(last=False)


# --------------------------------------------------------------------------------------------------
# The prefix cache: hashes of blocks; the least recently used blocks go first.


BLOCK: Final = 64  # tokens
_TOKEN_BYTES: Final = 4


class PrefixIndex:
    """Remembers contexts block by block, and whole prompts. `capacity` in tokens."""

    def __init__(self, capacity: int) -> None:
        self._blocks = max(1, capacity // BLOCK)
        self._known: OrderedDict[int, None] = OrderedDict()

    def cached(self, completion: Completion) -> int:
        """Tokens of the prompt that are known; the prompt is known from now on. As in SGLang, the last token of a
        prompt is always computed."""
        count = completion.prompt_tokens
        whole = xxhash.xxh3_64_intdigest(completion.prompt_key + completion.extra_key.encode(), seed=count)
        if whole in self._known:
            self._touch([whole])
            return count - 1
        chain = _chain(completion.prompt_key, completion.extra_key)
        hits = next((index for index, block in enumerate(chain) if block not in self._known), len(chain))
        self._touch([*chain, whole])
        return min(hits * BLOCK, count - 1)

    def remember(self, completion: Completion) -> None:
        """A finished context can be continued."""
        if len({label for label, _ in completion.span_starts}) > 1:
            return  # its cache holds more than one version
        output = np.asarray(completion.output_ids, dtype="<i4").tobytes()
        self._touch(_chain(completion.prompt_key + output, completion.extra_key))

    def flush(self) -> None:
        self._known.clear()

    def _touch(self, blocks: list[int]) -> None:
        for block in blocks:
            self._known[block] = None
            self._known.move_to_end(block)
        while len(self._known) > self._blocks:
            self._known.popitem(last=False)


def _chain(context: bytes, extra_key: str) -> list[int]:
    """Hash of each whole block together with all before it."""
    width = BLOCK * _TOKEN_BYTES
    chain: list[int] = []
    seed = xxhash.xxh3_64_intdigest(extra_key.encode())
    for start in range(0, len(context) - width + 1, width):
        seed = xxhash.xxh3_64_intdigest(context[start : start + width], seed=seed)
        chain.append(seed)
    return chain
