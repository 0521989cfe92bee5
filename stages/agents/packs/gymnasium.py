"""Pack: environments of gymnasium with discrete actions, in text (the package `gymnasium`).

    [[environment]]
    name = "gymnasium"
    options = { game = "FrozenLake-v1", settings = { is_slippery = false }, actions = ["left", "down", "right", "up"] }

The model reads the environment's drawing (render mode `ansi`, if available) or its observation. It answers with an
action: a name of `actions`, or a number. The reward at the end is the sum over all steps.

Invariant: an answer without an action costs a turn, and nothing else.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from stages.agents.environment import Start, Step, Task, Turn
from stages.agents.random_state import Seeded
from stages.agents.tool_episode import shortened
from stages.chat.messages import Message

_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")
_MARKED: Final = re.compile(r"\x1b\[[0-9;]*m(\w)\x1b\[0m")  # the player's position in toy_text
_READ_CHARS: Final = 2000  # of the end of an answer


class Gymnasium(Seeded):
    """One episode. `settings` are those of `gymnasium.make`."""

    def __init__(
        self,
        *,
        game: str = "FrozenLake-v1",
        settings: Mapping[str, Any] | None = None,
        actions: Sequence[str] = (),
        instructions: str = "",
        max_turns: int = 100,
        result_chars: int = 8192,
    ) -> None:
        if importlib.util.find_spec("gymnasium") is None:
            raise ValueError("the pack gymnasium needs its package: pip install gymnasium")
        self._game, self._settings, self._actions = game, dict(settings or {}), [name.lower() for name in actions]
        self._instructions, self._max_turns, self._result_chars = instructions, max_turns, result_chars
        self._return = 0.0

    async def reset(self, task: Task) -> Start:
        import gymnasium

        seed = self.begin(task)
        with self._random.drawn_from():
            modes = gymnasium.spec(self._game)
            drawn = {"render_mode": "ansi"} if "ansi" in _render_modes(modes) else {}
            self._world = gymnasium.make(self._game, **{**drawn, **self._settings})
            if not isinstance(self._world.action_space, gymnasium.spaces.Discrete):
                raise ValueError(
                    f"{self._game} has actions {self._world.action_space}; only discrete actions can be written as text"
                )
            observation, _ = self._world.reset(seed=seed)
            self._first, self._count = int(self._world.action_space.start), int(self._world.action_space.n)
            sight = self._sight(observation)
        known = ", ".join(self._actions) or f"a number from {self._first} to {self._first + self._count - 1}"
        instructions = self._instructions or f"Answer with an action in the last line: {known}."
        return Start((Message("system", instructions), Message("user", sight)))

    async def step(self, turn: Turn) -> Step:
        action = self._action(turn.message.content)
        done, text = False, "That is no action.\n"
        if action is not None:
            with self._random.drawn_from():
                observation, reward, terminated, truncated, _ = self._world.step(action)
                self._return += float(reward)
                done, text = bool(terminated or truncated), self._sight(observation)
        if done or turn.truncated or turn.last or turn.number + 1 >= self._max_turns:
            return Step(reward=self._return, done=True, metrics={"finished": float(done), "return": self._return})
        return Step((Message("user", text),))

    async def close(self) -> None:
        if hasattr(self, "_world"):
            self._world.close()

    def _action(self, text: str) -> int | None:
        """The last action in the last line."""
        lines = text[-_READ_CHARS:].strip().lower().splitlines()
        for word in reversed(re.findall(r"\w+", lines[-1]) if lines else []):
            if word in self._actions:
                return self._first + self._actions.index(word)
            if word.isdecimal() and self._first <= int(word) < self._first + self._count:
                return int(word)
        return None

    def _sight(self, observation: object) -> str:
        drawn = self._world.render() if self._world.render_mode == "ansi" else None
        text = _COLOURS.sub("", _MARKED.sub(r"[\1]", drawn)) if isinstance(drawn, str) else str(observation)
        return shortened(text.strip("\n"), self._result_chars) + "\n"


def _render_modes(spec: Any) -> Sequence[str]:
    """The render modes of a spec's class, without an instance."""
    from gymnasium.envs.registration import load_env_creator

    creator = load_env_creator(spec.entry_point) if isinstance(spec.entry_point, str) else spec.entry_point
    return tuple(getattr(creator, "metadata", {}).get("render_modes", ()))
