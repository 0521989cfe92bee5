"""Pack: games of textarena for one player (the package `textarena`).

    [[environment]]
    name = "textarena"
    options = { game = "GuessTheNumber-v0" }

The model reads the game's texts unchanged, and the game the model's. The reward at the end is the game's. Games that
need data of NLTK or a later Python raise their own error in `reset`.

Invariant: each episode has its own random state: the same seed is the same game, whatever other games the process
plays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stages.agents.environment import Start, Step, Task, Turn, need_package
from stages.agents.packs.gymnasium import Seeded
from stages.chat.messages import Message
from stages.tools.tool import shortened

_PLAYER = 0


@dataclass
class Textarena(Seeded):
    """One game. `max_turns` of the model, `result_chars` of one observation, `settings` of the game."""

    game: str = "GuessTheNumber-v0"
    settings: Mapping[str, Any] = field(default_factory=dict)
    max_turns: int = 50
    result_chars: int = 8192

    _seen = 0  # characters of the observation that the model has read

    def __post_init__(self) -> None:
        need_package("textarena", "textarena")

    async def reset(self, task: Task) -> Start:
        import textarena

        seed = self.begin(task)
        with self._random.drawn_from():
            self._world = textarena.make(self.game, **self.settings)
            self._world.reset(num_players=1, seed=seed)
        return Start((Message("user", self._observed()),))

    async def step(self, turn: Turn) -> Step:
        with self._random.drawn_from():
            done, _ = self._world.step(turn.message.content)
        if not done and not turn.truncated and not turn.last and turn.number + 1 < self.max_turns:
            return Step((Message("user", self._observed()),))
        rewards, facts = self._world.close()
        reward = float((rewards or {}).get(_PLAYER, 0.0)) if done else 0.0
        invalid = bool((facts or {}).get(_PLAYER, {}).get("invalid_move", False))
        return Step(reward=reward, done=True, metrics={"finished": float(done), "invalid": float(invalid)})

    def _observed(self) -> str:
        """The new part of the observation: games show their whole history each time."""
        _, text = self._world.get_observation()
        new = text[self._seen :] if isinstance(text, str) else str(text)
        self._seen = len(text) if isinstance(text, str) else 0
        return shortened(new.strip("\n"), self.result_chars) or "(nothing new)"
