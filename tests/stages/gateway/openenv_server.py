"""A server of OpenEnv with a game: `python openenv_server.py SOCKET_FD`. Run by an interpreter that has openenv.

The number is the seed's last digit; a wrong guess earns -0.5, a guess of 99 raises.
"""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):  # type: ignore[misc]
    guess: int


class Said(Observation):  # type: ignore[misc]
    hint: str


class Game(Environment):  # type: ignore[misc]
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, least: int = 0, **rest: Any) -> Said:
        self._state = State(episode_id=episode_id, step_count=0)
        self.number = (seed or 0) % 10
        return Said(hint=f"{least}-9:")

    def step(self, action: Guess, timeout_s: float | None = None, **rest: Any) -> Said:
        if action.guess == 99:
            raise RuntimeError("99 is out of the question")
        if action.guess == self.number:
            return Said(hint="=", done=True, reward=1.0)
        return Said(hint="+" if action.guess < self.number else "-", reward=-0.5)

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    app = create_fastapi_app(Game, Guess, Said, max_concurrent_envs=4)
    sys.stdout.write("up\n")  # what connects from here on is served
    sys.stdout.flush()
    uvicorn.run(app, fd=int(sys.argv[1]), log_level="warning")
