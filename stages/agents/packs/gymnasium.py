"""Pack: environments of gymnasium with discrete actions, in text (the package `gymnasium`).

    [[environment]]
    name = "gymnasium"
    options = { game = "FrozenLake-v1", settings = { is_slippery = false }, actions = ["left", "down", "right", "up"] }

The model reads the environment's drawing (render mode `ansi`, if available) or its observation. It answers with an
action: a name of `actions`, or a number. The reward at the end is the sum over all steps.

Invariant: an answer without an action costs a turn, and nothing else.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final, Literal

import numpy as np

from stages.agents.environment import Environment, Start, Step, Task, Turn, need_package
from stages.chat.messages import Message
from stages.tools.tool import shortened

_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")
_MARKED: Final = re.compile(r"\x1b\[[0-9;]*m(\w)\x1b\[0m")  # the player's position in toy_text
_READ_CHARS: Final = 2000  # of the end of an answer
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


class Seeded(Environment):
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


@dataclass
class Gymnasium(Seeded):
    """One episode. `settings` are those of `gymnasium.make`."""

    game: str = "FrozenLake-v1"
    settings: Mapping[str, Any] = field(default_factory=dict)
    actions: Sequence[str] = ()
    instructions: str = ""
    max_turns: int = 100
    result_chars: int = 8192

    _return = 0.0

    def __post_init__(self) -> None:
        need_package("gymnasium", "gymnasium")
        self.actions = [name.lower() for name in self.actions]

    async def reset(self, task: Task) -> Start:
        import gymnasium

        seed = self.begin(task)
        with self._random.drawn_from():
            drawn = {"render_mode": "ansi"} if "ansi" in _render_modes(gymnasium.spec(self.game)) else {}
            self._world = gymnasium.make(self.game, **{**drawn, **self.settings})
            if not isinstance(self._world.action_space, gymnasium.spaces.Discrete):
                raise ValueError(
                    f"{self.game} has actions {self._world.action_space}; only discrete actions can be written as text"
                )
            observation, _ = self._world.reset(seed=seed)
            self._first, self._count = int(self._world.action_space.start), int(self._world.action_space.n)
            sight = self._sight(observation)
        known = ", ".join(self.actions) or f"a number from {self._first} to {self._first + self._count - 1}"
        instructions = self.instructions or f"Answer with an action in the last line: {known}."
        return Start((Message("system", instructions), Message("user", sight)))

    async def step(self, turn: Turn) -> Step:
        action = self._action(turn.message.content)
        done, text = False, "That is no action.\n"
        if action is not None:
            with self._random.drawn_from():
                observation, reward, terminated, truncated, _ = self._world.step(action)
                self._return += float(reward)
                done, text = bool(terminated or truncated), self._sight(observation)
        if done or turn.truncated or turn.last or turn.number + 1 >= self.max_turns:
            return Step(reward=self._return, done=True, metrics={"finished": float(done), "return": self._return})
        return Step((Message("user", text),))

    async def close(self) -> None:
        if hasattr(self, "_world"):
            self._world.close()

    def _action(self, text: str) -> int | None:
        """The last action in the last line."""
        lines = text[-_READ_CHARS:].strip().lower().splitlines()
        for word in reversed(re.findall(r"\w+", lines[-1]) if lines else []):
            if word in self.actions:
                return self._first + self.actions.index(word)
            if word.isdecimal() and self._first <= int(word) < self._first + self._count:
                return int(word)
        return None

    def _sight(self, observation: object) -> str:
        drawn = self._world.render() if self._world.render_mode == "ansi" else None
        text = _COLOURS.sub("", _MARKED.sub(r"[\1]", drawn)) if isinstance(drawn, str) else str(observation)
        return shortened(text.strip("\n"), self.result_chars) + "\n"


def _render_modes(spec: Any) -> Sequence[str]:
    """The render modes of a spec's class, without an instance."""
    from gymnasium.envs.registration import load_env_creator

    creator = load_env_creator(spec.entry_point) if isinstance(spec.entry_point, str) else spec.entry_point
    return tuple(getattr(creator, "metadata", {}).get("render_modes", ()))
