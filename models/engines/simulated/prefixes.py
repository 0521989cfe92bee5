"""Which prefixes a simulated engine would find in its cache: hashes of blocks, least recently used forgotten first."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import numpy as np
import xxhash

from models.engines.core import Completion

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
