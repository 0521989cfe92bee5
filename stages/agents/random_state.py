"""Games of a library that draws from the random state of the whole process, as if each episode had its own."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any, Final, Literal

import numpy as np

from stages.agents.environment import Task

_HELDOUT: Final = 1 << 30  # seeds from here on are never trained


class RandomState:
    """The states of `random` and of numpy's old functions, of one episode."""

    def __init__(self, seed: int) -> None:
        self._python = random.Random(seed).getstate()
        self._numpy = np.random.RandomState(seed & 0xFFFFFFFF).get_state()

    @contextmanager
    def drawn_from(self) -> Iterator[None]:
        """In the block, the process's state is this one. It must not wait for anything: others would draw from it."""
        before = random.getstate(), np.random.get_state()
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        try:
            yield
        finally:
            self._python, self._numpy = random.getstate(), np.random.get_state()
            random.setstate(before[0])
            np.random.set_state(before[1])


class Seeded:
    """An environment whose tasks are seeds, of which the splits share none: the same seed is the same game."""

    _random: RandomState

    @classmethod
    def tasks(cls, split: Literal["train", "heldout"], seed: int) -> Iterator[Mapping[str, Any]]:
        """Seeds of episodes, without end."""
        for number in count(_HELDOUT if split == "heldout" else seed * 100_003 % (_HELDOUT >> 1)):
            yield {"seed": number}

    def begin(self, task: Task) -> int:
        """The seed of the task; `_random` is its state from here on."""
        seed = int(task.metadata.get("seed", task.seed)) & 0x7FFFFFFF
        self._random = RandomState(seed)
        return seed
