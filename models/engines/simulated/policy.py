"""What the simulated engine writes: tokens, lengths and log-probs as pure functions, for tests to recompute.

The "policy" draws uniformly from the vocabulary without its last id, which stands for the end of a response. When a
response ends is not left to its tokens but to a length drawn from the request's seed, so that lengths have exactly the
configured distribution. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from configs.schema.engine import SimulatedEngineConfig
from models.engines.noise import mix, uniform, uniforms

_LENGTH_POSITION: Final = -1  # of the noise that draws a length; tokens use positions from 0


def simulated_token(prompt: Sequence[int], seed: int, position: int, version: str, vocab_size: int) -> int:
    """The token at `position` (counted from the start of the prompt) of the response to `prompt` by weights `version`.

    Sample i of a request with sampling seed s has seed `noise.sample_seed(s, i)`. The last token of a response that
    ended by itself is not drawn: it is the request's first stop token id, else `vocab_size - 1`.
    """
    return int(uniform(_stream(prompt_key(prompt), seed, version), position) * (vocab_size - 1))


def simulated_tokens(
    key: bytes, seed: int, positions: npt.NDArray[np.int64], version: str, vocab_size: int
) -> npt.NDArray[np.int32]:
    """`simulated_token` for many positions; `key` is `prompt_key(prompt)`."""
    drawn = uniforms(_stream(key, seed, version), positions) * (vocab_size - 1)
    return drawn.astype(np.int32)


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


def prompt_key(prompt: Sequence[int]) -> bytes:
    """A prompt as little-endian 32-bit ids."""
    return np.asarray(prompt, dtype="<i4").tobytes()


def _stream(key: bytes, seed: int, version: str) -> int:
    return mix(mix(xxhash.xxh3_64_intdigest(key) ^ mix(seed)) ^ xxhash.xxh3_64_intdigest(version.encode()))
