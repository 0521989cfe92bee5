"""Random state for each episode of a library that draws from the random state of the whole process."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any, Final, Literal

import numpy as np

from stages.agents.environment import Task

_HELDOUT: Final = 1 << 30  # seeds from here on are held out


class RandomState:
    """The states of `random` and of numpy's legacy functions, for one episode."""

    def __init__(self, seed: int) -> None:
        self._python = random.Random(seed).getstate()
        self._numpy = np.random.RandomState(seed & 0xFFFFFFFF).get_state()

    @contextmanager
    def drawn_from(self) -> Iterator[None]:
        """In the block, this is the random state of the process. It must not await anything."""
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
    """An environment whose tasks are seeds: the same seed is the same game, and the splits share no seed."""

    _random: RandomState

    @classmethod
    def tasks(cls, split: Literal["train", "heldout"], seed: int) -> Iterator[Mapping[str, Any]]:
        """Seeds of episodes, endless."""
        for number in count(_HELDOUT if split == "heldout" else seed * 100_003 % (_HELDOUT >> 1)):
            yield {"seed": number}

    def begin(self, task: Task) -> int:
        """The seed of the task. Afterwards `_random` has its state."""
        seed = int(task.metadata.get("seed", task.seed)) & 0x7FFFFFFF
        self._random = RandomState(seed)
        return seed
