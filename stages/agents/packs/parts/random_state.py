"""Random numbers of a library that draws from the state of the whole process, as if each episode had its own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np


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
